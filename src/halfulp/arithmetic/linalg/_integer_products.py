"""Products of matrices of expansions in exact integers: residuals that lose no digit, whatever the condition."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..expansions._pointwise import MOST, Parts, pointwise


class Integers:
    """A matrix of expansions as Python integers times one power of two.

    >>> third = Integers.of((torch.tensor([[0.75]], dtype=torch.float64),))
    >>> (third @ third).parts(torch.device("cpu"))[0]
    tensor([[0.5625]], dtype=torch.float64)
    """

    def __init__(self, values: np.ndarray, power: int) -> None:
        self.values, self.power = values, power

    @classmethod
    def of(cls, parts: Parts) -> Integers:
        """The exact sum of finite float64 components."""
        fractions, exponents = zip(*(np.frexp(part.detach().cpu().numpy()) for part in parts), strict=True)
        power = min(int(np.min(e, where=f != 0, initial=0)) for f, e in zip(fractions, exponents, strict=True)) - 53
        values: np.ndarray = np.zeros(parts[0].shape, dtype=object)
        for fraction, exponent in zip(fractions, exponents, strict=True):
            shifts = np.where(fraction == 0, 0, exponent - 53 - power).astype(object)
            values = values + (np.ldexp(fraction, 53).astype(np.int64).astype(object) << shifts)
        return cls(values, power)

    @property
    def mT(self) -> Integers:
        """The transpose."""
        return Integers(self.values.T, self.power)

    def __matmul__(self, other: Integers) -> Integers:
        return Integers(self.values @ other.values, self.power + other.power)

    def __sub__(self, other: Integers) -> Integers:
        power = min(self.power, other.power)
        left, right = (x.values * (1 << (x.power - power)) for x in (self, other))
        return Integers(left - right, power)

    def rounded(self, bits: int) -> Integers:
        """Cut to so many bits of the largest entry."""
        most = max(int(value).bit_length() for value in self.values.flat)
        shift = max(0, most - bits)
        return Integers(self.values >> shift, self.power + shift)

    def parts(self, device: torch.device, components: int = MOST) -> Parts:
        """The matrix rounded to float64 components."""
        rows = [_floats(int(value), self.power, components) for value in self.values.flat]
        wide = torch.tensor(rows, dtype=torch.float64, device=device).reshape(*self.values.shape, components)
        return pointwise("renormalize", tuple(wide.unbind(-1)), components=components, dtype=torch.float64)


def _floats(value: int, power: int, components: int) -> list[float]:
    """The leading digits of value 2^power, 53 at a time."""
    out = []
    for _ in range(components):
        shift = max(0, value.bit_length() - 53)
        out.append(math.ldexp(value >> shift, shift + power))
        value -= value >> shift << shift
    return out
