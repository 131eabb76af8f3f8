"""Makes a `.tinyloop` file from a checkpoint folder (safetensors weights and config.json)."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint, CheckpointError
from .config import Config, tensor_shapes
from .families import Keys, Layout, read_layout
from .format import Progress, TensorSpec, write_file
from .rounding import convert_dtype, is_infinite

__all__ = ["DTYPE_NAMES", "CheckpointError", "Report", "convert"]

# What `dtype` and `--dtype` accept, and the file's names for it.
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """What a conversion made: `parameters` by dtype, `blobs` in bytes by name.

    `unknown_keys` are keys of config.json that the converter knows nothing of; `skipped` are
    tensors of the checkpoint that are not needed.
    """

    path: Path
    family: str
    size: int
    parameters: dict[str, int]
    blobs: dict[str, int]
    unknown_keys: list[str]
    skipped: list[str]


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Converts the checkpoint folder `src` to the file `out`, which appears only when complete.

    `dtype` is a key of DTYPE_NAMES; None keeps each tensor's own. `progress(name, done, total)`
    is called after each tensor, with bytes. Raises CheckpointError (a ValueError) for what is not
    supported, missing or left over, by name, and OSError from the disk.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise CheckpointError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPE_NAMES)}")
    checkpoint = Checkpoint(Path(src))
    family, layout, unknown_keys = read_layout(checkpoint.config)
    skipped = _check_names(checkpoint, layout)
    _check_tied_head(checkpoint, layout)
    specs = _specs(checkpoint, layout, dtype)
    blobs = _blobs(checkpoint, layout.config)

    def read(spec: TensorSpec) -> Iterator[NDArray[Any]]:
        return _read_as(checkpoint, layout.names[spec.name], spec.dtype)

    write_file(out, layout.config, specs, read, blobs, progress)
    parameters: dict[str, int] = {}
    for spec in specs:
        parameters[spec.dtype] = parameters.get(spec.dtype, 0) + spec.n_elements
    return Report(
        path=Path(out),
        family=family,
        size=Path(out).stat().st_size,
        parameters=parameters,
        blobs={name: len(blob) for name, blob in blobs.items()},
        unknown_keys=unknown_keys,
        skipped=skipped,
    )


# ---- Tensors --------------------------------------------------------------------------------


def _list(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_names(checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """Refuses missing, left-over and wrongly shaped tensors; returns the skipped ones."""
    shapes = {layout.names[own]: shape for own, shape in tensor_shapes(layout.config).items()}
    missing = [name for name in shapes if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"tensors missing: {_list(missing)}")
    for name, shape in shapes.items():
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}; config.json asks for {list(shape)}"
            )
    left_over = sorted(checkpoint.tensors.keys() - shapes.keys())
    skipped = [name for name in left_over if layout.skipped.fullmatch(name)]
    unread = [name for name in left_over if name not in skipped and name != _head(layout)]
    if unread:
        raise CheckpointError(f"tensors that config.json does not call for: {_list(unread)}")
    return skipped


def _head(layout: Layout) -> str:
    return layout.names["head.weight"]


def _check_tied_head(checkpoint: Checkpoint, layout: Layout) -> None:
    """A head that is stored although it is tied must be the embedding, byte for byte."""
    head, embed = _head(layout), layout.names["embed.weight"]
    if not layout.config.tied_head or head not in checkpoint.tensors:
        return
    stored, wanted = checkpoint.tensors[head], checkpoint.tensors[embed]
    same = (stored.dtype, stored.shape) == (wanted.dtype, wanted.shape) and all(
        a.tobytes() == b.tobytes()
        for a, b in zip(checkpoint.read(head), checkpoint.read(embed), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"tensor {head} differs from {embed}, although tie_word_embeddings is true; "
            f"set that to false or leave {head} out"
        )


def _specs(checkpoint: Checkpoint, layout: Layout, dtype: str | None) -> list[TensorSpec]:
    specs = []
    for own, shape in tensor_shapes(layout.config).items():
        stored = checkpoint.dtype(layout.names[own])
        specs.append(TensorSpec(own, DTYPE_NAMES[dtype] if dtype else stored, shape))
    return specs


def _read_as(checkpoint: Checkpoint, name: str, target: str) -> Iterator[NDArray[Any]]:
    """The tensor's elements in chunks, rounded to `target`; refuses those that do not fit."""
    source = checkpoint.dtype(name)
    for chunk in checkpoint.read(name):
        converted = convert_dtype(chunk, source, target)
        if source != target and np.any(
            is_infinite(converted, target) & ~is_infinite(chunk, source)
        ):
            raise CheckpointError(f"tensor {name} has values that are too large for {target}")
        yield converted


# ---- Blobs ----------------------------------------------------------------------------------


def _blobs(checkpoint: Checkpoint, config: Config) -> dict[str, bytes]:
    """The blobs that the folder has something for."""
    end_ids = _end_ids(checkpoint, config.vocab_size)
    blobs = {
        "tokenizer.json": checkpoint.bytes("tokenizer.json"),
        "chat_template": _chat_template(checkpoint),
        "card": checkpoint.bytes("MODEL_CARD.md") or checkpoint.bytes("README.md"),
        "end_ids": np.array(end_ids, "<i4").tobytes(),
    }
    return {name: blob for name, blob in blobs.items() if blob}


def _end_ids(checkpoint: Checkpoint, vocab_size: int) -> list[int]:
    """Ids that end a generation: those of config.json, then what generation_config.json adds."""
    ids: dict[int, None] = {}
    for name in ("config.json", "generation_config.json"):
        keys = Keys(checkpoint.json(name) or {}, name)
        value = keys.get("eos_token_id", [])
        for token in value if isinstance(value, list) else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise keys.refuse("eos_token_id", f"ids are 0 .. {vocab_size - 1}")
            ids[token] = None
    return list(ids)


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
    return (bindings + template).encode()


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{name} is not UTF-8") from None


def _template_text(value: Any) -> str | None:
    """The template of tokenizer_config.json: a text, or a list that names several."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if type(entry) is dict}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"tokenizer_config.json: chat_template is {value!r}; it must be a text")
