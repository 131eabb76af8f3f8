"""The `.tinyloop` container: reader and writer. `docs/format.md` specifies it.

Nothing here needs the C library. All numbers in the file are little-endian; bfloat16 has no numpy
dtype and is carried as uint16 bit patterns.
"""

import os
import secrets
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import (
    CONFIG_LAYOUT,
    MAX_TENSORS,
    N_FIELDS,
    Config,
    FormatError,
    Stage,
    is_scale,
    pack_config,
    tensor_problems,
    tensor_shapes,
    unpack_config,
)

__all__ = [
    "DTYPES",
    "Config",
    "FormatError",
    "Stage",
    "Tensor",
    "TensorSpec",
    "TinyloopFile",
    "new_file",
    "read_file",
    "tensor_shapes",
    "write_file",
    "write_stream",
]

MAGIC = b"TINYLOOP"
VERSION = 1
MAX_META_SIZE = 256 << 20  # read whole before its checksum is known
MAX_BLOBS = 64
MAX_DIMS = 4

# How each dtype of the file is held in numpy, in the order of the file's dtype codes.
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
}
_DTYPE_NAMES = tuple(DTYPES)

_HEADER = struct.Struct("<8s2I6Q")
_HEADER_CRC_START = 16
_TENSOR = struct.Struct("<96s2I4Q2Q2I")
_BLOB = struct.Struct("<48s2Q")
_TENSOR_NAME_BYTES = 96
_BLOB_NAME_BYTES = 48
_TENSOR_ALIGNMENT = 64
_BLOB_ALIGNMENT = 8
_PIECE_BYTES = 1 << 20


# ---- Layout ---------------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    """A tensor to be written: `dtype` is a key of DTYPES, the layout row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the file holds of it."""
        return self.n_elements * int(DTYPES[self.dtype].itemsize)


