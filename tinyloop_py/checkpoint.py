"""Reads a checkpoint folder: config.json and safetensors weights, in one file or in shards.

The safetensors package gives numpy no bfloat16 ("data type 'bfloat16' not understood") and no
byte offsets, and its `deserialize` wants the whole file in memory. The file is a length, a JSON
header and the bytes, so it is read here, and tensors of any size stream in chunks.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .format import DTYPES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_ELEMENTS = 1 << 22
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# safetensors' dtype names and those of .tinyloop; others cannot be converted.
_DTYPE_OF = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class CheckpointError(ValueError):
    """A checkpoint folder lacks something, is damaged, or describes what cannot be converted."""


class StoredTensor(NamedTuple):
    """Where a tensor lies: `dtype` as safetensors names it, `begin` and `end` in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The parsed config.json and the directory of all tensors of a folder.

    Raises CheckpointError that names the file and what is wrong, OSError if one cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the one that holds config.json")
        self.folder = folder
        config = self.json("config.json")
        if config is None:
            raise CheckpointError(f"{folder} has no config.json")
        self.config = config
        self.tensors = _find_tensors(folder, self.json(INDEX))

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the folder; None if there is no such file."""
        data = self.bytes(name)
        return None if data is None else _parse_object(data, name)

    def bytes(self, name: str) -> bytes | None:
        """A file of the folder; None if there is no such file."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def dtype(self, name: str) -> str:
        """A tensor's dtype as a key of DTYPES."""
        stored = self.tensors[name].dtype
        if stored not in _DTYPE_OF:
            raise CheckpointError(
                f"tensor {name} has dtype {stored}; convertible are {', '.join(_DTYPE_OF)}"
            )
        return _DTYPE_OF[stored]

    def read(self, name: str) -> Iterator[NDArray[Any]]:
        """The tensor's elements in order, at most CHUNK_ELEMENTS at a time."""
        tensor = self.tensors[name]
        dtype = DTYPES[self.dtype(name)]
        left = prod(tensor.shape)
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            while left:
                chunk = np.fromfile(stream, dtype, min(left, CHUNK_ELEMENTS))
                if not len(chunk):
                    raise CheckpointError(f"{tensor.file.name} ended inside tensor {name}")
                left -= len(chunk)
                yield chunk


def _parse_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds no JSON object")
    return value


def _find_tensors(folder: Path, index: dict[str, Any] | None) -> dict[str, StoredTensor]:
    if (folder / WEIGHTS).is_file():
        return _read_directory(folder / WEIGHTS)
    if index is None:
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    ):
        raise CheckpointError(f"{INDEX}: weight_map must give a file of the folder for each tensor")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{INDEX} names {shard}, which is not there")
        for name, tensor in _read_directory(folder / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"tensor {name} is in {shard}, but not in {INDEX} as such")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is not in {shard}, where {INDEX} has it")
    return tensors


def _read_directory(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, which must lie in it without gaps or overlaps."""
    file_size = path.stat().st_size
    with path.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_size <= min(file_size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path.name} is no safetensors file: {file_size} bytes, header of {header_size}"
            )
        header = _parse_object(stream.read(header_size), f"the header of {path.name}")
    header.pop("__metadata__", None)
    data_start = 8 + header_size
    tensors = {name: _read_entry(path, name, entry, data_start) for name, entry in header.items()}
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][-2:]):
        if tensor.begin != end:
            raise CheckpointError(f"{path.name}: tensor {name} begins at {tensor.begin}, not {end}")
        end = tensor.end
    if end != file_size:
        raise CheckpointError(f"{path.name}: {file_size} bytes; its tensors end at {end}")
    return tensors


def _read_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = isinstance(dtype, str) and all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        )
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or begin > end:
        raise CheckpointError(f"{path.name}: the entry of tensor {name} is damaged: {entry!r}")
    if dtype in _DTYPE_OF and end - begin != prod(shape) * DTYPES[_DTYPE_OF[dtype]].itemsize:
        raise CheckpointError(
            f"{path.name}: tensor {name} has {end - begin} bytes; {dtype} {shape} takes others"
        )
    return StoredTensor(path, dtype, tuple(shape), data_start + begin, data_start + end)
