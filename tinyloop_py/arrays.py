"""Models as NumPy arrays: a `.tinyloop` file from arrays and a Config, and arrays from a file.

`docs/format.md` has the fields of Config and the tensors that follow from them, by name and shape.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .config import SCALE_GROUP, Config, is_scale, scale_name, scale_shapes
from .format import (
    DTYPES,
    FormatError,
    TensorSpec,
    TinyloopFile,
    read_file,
    write_file,
    write_stream,
)
from .rounding import convert_dtype

__all__ = ["ModelArrays", "bfloat16", "load_arrays", "memory_file", "save"]

# NumPy has no bfloat16. Arrays of this dtype hold its bits and are copied, sliced and compared like
# others, but no arithmetic can take the bits for numbers.
bfloat16 = np.dtype([("bfloat16", "<u2")])

_STORED_AS = {"f4": "float32", "f2": "float16", "i1": "int8"}
_CHUNK_ELEMENTS = 1 << 20


class ModelArrays(NamedTuple):
    """What `load_arrays` returns: tensors and blobs by their names in the file."""

    config: Config
    tensors: dict[str, NDArray[Any]]
    blobs: dict[str, bytes]


def save(
    path: str | os.PathLike[str],
    config: Config,
    tensors: Mapping[str, ArrayLike],
    *,
    blobs: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a `.tinyloop` file; until it is whole and on disk, what was at `path` stays.

    Args:
        path: the file.
        config: says which tensors there must be, and their shapes.
        tensors: arrays by name, kept in their dtype: float32, float16, `bfloat16` (of this module;
            of others after `view`), and int8 for a weight `X.weight` that comes with its scales,
            `X.scale`. Strides and byte order don't matter, and neither do values: NaN is stored.
        blobs: bytes by name, such as "tokenizer.json", "chat_template", "card" and "end_ids".

    Raises:
        FormatError (a ValueError): tensors that are missing, left over, of a wrong shape or dtype,
            all of them by name. Whether this version runs the configuration is seen when the file
            is loaded.
        TypeError: `config`, a name or a blob is of another type.
        OSError: from the disk.
    """
    specs, read, blobs = _prepare(config, tensors, blobs)
    write_file(path, config, specs, read, blobs)


@contextmanager
def memory_file(
    config: Config,
    tensors: Mapping[str, ArrayLike],
    blobs: Mapping[str, bytes] | None = None,
) -> Iterator[str]:
    """The path of a `.tinyloop` file that is in memory only and goes when the context ends.

    Arguments and errors as of `save`. The path is this process's own; who has opened it may go on
    reading after the end.
    """
    specs, read, blobs = _prepare(config, tensors, blobs)
    with os.fdopen(os.memfd_create("model.tinyloop"), "w+b") as stream:
        write_stream(stream, config, specs, read, blobs)
        stream.flush()
        yield f"/proc/self/fd/{stream.fileno()}"


def load_arrays(path: str | os.PathLike[str], *, stored: bool = False) -> ModelArrays:
    """A file's configuration, tensors and blobs; arrays are new ones, which may be changed.

    Tensors are float32, exactly the numbers that the file holds, int8 weights times their scales.
    With `stored` they are as the file has them (`bfloat16` of this module, int8 and scales each by
    itself), and `save` makes the same file of them again.

    Raises FormatError for a damaged file, OSError if it cannot be read. Checksums of tensors are
    not compared; `tinyloop inspect --verify` does that.
    """
    file = read_file(path)
    tensors = {
        name: _as_stored(file, name) if stored else _as_float32(file, name)
        for name in file.tensors
        if stored or not _is_scale(file, name)
    }
    return ModelArrays(file.config, tensors, file.blobs)


# ---- From arrays ----------------------------------------------------------------------------


class _Read:
    """Gives the writer a tensor's elements, little-endian and in order, a few rows at a time."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def __call__(self, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        array = self._arrays[spec.name]
        n_rows = max(1, _CHUNK_ELEMENTS // prod(spec.shape[1:]))
        for first in range(0, len(array), n_rows):
            yield np.ascontiguousarray(array[first : first + n_rows], DTYPES[spec.dtype])


def _prepare(
    config: Config, tensors: Mapping[str, ArrayLike], blobs: Mapping[str, bytes] | None
) -> tuple[list[TensorSpec], _Read, dict[str, bytes]]:
    """The writer's arguments. Arrays are not copied."""
    if not isinstance(config, Config):
        raise TypeError(f"config is {config!r:.50}; it must be a tinyloop_py Config")
    blobs = dict(blobs or {})
    for name in (*tensors, *blobs):
        if not isinstance(name, str):
            raise TypeError(f"{name!r:.50} is no name of a tensor or blob; it must be a string")
    for name, blob in blobs.items():
        if not isinstance(blob, bytes):
            raise TypeError(f"blob {name} is {type(blob).__name__}; it must be bytes")
    specs, arrays, problems = [], {}, []
    for name, values in tensors.items():
        dtype, array = _storable(values)
        if dtype is None:
            problems.append(f"{name}: {_unstorable(array)}")
        else:
            specs.append(TensorSpec(name, dtype, array.shape))
            arrays[name] = array
    if problems:
        raise FormatError("; ".join(problems))
    return specs, _Read(arrays), blobs


def _storable(values: ArrayLike) -> tuple[str | None, NDArray[Any]]:
    """The file's name for an array's dtype (None: it has none) and the array, bfloat16 as bits."""
    array = np.asarray(values)
    if array.dtype == bfloat16:
        return "bfloat16", array.view(DTYPES["bfloat16"])
    return _STORED_AS.get(f"{array.dtype.kind}{array.dtype.itemsize}"), array


def _unstorable(array: NDArray[Any]) -> str:
    hint = "round it with astype"
    if array.dtype.itemsize == 2:
        hint = "if these are bfloat16 or its bits, say so with view(tinyloop_py.bfloat16)"
    return f"dtype {array.dtype}; allowed are float32, float16, bfloat16 and int8: {hint}"


# ---- To arrays ------------------------------------------------------------------------------


def _is_scale(file: TinyloopFile, name: str) -> bool:
    weight = file.tensors.get(f"{name.removesuffix('.scale')}.weight")
    return is_scale(name) and weight is not None and weight.dtype == "int8"


def _as_stored(file: TinyloopFile, name: str) -> NDArray[Any]:
    array = file.array(name)
    return array.view(bfloat16) if file.tensors[name].dtype == "bfloat16" else array


def _as_float32(file: TinyloopFile, name: str) -> NDArray[Any]:
    dtype = file.tensors[name].dtype
    if dtype != "int8":
        return convert_dtype(file.array(name), dtype, "float32")
    scales = _scales(file, name)
    values = file.array(name).astype(np.float32)
    values *= scales
    return values


def _scales(file: TinyloopFile, name: str) -> NDArray[Any]:
    """Of an int8 weight, to be multiplied with it: float32 [rows, 1] or [rows, columns]."""
    shape = file.tensors[name].shape
    scale = file.tensors.get(scale_name(name))
    if (
        scale is None
        or scale.dtype != "float32"
        or len(shape) != 2
        or scale.shape not in scale_shapes(shape)
    ):
        raise FormatError(
            f"{file.path}: tensor {name} is int8; it must have two dimensions, and float32 scales "
            f"{scale_name(name)} for each row or each {SCALE_GROUP} columns of it"
        )
    scales = file.array(scale.name)
    if scale.shape[1] == 1:
        return scales
    return np.repeat(scales, SCALE_GROUP, axis=1)[:, : shape[1]]
