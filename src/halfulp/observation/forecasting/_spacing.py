"""Distances from a number of a format to its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import Format


def gaps(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return the distances from each number to the next larger and the next smaller one of a format.

    A number in [2^e, 2^(e+1)) has neighbours at 2^(e - mantissa_bits), 2^emin's binade and the subnormals below it
    alike; from a power of two towards zero it is half of that, unless it is the smallest normal number.

    Args:
        values: float64 numbers of the format, finite.
        format: the format.

    Returns:
        Two float64 tensors of the same shape: up and down.

    >>> from halfulp import formats
    >>> [gap.tolist() for gap in gaps(torch.tensor([1.0, -1.0, 1.5], dtype=torch.float64), formats.bf16)]
    [[0.0078125, 0.00390625, 0.0078125], [0.00390625, 0.0078125, 0.0078125]]
    """
    significand, exponent = torch.frexp(values.abs())
    exponent = torch.where(values == 0, format.emin, exponent - 1).clamp_min(format.emin)
    outward = torch.ldexp(torch.ones_like(values), exponent - format.mantissa_bits)
    inward = torch.where((significand == 0.5) & (exponent > format.emin), outward / 2, outward)
    negative = values < 0
    return torch.where(negative, inward, outward), torch.where(negative, outward, inward)


def to_format(values: Tensor, format: Format) -> Tensor:
    """Return float64 values rounded to the nearest number of a format, ties to even.

    One scaling by a power of two, one rounding to an integer, and the scaling back: exact for formats of up to 24
    bits, whose numbers float64 holds with room to spare. Numbers beyond the largest stay where they are.
    """
    _, exponent = torch.frexp(values.abs())
    exponent = torch.where(values == 0, format.emin, exponent - 1).clamp_min(format.emin) - format.mantissa_bits
    return torch.ldexp(torch.round(torch.ldexp(values, -exponent)), exponent)
