"""Reads a checkpoint: config.json and safetensors weights, in one file or in shards.

The safetensors package gives numpy no bfloat16 ("data type 'bfloat16' not understood") and no
byte offsets, and its `deserialize` wants the whole file in memory. The file is a length, a JSON
header and the bytes, so it is read here, and tensors of any size stream in chunks.
"""

import json
from collections.abc import Iterator
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .export import METADATA_KEY, SAFETENSORS_DTYPES
from .format import DTYPES

SUFFIX = ".safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_ELEMENTS = 1 << 18  # 1 MiB of float32 stays in the processor's cache until it is written
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPE_OF = {its: own for own, its in SAFETENSORS_DTYPES.items()}
# int8 is convertible where `tinyloop export` wrote it with its scales; elsewhere it may mean
# anything.
_CONVERTIBLE = ("F32", "F16", "BF16")


class CheckpointError(ValueError):
    """A checkpoint lacks something, is damaged, or describes what cannot be converted."""


class StoredTensor(NamedTuple):
    """Where a tensor lies: `dtype` as safetensors names it, `begin` and `end` in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The directory of all tensors, and what says how they make a model.

    `path` is a folder, or a safetensors file with config.json beside it. `description` is the text
    that `tinyloop export` put into a safetensors file; such a file needs no config.json, and
    `config` is then empty. Raises CheckpointError that names the file and what is wrong, OSError if
    one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir() and not (path.is_file() and path.suffix == SUFFIX):
            raise CheckpointError(
                f"{path} is not a folder and not a {SUFFIX} file; give a file with weights, or "
                "the folder that holds config.json and them"
            )
        self.folder = path if path.is_dir() else path.parent
        self.description: str | None = None
        file = path / WEIGHTS if path.is_dir() else path
        if file.is_file():
            self.tensors, self.description = _read_directory(file)
        config = {} if self.description is not None else self.json("config.json")
        if config is None:
            raise CheckpointError(f"{self.folder} has no config.json")
        self.config = config
        if not file.is_file():
            self.tensors = _find_shards(self.folder, self.json(INDEX))

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the folder; None if there is no such file."""
        data = self.bytes(name)
        return None if data is None else _parse_object(data, name)

    def has(self, name: str) -> bool:
        """Whether the folder has such a file."""
        return (self.folder / name).is_file()

    def bytes(self, name: str) -> bytes | None:
        """A file of the folder; None if there is no such file."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def dtype(self, name: str) -> str:
        """A tensor's dtype as a key of DTYPES."""
        stored = self.tensors[name].dtype
        allowed = _CONVERTIBLE if self.description is None else tuple(_DTYPE_OF)
        if stored not in allowed:
            raise CheckpointError(
                f"tensor {name} has dtype {stored}; convertible are {', '.join(allowed)}"
            )
        return _DTYPE_OF[stored]

    def read(
        self, name: str, first: int = 0, count: int | None = None, step: int = 0
    ) -> Iterator[NDArray[Any]]:
        """Elements from `first` on in order, `step` at a time (0: some), in arrays of one buffer.

        An array's content is lost when the next one is asked for.
        """
        tensor = self.tensors[name]
        dtype = DTYPES[self.dtype(name)]
        count = prod(tensor.shape) - first if count is None else count
        buffer = np.empty(min(count, step or CHUNK_ELEMENTS), dtype)
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.begin + first * dtype.itemsize)
            while count:
                chunk = buffer[:count]
                _fill(chunk.view(np.uint8).data, stream, name)
                yield chunk
                count -= len(chunk)


def _fill(out: memoryview, stream: FileIO, name: str) -> None:
    while out:
        n_read = stream.readinto(out)
        if not n_read:
            raise CheckpointError(f"{Path(stream.name).name} ended inside tensor {name}")
        out = out[n_read:]


def _parse_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds no JSON object")
    return value


def _find_shards(folder: Path, index: dict[str, Any] | None) -> dict[str, StoredTensor]:
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
        for name, tensor in _read_directory(folder / shard)[0].items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"tensor {name} is in {shard}, but not in {INDEX} as such")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is not in {shard}, where {INDEX} has it")
    return tensors


def _read_directory(path: Path) -> tuple[dict[str, StoredTensor], str | None]:
    """The tensors of one safetensors file, and the description among its metadata.

    The tensors must lie in it without gaps or overlaps.
    """
    file_size = path.stat().st_size
    with path.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_size <= min(file_size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path.name} is no safetensors file: {file_size} bytes, header of {header_size}"
            )
        header = _parse_object(stream.read(header_size), f"the header of {path.name}")
    metadata = header.pop("__metadata__", None)
    description = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    data_start = 8 + header_size
    tensors = {name: _read_entry(path, name, entry, data_start) for name, entry in header.items()}
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][-2:]):
        if tensor.begin != end:
            raise CheckpointError(f"{path.name}: tensor {name} begins at {tensor.begin}, not {end}")
        end = tensor.end
    if end != file_size:
        raise CheckpointError(f"{path.name}: {file_size} bytes; its tensors end at {end}")
    return tensors, description if isinstance(description, str) else None


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
