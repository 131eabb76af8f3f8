"""Makes a `.tinyloop` file from a checkpoint: safetensors weights and config.json."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import CHUNK_ELEMENTS, Checkpoint, CheckpointError
from .config import is_scale, may_be_int8, scale_name, scale_shapes
from .export import read_description
from .families import Layout, read_layout
from .format import FormatError, Progress, TensorSpec, write_file
from .quantize import QUANTIZATIONS, quantize_rows
from .rounding import convert_dtype, is_infinite
from .sources import Source, described_sources, find_sources
from .special_ids import begin_id, end_ids

__all__ = ["DTYPE_NAMES", "QUANTIZATIONS", "CheckpointError", "Report", "convert"]

# What `dtype` and `--dtype` accept, and the file's names for it.
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Report:
    """What a conversion made: `parameters` by dtype, `blobs` in bytes by name.

    `unknown_keys` are keys of config.json that the converter knows nothing of; `skipped` are
    tensors of the checkpoint that are not needed; `notes` say what is known to be wrong in it.
    """

    path: Path
    family: str
    size: int
    parameters: dict[str, int]
    blobs: dict[str, int]
    unknown_keys: list[str]
    skipped: list[str]
    notes: list[str]


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Converts the checkpoint `src` to the file `out`, which appears only when complete.

    `src` is a folder with config.json and weights, a safetensors file with config.json beside it,
    or a file of `tinyloop export`. `dtype` is a key of DTYPE_NAMES; None keeps each tensor's own.
    `quantize` is a key of QUANTIZATIONS: weights of linear layers and embeddings become int8, the
    other tensors follow `dtype`. `progress(name, done, total)` is called after each tensor, with
    bytes. Raises CheckpointError (a ValueError) for what is not supported, missing or left over, by
    name, and OSError from the disk.
    """
    _check_option("dtype", dtype, DTYPE_NAMES)
    _check_option("quantize", quantize, QUANTIZATIONS)
    checkpoint = Checkpoint(Path(src))
    _check_target(checkpoint, Path(out))
    try:
        return _convert(checkpoint, Path(out), dtype, quantize, progress)
    except FormatError as error:  # a checkpoint that no file can be made of
        raise CheckpointError(str(error)) from None


def _convert(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str | None,
    quantize: str | None,
    progress: Progress | None,
) -> Report:
    if checkpoint.description is None:
        family, layout, unknown_keys = read_layout(checkpoint.config, checkpoint.tensors)
        sources = find_sources(checkpoint, layout)
        layout, blobs = _with_blobs(checkpoint, layout)
    else:
        family, unknown_keys = "tinyloop", []
        layout, blobs = _described(checkpoint.description)
        sources = described_sources(checkpoint, layout.config)
    tensors = _Tensors(checkpoint, sources, dtype, quantize)
    write_file(out, layout.config, tensors.specs, tensors.read, blobs, progress)
    return Report(
        path=out,
        family=family,
        size=out.stat().st_size,
        parameters=tensors.parameters(),
        blobs={name: len(blob) for name, blob in blobs.items()},
        unknown_keys=unknown_keys,
        skipped=list(layout.skipped),
        notes=list(layout.notes),
    )


def _check_option(name: str, value: str | None, allowed: Iterable[str]) -> None:
    if value is not None and value not in allowed:
        raise CheckpointError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")


def _described(description: str) -> tuple[Layout, dict[str, bytes]]:
    """The layout of a file that brings its config and blobs along; its tensors have their names."""
    config, blobs = read_description(description)
    return Layout(config, {}), blobs


def _check_target(checkpoint: Checkpoint, out: Path) -> None:
    """Refuses to replace what is read."""
    for file in {tensor.file for tensor in checkpoint.tensors.values()}:
        if out.exists() and out.samefile(file):
            raise CheckpointError(f"{out} is part of the checkpoint; give the file another name")


# ---- Tensors --------------------------------------------------------------------------------


