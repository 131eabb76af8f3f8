"""Writes a `.tinyloop` file as safetensors, from which `tinyloop convert` makes it again.

Tensors keep their names, dtypes and bytes. The metadata's entry "tinyloop" is a JSON object: each
field of Config by its name, and, if there are any, "blobs": base64 text by name.
"""

import base64
import binascii
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from .config import Config, FormatError
from .format import DTYPES, Progress, Tensor, TinyloopFile, new_file, read_file

__all__ = ["METADATA_KEY", "SAFETENSORS_DTYPES", "read_description", "to_safetensors"]

METADATA_KEY = "tinyloop"
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}

_BLOBS = "blobs"
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
_HEADER_ALIGNMENT = 8


def to_safetensors(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> None:
    """Writes the `.tinyloop` file at `path` to `out`, which appears only when it is complete.

    Tensors are copied in pieces, and their checksums compared. `progress(name, done, total)` is
    called after each one, with bytes. Raises FormatError for a damaged file, or blobs that are too
    large for a safetensors header, and OSError from the disk.
    """
    file = read_file(path)
    # The widest elements first: each tensor is then aligned to its elements, as readers like it.
    names = sorted(file.tensors, key=lambda name: -DTYPES[file.tensors[name].dtype].itemsize)
    header = _header(file, names)
    done, total = len(header), len(header) + sum(file.tensors[name].size for name in names)
    with new_file(Path(out)) as stream:
        stream.write(header)
        for name in names:
            _copy(file, file.tensors[name], stream)
            done += file.tensors[name].size
            if progress is not None:
                progress(name, done, total)


def read_description(text: str) -> tuple[Config, dict[str, bytes]]:
    """The configuration and the blobs of a metadata entry. Raises FormatError if it is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"metadata {METADATA_KEY} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FormatError(f"metadata {METADATA_KEY} holds no JSON object")
    blobs = _decode_blobs(values.pop(_BLOBS, {}))
    names = {f.name for f in fields(Config)}
    if values.keys() != names:
        missing, unknown = sorted(names - values.keys()), sorted(values.keys() - names)
        raise FormatError(
            f"metadata {METADATA_KEY} must have every config field and no other: "
            f"missing are {missing[:5]}, unknown are {unknown[:5]}"
        )
    return Config(**values), blobs


def _description(config: Config, blobs: Mapping[str, bytes]) -> str:
    values: dict[str, Any] = config.values()
    if blobs:
        values[_BLOBS] = {name: base64.b64encode(blob).decode() for name, blob in blobs.items()}
    return json.dumps(values)


def _decode_blobs(blobs: Any) -> dict[str, bytes]:
    try:
        return {name: base64.b64decode(text, validate=True) for name, text in blobs.items()}
    except (AttributeError, TypeError, ValueError, binascii.Error):
        raise FormatError(
            f"metadata {METADATA_KEY}: {_BLOBS} must be an object of base64 texts"
        ) from None


def _header(file: TinyloopFile, names: list[str]) -> bytes:
    """What stands before the tensors' bytes, in which they lie in the order of `names`."""
    begins, end = {}, 0
    for name in names:
        begins[name] = end
        end += file.tensors[name].size
    entries: dict[str, Any] = {
        "__metadata__": {METADATA_KEY: _description(file.config, file.blobs)}
    }
    for name, tensor in file.tensors.items():
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [begins[name], begins[name] + tensor.size],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise FormatError(
            f"{file.path}: its directory and blobs take {len(text):,} bytes as a safetensors "
            f"header, which has at most {_MAX_HEADER_BYTES:,}"
        )
    return len(text).to_bytes(8, "little") + text


def _copy(file: TinyloopFile, tensor: Tensor, stream: BinaryIO) -> None:
    crc = 0
    for piece in file.source.pieces(tensor.offset, tensor.offset + tensor.size):
        crc = zlib.crc32(piece.data, crc)
        stream.write(piece.data)
    if crc != tensor.crc:
        raise FormatError(f"{file.path}: the bytes of {tensor.name} do not match their checksum")
