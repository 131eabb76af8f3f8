"""Conversion between float32, float16 and bfloat16, rounded to nearest, ties to even."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def convert_dtype(values: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    """`values` of dtype `source` as `target`, both keys of format.DTYPES without int8.

    Finite values beyond the target's range become infinite; NaN stays NaN. Goes through float32,
    which holds all three exactly, so nothing is rounded twice.
    """
    if source == target:
        return values
    exact = _from_bfloat16(values) if source == "bfloat16" else values.astype("<f4", copy=False)
    if target == "bfloat16":
        return _to_bfloat16(exact)
    with np.errstate(over="ignore"):
        return exact.astype("<f2" if target == "float16" else "<f4", copy=False)


def is_infinite(values: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Where `values` of this dtype are plus or minus infinity."""
    infinite: NDArray[np.bool_] = (
        (values & 0x7FFF) == 0x7F80 if dtype == "bfloat16" else np.isinf(values)
    )
    return infinite


def _from_bfloat16(bits: NDArray[Any]) -> NDArray[Any]:
    return (bits.astype("<u4") << 16).view("<f4")


def _to_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    bits = values.view("<u4")
    # Half of the last kept bit, less one where that bit is even: the carry rounds ties to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return np.where(np.isnan(values), quiet_nan, rounded).astype("<u2")