class _Tensors:
    """The tensors to be written: `specs` in file order, scales right after their weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: list[Source],
        dtype: str | None,
        quantize: str | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._sources = {source.name: source for source in sources}
        self._group = QUANTIZATIONS[quantize] if quantize else None
        # Of quantized weights by the name of the scales: made with the weight, written after it.
        self._scales: dict[str, list[NDArray[np.float32]]] = {}
        self.specs: list[TensorSpec] = []
        int8 = {s.name for s in sources if checkpoint.dtype(s.stored) == "int8"}
        kept = int8 | {scale_name(name) for name in int8}
        for name, shape, stored, _ in sources:
            if quantize and name not in kept and may_be_int8(name, shape):
                one, groups = scale_shapes(shape)
                self.specs.append(TensorSpec(name, "int8", shape))
                self._scales[scale_name(name)] = []
                shape = groups if self._group else one
                self.specs.append(TensorSpec(scale_name(name), "float32", shape))
            else:
                target = DTYPE_NAMES[dtype] if dtype and name not in kept else None
                self.specs.append(TensorSpec(name, target or checkpoint.dtype(stored), shape))

    def parameters(self) -> dict[str, int]:
        """Numbers by dtype, without scales."""
        counts: dict[str, int] = {}
        for spec in self.specs:
            if not is_scale(spec.name):
                counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.n_elements
        return counts

    def read(self, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        """The tensor's elements in chunks, in the spec's dtype."""
        if spec.name in self._scales:
            parts = self._scales[spec.name]
            while parts:
                yield parts.pop(0)
            return
        source = self._sources[spec.name]
        stored = self._checkpoint.dtype(source.stored)
        if spec.dtype == "int8" != stored:
            yield from self._quantized(source, stored)
        elif spec.dtype == stored:
            yield from self._checkpoint.read(source.stored, source.first, spec.n_elements)
        else:
            for chunk in self._checkpoint.read(source.stored, source.first, spec.n_elements):
                yield _rounded(chunk, stored, spec.dtype, source.stored)

    def _quantized(self, source: Source, stored: str) -> Iterator[NDArray[np.int8]]:
        rows, columns = source.shape
        step = columns * max(1, CHUNK_ELEMENTS // columns)
        scales = self._scales[scale_name(source.name)]
        chunks = self._checkpoint.read(source.stored, source.first, rows * columns, step)
        for chunk in chunks:
            weights = convert_dtype(chunk, stored, "float32").reshape(-1, columns)
            numbers, of_rows = quantize_rows(weights, self._group)
            if not np.isfinite(of_rows).all():
                raise CheckpointError(
                    f"tensor {source.stored} has values that are not finite; int8 has none"
                )
            scales.append(of_rows)
            yield numbers


def _rounded(chunk: NDArray[Any], source: str, target: str, name: str) -> NDArray[Any]:
    """The chunk in dtype `target`; refuses numbers that do not fit."""
    converted = convert_dtype(chunk, source, target)
    if np.any(is_infinite(converted, target) & ~is_infinite(chunk, source)):
        raise CheckpointError(f"tensor {name} has values that are too large for {target}")
    return converted


# ---- Blobs ----------------------------------------------------------------------------------


def _with_blobs(checkpoint: Checkpoint, layout: Layout) -> tuple[Layout, dict[str, bytes]]:
    """The blobs that the folder has something for, and the layout with what they tell."""
    notes, config, ids = list(layout.notes), layout.config, layout.end_ids
    if ids is None:
        ids, more = end_ids(checkpoint, config.vocab_size)
        notes += more
    if config.bos_id < 0:
        config = replace(config, bos_id=begin_id(checkpoint))
    blobs = {
        "tokenizer.json": checkpoint.bytes("tokenizer.json"),
        "chat_template": _chat_template(checkpoint),
        "card": checkpoint.bytes("MODEL_CARD.md") or checkpoint.bytes("README.md"),
        "end_ids": np.array(ids, "<i4").tobytes(),
    }
    if not blobs["tokenizer.json"] and checkpoint.has("tokenizer.model"):
        notes.append("tokenizer.model is there without tokenizer.json, which text needs")
    layout = replace(layout, config=config, notes=notes)
    return layout, {name: blob for name, blob in blobs.items() if blob}


def _chat_template(checkpoint: Checkpoint) -> bytes | None:
    """The chat template, with the special tokens that it names set in front of it.

    Templates write `bos_token` and the like, whose text only tokenizer_config.json has; so bound,
    the template needs nothing else.
    """
    settings = checkpoint.json("tokenizer_config.json") or {}
    own_file = checkpoint.bytes("chat_template.jinja")
    if own_file is not None:
        template: str | None = _decode(own_file, "chat_template.jinja")
    else:
        template = _template_text(settings.get("chat_template"))
    if template is None:
        return None
    bindings = ""
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and key in template:
            # Rendering drops a block's newline, so the template still begins on a fresh line.
            bindings += f"{{% set {key} = {json.dumps(text, ensure_ascii=False)} %}}\n"
    try:
        return (bindings + template).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            "tokenizer_config.json: the chat template is no Unicode text"
        ) from None


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{name} is not UTF-8") from None


def _template_text(value: Any) -> str | None:
    """The template of tokenizer_config.json: a text, or a list that names several."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"tokenizer_config.json: chat_template is {value!r}; it must be a text")
