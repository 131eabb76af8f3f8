"""Python values as the numbers that the library takes: exactly, or an error that names them."""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ArgumentTypeError, InvalidArgumentError, failure

INT32 = np.iinfo(np.int32)
MAX_INT64 = 2**63 - 1


def as_tokens(name: str, value: Any) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous int32 array [n].

    Takes any one-dimensional integers: a list or tuple, an array of any integer dtype, byte order
    and stride, or a buffer. Raises ArgumentTypeError for other types and shapes, and
    InvalidArgumentError for a number that int32 cannot hold.
    """
    if value is None or isinstance(value, (str, bytes, dict, set, frozenset)):
        raise _wrong_type(name, f"a {type(value).__name__}")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise _wrong_type(name, f"a {type(value).__name__} that is no array ({error})") from None
    if array.ndim != 1:
        raise _wrong_type(name, f"of shape {list(array.shape)}")
    if array.size == 0 and isinstance(value, (list, tuple)):
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
    if array.dtype.kind in "Of" and isinstance(value, (list, tuple)):
        try:
            return np.array([operator.index(item) for item in value], dtype=object)
        except TypeError:
            pass
    raise _wrong_type(name, f"of {array.dtype.name}")


def _wrong_type(name: str, what: str) -> Exception:
    text = f"{name} is {what}; it must be a one-dimensional array, list or buffer of integer ids"
    return failure(ArgumentTypeError, text)


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer in [low, high], or from low up if high is MAX_INT64; no float, no bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        text = f"{name} is {value!r}; it must be an integer"
        raise failure(ArgumentTypeError, text)
    number = operator.index(value)
    if not low <= number <= high:
        allowed = f"{low} or more" if high == MAX_INT64 else f"{low} to {high}"
        text = f"{name} is {number}; it must be {allowed}"
        raise failure(InvalidArgumentError, text)
    return number


def as_number(name: str, value: Any) -> float:
    """An int or float (the library checks the range)."""
    if isinstance(value, (bool, str, bytes)):
        raise failure(ArgumentTypeError, f"{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise failure(InvalidArgumentError, f"{name} is {value!r}; it must be finite") from None
    except (TypeError, ValueError):
        raise failure(ArgumentTypeError, f"{name} is {value!r}; it must be a number") from None
