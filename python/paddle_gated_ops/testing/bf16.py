"""BF16 bit patterns in NumPy, which has no BF16 type: uint16 arrays stand for BF16 tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["to_bf16_bits", "from_bf16_bits", "bf16_ulp"]

BF16_MAX = 2.0**128 - 2.0**120  # largest finite BF16
_MIN_EXPONENT = -126  # of the normal numbers, FP32's and BF16's alike
_MAX_EXPONENT = 127
_FRACTION_BITS = 7


def bf16_ulp(value: ArrayLike) -> np.ndarray:
    """Spacing of BF16 numbers at ``|value|``.

    2^(e - 7) for 2^e <= |value| < 2^(e + 1); 2^-133 (the subnormals' spacing) below 2^-126;
    2^120 from 2^127 on, past BF16's range too; NaN stays NaN.

    Args:
        value (array_like): float64, any shape.

    Returns:
        float64 array of the same shape.
    """
    magnitude = np.asarray(np.abs(np.asarray(value, dtype=np.float64)))
    # The exponent field is read from the float64 encoding: exact, and quicker than frexp.
    exponent = (magnitude.view(np.int64) >> 52) - 1023
    exponent = np.clip(exponent, _MIN_EXPONENT, _MAX_EXPONENT)
    ulp = np.asarray((exponent - _FRACTION_BITS + 1023) << 52).view(np.float64)
    return np.where(np.isnan(magnitude), np.nan, ulp)


def to_bf16_bits(values: ArrayLike) -> np.ndarray:
    """Round to BF16, to nearest even, in one step from float64.

    One step matters: 1 + 2^-8 + 2^-40 is 1 + 2^-7 in BF16, but 1 when it is rounded to FP32
    first. Values from 2^128 - 2^119 on become Inf, subnormals are kept, NaN becomes a quiet NaN.

    Args:
        values (array_like): real numbers; taken as float64.

    Returns:
        uint16 array of the same shape: the BF16 bit patterns.
    """
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        ulp = bf16_ulp(values)
        # A power of two: the division and the product are exact, rint is the only rounding.
        rounded = np.rint(values / ulp) * ulp
        bits = (np.asarray(rounded.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    quiet = np.where(np.signbit(values), 0xFFC0, 0x7FC0).astype(np.uint16)
    return np.where(np.isnan(values), quiet, bits)


def from_bf16_bits(bits: ArrayLike) -> np.ndarray:
    """Exact float64 values of BF16 bit patterns.

    Args:
        bits (array_like): uint16, any shape.

    Returns:
        float64 array of the same shape.
    """
    bits = np.asarray(bits)
    if bits.dtype != np.uint16:
        raise TypeError(f"bits: expected a uint16 array, got {bits.dtype}")
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes quiet
        # The shift count is typed, as NumPy 1 widens a 0-d uint32 beside a Python int.
        floats = np.asarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.asarray(floats.astype(np.float64))
