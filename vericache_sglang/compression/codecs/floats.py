"""Floating-point numbers as sign, exponent and mantissa (IEEE 754), and back."""

from __future__ import annotations

from typing import NamedTuple

import torch


class FloatFormat(NamedTuple):
    """Widths of a dtype's fields in bits, and the integer of its size."""

    exponent: int
    mantissa: int
    integer: torch.dtype

    @property
    def non_finite(self) -> int:
        """The biased exponent of infinities and NaN."""
        return (1 << self.exponent) - 1


FORMATS = {
    torch.bfloat16: FloatFormat(8, 7, torch.int16),
    torch.float16: FloatFormat(5, 10, torch.int16),
    torch.float32: FloatFormat(8, 23, torch.int32),
}


class Numbers(NamedTuple):
    """The fields of numbers of any shape, each an integer of the numbers' size.

    Attributes:
        sign: 0 or 1.
        exponent: Biased; 0 for zeros and subnormal numbers.
        mantissa: Without the leading one.
    """

    sign: torch.Tensor
    exponent: torch.Tensor
    mantissa: torch.Tensor


def take_apart(numbers: torch.Tensor) -> Numbers:
    """Read the fields of bfloat16, float16 or float32 numbers."""
    form = FORMATS[numbers.dtype]
    bits = numbers.view(form.integer)
    # The shift drags copies of the sign in from above; the masks cut them off.
    return Numbers(
        sign=bits >> form.exponent + form.mantissa & 1,
        exponent=bits >> form.mantissa & form.non_finite,
        mantissa=bits & (1 << form.mantissa) - 1,
    )


def put_together(numbers: Numbers, dtype: torch.dtype) -> torch.Tensor:
    """Write numbers from their fields, the inverse of ``take_apart``."""
    form = FORMATS[dtype]
    bits = numbers.sign << form.exponent + form.mantissa
    bits |= numbers.exponent << form.mantissa
    bits |= numbers.mantissa
    return bits.view(dtype)
