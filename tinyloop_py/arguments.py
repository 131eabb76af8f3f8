"""Python values as the numbers that the library takes: exactly, or an error that names them."""

import operator
import reprlib
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ArgumentTypeError, InvalidArgumentError, OutOfMemoryError, failure

INT32 = np.iinfo(np.int32)
MAX_INT64 = 2**63 - 1


def as_tokens(name: str, value: Any) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous int32 array [n] of its own, so that nobody changes it meanwhile.

    Takes any one-dimensional integers: a list or tuple, an array of any integer dtype, byte order
    and stride, or a buffer. Raises ArgumentTypeError for other types and shapes, and
    InvalidArgumentError for a number that int32 cannot hold.
    """
    if value is None or isinstance(value, (str, bytes, dict, set, frozenset)):
        raise _wrong_type(name, reprlib.repr(value))
    try:
        array = np.array(value)
    except (ValueError, TypeError, OverflowError):
        raise _wrong_type(name, f"{reprlib.repr(value)}, which is no array") from None
    if array.ndim == 0:
        raise _wrong_type(name, reprlib.repr(value))
    if array.ndim > 1:
        raise _wrong_type(name, f"of shape {list(array.shape)}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        array = _exact_integers(name, value, array)
    outside = np.flatnonzero((array < INT32.min) | (array > INT32.max))
    if outside.size:
        index = int(outside[0])
        text = f"{name}[{index}] is {int(array[index])}; token ids are small non-negative integers"
        raise failure(InvalidArgumentError, text)
    return np.ascontiguousarray(array, dtype=np.int32)


def _exact_integers(name: str, value: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Python integers that NumPy has no common integer type for, kept as they are."""
    if array.dtype.kind == "O" or (array.dtype.kind == "f" and isinstance(value, (list, tuple))):
        try:
            return np.array([operator.index(item) for item in value], dtype=object)
        except TypeError:
            pass
    raise _wrong_type(name, f"of {array.dtype.name}")


def _wrong_type(name: str, what: str) -> Exception:
    text = f"{name} is {what}; it must be a one-dimensional array, list or buffer of integer ids"
    return failure(ArgumentTypeError, text)


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer in [low, high]; no float, no bool."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        text = f"{name} is {reprlib.repr(value)}; it must be an integer"
        raise failure(ArgumentTypeError, text)
    if not low <= number <= high:
        unlimited = high == MAX_INT64 and number < low
        allowed = f"{low} or more" if unlimited else f"{low} to {high}"
        text = f"{name} is {reprlib.repr(number)}; it must be {allowed}"
        raise failure(InvalidArgumentError, text)
    return number


def as_loops(value: Any) -> tuple[int, int]:
    """What a call says of loops, as (loops, inner loops).

    Takes None, an integer, or a pair of integers for a nested schedule. 0 is the library's word for
    what is not stated.
    """
    if value is None:
        return 0, 0
    if not isinstance(value, tuple):
        return as_integer("loops", value, 1, MAX_INT64), 0
    if len(value) != 2:
        text = f"loops is {reprlib.repr(value)}; a nested schedule takes a pair (H, L)"
        raise failure(InvalidArgumentError, text)
    high, low = value
    return as_integer("loops[0]", high, 1, MAX_INT64), as_integer("loops[1]", low, 1, MAX_INT64)


def as_states(name: str, value: Any) -> npt.NDArray[np.float32]:
    """Initial states as a contiguous float32 array [n, hidden] of its own."""
    try:
        array = np.array(value)
    except (ValueError, TypeError):
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu" or array.ndim != 2:
        text = f"{name} is of shape {list(array.shape)} and dtype {array.dtype.name}; it must be "
        raise failure(ArgumentTypeError, text + "an array of numbers [number of tokens, hidden]")
    return np.ascontiguousarray(array, dtype=np.float32)


def as_number(name: str, value: Any) -> float:
    """An int or float (the library checks the range)."""
    text = f"{name} is {reprlib.repr(value)}; it must be a number"
    if isinstance(value, (bool, str, bytes, bytearray)):
        raise failure(ArgumentTypeError, text)
    try:
        return float(value)
    except OverflowError:
        raise failure(InvalidArgumentError, f"{text}, and finite") from None
    except (TypeError, ValueError):
        raise failure(ArgumentTypeError, text) from None


def allocate(*shape: int) -> npt.NDArray[np.float32]:
    """A float32 array to write into; OutOfMemoryError if there is no memory for it."""
    try:
        return np.empty(shape, np.float32)
    except (MemoryError, ValueError):
        text = f"out of memory: cannot allocate a float32 array of shape {list(shape)}"
        raise failure(OutOfMemoryError, text) from None
