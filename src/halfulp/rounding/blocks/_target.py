"""The target of a block rounding, as integers that a torch operator takes."""

from __future__ import annotations

from fractions import Fraction
from math import frexp
from typing import NamedTuple

import torch

from ...formats import BlockFormat
from .._modes import Nearest, Rounding, Up
from .._target import DTYPES, Target, make_target

FLOOR, RAISED, CLOSEST = range(3)
_SCALE_ROUNDINGS = {"floor": FLOOR, "up": RAISED, "nearest": CLOSEST}


class BlockTarget(NamedTuple):
    """Elements, scales, and how a block gets its scale.

    Attributes:
        element: what payloads are rounded to.
        scale: what scales are rounded to, saturating.
        block: elements that share a scale.
        choice: FLOOR, RAISED or CLOSEST.
        tensor_scale: whether the tensor has a scale of its own.
    """

    element: Target
    scale: Target
    block: int
    choice: int
    tensor_scale: bool

    def flat(self) -> list[int]:
        """Return the target as an operator's argument."""
        return [*self.element, *self.scale, self.block, self.choice, int(self.tensor_scale)]

    @classmethod
    def of(cls, flat: list[int]) -> BlockTarget:
        """Return the target that an operator's argument encodes."""
        size = len(Target._fields)
        element, scale = Target(*flat[:size]), Target(*flat[size : 2 * size])
        return cls(element, scale, flat[-3], flat[-2], bool(flat[-1]))

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two, so that scaling is exact."""
        return self.scale.mantissa_bits == 0 and not self.tensor_scale


def make_block_target(format: BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> BlockTarget:
    """The target of rounding tensors of a dtype to a block format.

    Raises:
        ValueError: If the overflow policy is not saturation, or the formats are such that no scale fits.
    """
    if overflow not in (None, "saturate"):
        raise ValueError(f"the elements of {format.name} saturate: overflow is 'saturate' or None, got {overflow!r}")
    if not format.element.zero or not format.element.signed:
        raise ValueError(f"{format.name}: elements need a zero and a sign, and {format.element.name} lacks one")
    choice = _SCALE_ROUNDINGS[format.scale_rounding]
    mode = Nearest() if choice == CLOSEST else Up()
    element = make_target(format.element, rounding, "saturate", torch.float64)
    scale = make_target(format.scale, mode, "saturate", torch.float64)
    if element is None or scale is None or format.element.mantissa_bits > 10 or format.scale.mantissa_bits > 22:
        raise ValueError(
            f"{format.name}: elements of up to 10 and scales of up to 22 mantissa bits are rounded in blocks; got "
            f"{format.element.name} and {format.scale.name}"
        )
    if dtype not in DTYPES:
        raise TypeError(f"x is float16, bfloat16, float32 or float64; got {dtype}")
    return BlockTarget(element, scale, format.block, choice, format.tensor_scale)


def scale_threshold(target: BlockTarget, mantissa: int) -> tuple[int, int]:
    """How a power-of-two scale follows from largest = 2^e (1 + f): its exponent is e - first + (f >= second).

    `second` is in units of 2^-mantissa; a value that f never reaches stands for never.
    """
    largest = Fraction(target.element.max)
    never = 1 << mantissa
    if target.choice == FLOOR:
        return _exponent(largest), never
    if target.choice == CLOSEST:
        largest = largest * 3 / 2
    first = _exponent(largest)
    second = (largest / Fraction(2) ** first - 1) * never
    return first, int(second) + (target.choice == RAISED)


def _exponent(value: Fraction) -> int:
    return frexp(float(value))[1] - 1
