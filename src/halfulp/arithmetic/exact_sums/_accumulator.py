"""The accumulator of an exact sum: how its words are laid out, and how floats are laid out in bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LIMB = 32  # bits of a limb; an int64 holds 2^31 of them added up before it could overflow
LOW = (1 << LIMB) - 1
UNIT = -68 * LIMB  # exponent of limb 0: below 2^-2148, the smallest product of two float64
LIMBS = 134  # up to 2^2112: 2^63 products of the two largest float64
# Behind the limbs: how many terms are plus infinity, minus infinity (a NaN counts as both), -0, and how many there are.
PLUS, MINUS, NEGATIVE_ZEROS, TERMS, WORDS = LIMBS, LIMBS + 1, LIMBS + 2, LIMBS + 3, LIMBS + 4


@dataclass(frozen=True)
class Layout:
    """A float's bits: a sign, an exponent field, `mantissa` bits.

    Attributes:
        word: the integer type of the same width.
        width: of the word, in bits.
        mantissa: bits of the mantissa that are stored.
    """

    word: torch.dtype
    width: int
    mantissa: int

    @property
    def precision(self) -> int:
        """Bits of a normal number's mantissa."""
        return self.mantissa + 1

    @property
    def exponent_bits(self) -> int:
        """Bits of the exponent field."""
        return self.width - 1 - self.mantissa

    @property
    def fields(self) -> int:
        """The largest exponent field, that of infinities and NaNs."""
        return (1 << self.exponent_bits) - 1

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - (self.fields >> 1)

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest subnormal number."""
        return self.lowest - self.mantissa


LAYOUTS = {
    torch.float16: Layout(torch.int16, 16, 10),
    torch.bfloat16: Layout(torch.int16, 16, 7),
    torch.float32: Layout(torch.int32, 32, 23),
    torch.float64: Layout(torch.int64, 64, 52),
}
