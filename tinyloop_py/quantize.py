"""Weights as int8 with scales: symmetric, a scale for each row or each group of columns."""

import numpy as np
from numpy.typing import NDArray

from .config import SCALE_GROUP

# What `quantize` and `--quantize` accept, and the columns that share a scale (None: a whole row).
QUANTIZATIONS: dict[str, int | None] = {"int8": None, "int8-group": SCALE_GROUP}

_LARGEST = 127


def quantize_rows(
    rows: NDArray[np.float32], group: int | None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantizes float32 [n, columns] to int8 [n, columns] and scales float32 [n, groups].

    A scale is the largest magnitude of its group over 127, rounded to float32; a number is the
    weight over the scale, rounded to the nearest integer (ties to even), within -127 .. 127. Where
    the scale is 0 the numbers are too. A scale tells by not being finite that a weight is not.
    """
    columns = rows.shape[1]
    width = columns if group is None else min(group, columns)
    largest = np.maximum.reduceat(np.abs(rows), np.arange(0, columns, width), axis=1)
    scales: NDArray[np.float32] = (largest / np.float32(_LARGEST)).astype(np.float32, copy=False)
    divisors = np.repeat(scales, width, axis=1)[:, :columns] if scales.shape[1] > 1 else scales
    numbers = np.zeros_like(rows)
    with np.errstate(invalid="ignore"):
        np.divide(rows, divisors, out=numbers, where=divisors > 0)
    np.rint(numbers, out=numbers)
    np.clip(numbers, -_LARGEST, _LARGEST, out=numbers)
    with np.errstate(invalid="ignore"):
        return numbers.astype(np.int8), scales