class Tensor(NamedTuple):
    """A row of the tensor directory: `offset` and `size` in bytes, `crc` of the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    crc: int


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _place(start: int, sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """Offsets of parts that follow each other from `start`, and the end of the last one."""
    offsets = []
    for size in sizes:
        start = _align(start, alignment)
        offsets.append(start)
        start += size
    return offsets, start


def _directories_end(n_tensors: int, n_blobs: int) -> int:
    return _HEADER.size + CONFIG_LAYOUT.size + n_tensors * _TENSOR.size + n_blobs * _BLOB.size


def _check_meta_size(meta_size: int) -> None:
    if meta_size > MAX_META_SIZE:
        raise FormatError(f"meta_size is {meta_size}; at most {MAX_META_SIZE} are allowed")


# ---- Reader ---------------------------------------------------------------------------------


class _Source:
    """The bytes of a file, which stays open as long as this object lives.

    Never mapped: to touch a page that another process has cut off would end this one.
    """

    def __init__(self, path: Path) -> None:
        stream = path.open("rb", buffering=0)
        weakref.finalize(self, stream.close)
        self._descriptor = stream.fileno()
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Exactly these bytes, in an array of their own; FormatError where the file has ended."""
        out = np.empty(size, np.uint8)
        done = 0
        while done < size:
            n_read = os.preadv(self._descriptor, [out[done:].data], offset + done)
            if n_read == 0:
                raise FormatError(
                    f"{os.fstat(self._descriptor).st_size} bytes; it had {self.size} when it was "
                    "opened. Read it again once it is whole"
                )
            done += n_read
        return out

    def pieces(self, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
        """The bytes from start to end as arrays of limited size."""
        for offset in range(start, end, _PIECE_BYTES):
            yield self.read(offset, min(_PIECE_BYTES, end - offset))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name before the text of a FormatError."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


@dataclass(frozen=True, eq=False)
class TinyloopFile:
    """An open file whose header, config, directories and blobs have been checked.

    The tensors are read when they are asked for; a file that has become shorter by then raises
    FormatError.
    """

    path: Path
    config: Config
    tensors: dict[str, Tensor]
    blobs: dict[str, bytes]
    meta_size: int
    source: _Source

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.source.size

    @property
    def n_parameters(self) -> int:
        """Numbers in all tensors, without the scales of int8 weights."""
        return sum(
            prod(tensor.shape) for tensor in self.tensors.values() if not is_scale(tensor.name)
        )

    def array(self, name: str) -> NDArray[Any]:
        """A tensor in a new array, in the dtype of DTYPES (bfloat16: uint16 bits).

        Raises KeyError for a name that the file does not have.
        """
        tensor = self.tensors[name]
        with _naming(self.path):
            part = self.source.read(tensor.offset, tensor.size)
        return part.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def verify(self) -> list[str]:
        """What is wrong with the tensors, one sentence for each; empty if nothing.

        Reads the whole file: checksums, the zero bytes between tensors, and that the tensors are
        those that the configuration calls for.
        """
        problems = _tensor_set_problems(self.config, self.tensors.values())
        with _naming(self.path):
            problems += self._content_problems()
        return problems

    def _content_problems(self) -> Iterator[str]:
        end = self.meta_size
        for tensor in self.tensors.values():
            if self.source.read(end, tensor.offset - end).any():
                yield f"{tensor.name}: the gap before it is not zero"
            end = tensor.offset + tensor.size
            crc = 0
            for piece in self.source.pieces(tensor.offset, end):
                crc = zlib.crc32(piece.data, crc)
            if crc != tensor.crc:
                yield f"{tensor.name}: its bytes do not match its checksum"


def _tensor_set_problems(config: Config, tensors: Iterable[Tensor | TensorSpec]) -> list[str]:
    return tensor_problems(
        config, {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    )


class _Header(NamedTuple):
    magic: bytes
    version: int
    meta_crc: int
    file_size: int
    meta_size: int
    n_fields: int
    n_tensors: int
    n_blobs: int
    reserved: int


def read_file(path: str | os.PathLike[str]) -> TinyloopFile:
    """Opens a file and checks all of it but the tensors' bytes (see TinyloopFile.verify).

    Raises FormatError that names the file and what is wrong, OSError if it cannot be opened.
    """
    path = Path(path)
    with _naming(path):
        return _parse(path, _Source(path))


def _parse(path: Path, source: _Source) -> TinyloopFile:
    header = _read_header(source)
    meta = source.read(0, header.meta_size).tobytes()
    if zlib.crc32(meta[_HEADER_CRC_START:]) != header.meta_crc:
        raise FormatError("header, directories and blobs do not match their checksum")
    config = unpack_config(meta, _HEADER.size)
    tensors = _read_tensors(meta, header)
    blobs = _read_blobs(meta, header)
    return TinyloopFile(path, config, tensors, blobs, header.meta_size, source)


def _read_header(source: _Source) -> _Header:
    if source.size < _HEADER.size:
        raise FormatError(f"{source.size} bytes; a header alone has {_HEADER.size}")
    header = _Header(*_HEADER.unpack(source.read(0, _HEADER.size).data))
    if header.magic != MAGIC:
        raise FormatError(f"not a .tinyloop file: it begins with {header.magic!r}")
    if header.version != VERSION:
        raise FormatError(f"version {header.version}; this reader knows version {VERSION}")
    if header.file_size != source.size:
        raise FormatError(f"{source.size} bytes; its header says {header.file_size}")
    if header.n_fields != N_FIELDS:
        raise FormatError(f"{header.n_fields} config fields; version {VERSION} has {N_FIELDS}")
    if header.n_tensors > MAX_TENSORS:
        raise FormatError(f"{header.n_tensors} tensors; allowed are {MAX_TENSORS}")
    if header.n_blobs > MAX_BLOBS:
        raise FormatError(f"{header.n_blobs} blobs; allowed are {MAX_BLOBS}")
    if header.reserved:
        raise FormatError(f"reserved header field is {header.reserved}; it must be 0")
    directories_end = _directories_end(header.n_tensors, header.n_blobs)
    if header.meta_size % _TENSOR_ALIGNMENT or not (
        directories_end <= header.meta_size <= header.file_size
    ):
        raise FormatError(
            f"meta_size {header.meta_size}; it must be a multiple of {_TENSOR_ALIGNMENT} "
            f"from {directories_end} to {header.file_size}"
        )
    _check_meta_size(header.meta_size)
    return header


def _read_name(raw: bytes, kind: str, index: int) -> str:
    text, end, rest = raw.partition(b"\0")
    try:
        name = text.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{kind} {index}: its name {text!r} is not UTF-8") from None
    if not name or not end or rest.strip(b"\0"):
        raise FormatError(f"{kind} {index}: {raw!r} is not a name filled up with zero bytes")
    return name


def _read_tensors(meta: bytes, header: _Header) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    end = header.meta_size
    start = _HEADER.size + CONFIG_LAYOUT.size
    rows = meta[start : start + header.n_tensors * _TENSOR.size]
    for index, (raw_name, code, n_dims, *numbers) in enumerate(_TENSOR.iter_unpack(rows)):
        name = _read_name(raw_name, "tensor", index)
        *dims, offset, size, crc, reserved = numbers
        if name in tensors:
            raise FormatError(f"tensor {name} is there twice")
        if code >= len(_DTYPE_NAMES):
            raise FormatError(f"tensor {name}: dtype {code}; known are 0 .. {len(DTYPES) - 1}")
        if not 1 <= n_dims <= MAX_DIMS or not all(dims[:n_dims]) or any(dims[n_dims:]):
            raise FormatError(f"tensor {name}: {n_dims} dimensions do not fit the shape {dims}")
        if reserved:
            raise FormatError(f"tensor {name}: reserved field is {reserved}; it must be 0")
        spec = TensorSpec(name, _DTYPE_NAMES[code], tuple(dims[:n_dims]))
        if size != spec.nbytes:
            raise FormatError(
                f"tensor {name}: {size} bytes; its shape and dtype take {spec.nbytes}"
            )
        if offset != _align(end, _TENSOR_ALIGNMENT):
            raise FormatError(
                f"tensor {name}: offset {offset}; it must be {_align(end, _TENSOR_ALIGNMENT)}"
            )
        end = offset + size
        tensors[name] = Tensor(*spec, offset, size, crc)
    if end != header.file_size:
        raise FormatError(f"the last tensor ends at {end}, the file at {header.file_size}")
    return tensors


def _read_blobs(meta: bytes, header: _Header) -> dict[str, bytes]:
    blobs: dict[str, bytes] = {}
    end = _directories_end(header.n_tensors, header.n_blobs)
    rows = meta[end - header.n_blobs * _BLOB.size : end]
    for index, (raw_name, offset, size) in enumerate(_BLOB.iter_unpack(rows)):
        name = _read_name(raw_name, "blob", index)
        if name in blobs:
            raise FormatError(f"blob {name} is there twice")
        if offset != _align(end, _BLOB_ALIGNMENT):
            raise FormatError(
                f"blob {name}: offset {offset}; it must be {_align(end, _BLOB_ALIGNMENT)}"
            )
        if not 1 <= size <= header.meta_size - offset:
            raise FormatError(
                f"blob {name}: {size} bytes; allowed are 1 .. {header.meta_size - offset}"
            )
        if any(meta[end:offset]):
            raise FormatError(f"blob {name}: the gap before it is not zero")
        end = offset + size
        blobs[name] = meta[offset:end]
    if header.meta_size != _align(end, _TENSOR_ALIGNMENT) or any(meta[end:]):
        raise FormatError(f"the blobs end at {end}; meta_size {header.meta_size} does not fit")
    return blobs


# ---- Writer ---------------------------------------------------------------------------------

Chunks = Iterable[NDArray[Any]]
Progress = Callable[[str, int, int], None]


def write_file(
    path: str | os.PathLike[str],
    config: Config,
    tensors: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Chunks],
    blobs: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Writes a file in one go; until it is whole and on disk, what was at `path` stays.

    `read(spec)` gives the tensor's elements in order, in any number of arrays of the spec's numpy
    dtype; each array is dropped before the next one is asked for. `progress(name, done, total)`
    is called after each tensor with bytes. Raises FormatError for what cannot be written and
    OSError from the disk; whatever `read` raises passes through.
    """
    _check_writable(config, tensors, blobs)
    with new_file(Path(path)) as stream:
        _write(stream, config, tensors, read, blobs, progress)


def write_stream(
    stream: BinaryIO,
    config: Config,
    tensors: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Chunks],
    blobs: Mapping[str, bytes],
) -> None:
    """As `write_file`, into a seekable stream that is empty."""
    _check_writable(config, tensors, blobs)
    _write(stream, config, tensors, read, blobs, None)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the context ends, whole and on disk; never after an error.

    Raises OSError that names the path, also for a folder that is not there.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} of {path.name} does not exist")
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_writable(
    config: Config, tensors: Sequence[TensorSpec], blobs: Mapping[str, bytes]
) -> None:
    problems = _tensor_set_problems(config, tensors)
    if len({spec.name for spec in tensors}) != len(tensors):
        problems.append("a tensor is there twice")
    if len(tensors) > MAX_TENSORS or len(blobs) > MAX_BLOBS:
        problems.append(
            f"{len(tensors)} tensors and {len(blobs)} blobs; "
            f"allowed are {MAX_TENSORS} and {MAX_BLOBS}"
        )
    for spec in tensors:
        if spec.dtype not in DTYPES:
            problems.append(f"{spec.name}: dtype {spec.dtype}; known are {', '.join(DTYPES)}")
    for name, blob in blobs.items():
        if not blob:
            problems.append(f"blob {name} is empty; leave it out")
        if not 1 <= len(name.encode()) < _BLOB_NAME_BYTES or "\0" in name:
            problems.append(f"blob name {name!r}; it takes 1 .. {_BLOB_NAME_BYTES - 1} bytes")
    if problems:
        raise FormatError("; ".join(problems))


def _write(
    stream: BinaryIO,
    config: Config,
    tensors: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Chunks],
    blobs: Mapping[str, bytes],
    progress: Progress | None,
) -> None:
    directories_end = _directories_end(len(tensors), len(blobs))
    blob_offsets, blobs_end = _place(directories_end, map(len, blobs.values()), _BLOB_ALIGNMENT)
    meta_size = _align(blobs_end, _TENSOR_ALIGNMENT)
    _check_meta_size(meta_size)
    offsets, file_size = _place(meta_size, (spec.nbytes for spec in tensors), _TENSOR_ALIGNMENT)

    crcs = []
    for spec, offset in zip(tensors, offsets, strict=True):
        stream.seek(offset)  # skipped bytes read as zeros
        crcs.append(_write_tensor(stream, spec, read(spec)))
        if progress is not None:
            progress(spec.name, offset + spec.nbytes, file_size)

    counts = (file_size, meta_size, N_FIELDS, len(tensors), len(blobs), 0)
    meta = bytearray(_HEADER.pack(MAGIC, VERSION, 0, *counts))
    meta += pack_config(config)
    for spec, offset, crc in zip(tensors, offsets, crcs, strict=True):
        meta += _pack_tensor(spec, offset, crc)
    for (name, blob), offset in zip(blobs.items(), blob_offsets, strict=True):
        meta += _BLOB.pack(name.encode(), offset, len(blob))
    for blob, offset in zip(blobs.values(), blob_offsets, strict=True):
        meta += bytes(offset - len(meta)) + blob
    meta += bytes(meta_size - len(meta))
    meta_crc = zlib.crc32(meta[_HEADER_CRC_START:])
    meta[: _HEADER.size] = _HEADER.pack(MAGIC, VERSION, meta_crc, *counts)
    stream.seek(0)
    stream.write(meta)


def _pack_tensor(spec: TensorSpec, offset: int, crc: int) -> bytes:
    dims = spec.shape + (0,) * (MAX_DIMS - len(spec.shape))
    code = _DTYPE_NAMES.index(spec.dtype)
    return _TENSOR.pack(
        spec.name.encode(), code, len(spec.shape), *dims, offset, spec.nbytes, crc, 0
    )


def _write_tensor(stream: BinaryIO, spec: TensorSpec, chunks: Chunks) -> int:
    """Writes a tensor's elements and returns the CRC-32 of their bytes."""
    crc = written = 0
    for part in _contiguous(spec, chunks):
        crc = zlib.crc32(part, crc)
        written += part.nbytes
        stream.write(part)
    if written != spec.nbytes:
        raise FormatError(f"tensor {spec.name}: {written} bytes came; it takes {spec.nbytes}")
    return crc


def _contiguous(spec: TensorSpec, chunks: Chunks) -> Iterator[memoryview]:
    for chunk in chunks:
        if chunk.dtype != DTYPES[spec.dtype]:
            raise FormatError(
                f"tensor {spec.name}: elements of {chunk.dtype} came; "
                f"{spec.dtype} takes {DTYPES[spec.dtype]}"
            )
        yield np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
