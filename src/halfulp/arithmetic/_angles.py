"""Angles beyond the reach of the kernels' reduction, brought into one turn by exact integer arithmetic."""

from __future__ import annotations

from fractions import Fraction

import torch

from ..kernels import note
from . import _constants as known
from ._trigonometric import LARGEST_ANGLE

_BITS = 1600  # the largest float64 has 1024 binades above 1; as many digits again must be right behind the point


def within_reach(parts: tuple[torch.Tensor, ...], most: int) -> tuple[torch.Tensor, ...]:
    """The same angles, those beyond 2^20 modulo a turn, as float64 components; untouched where none is.

    One element at a time, which `halfulp.kernels.report()` counts.
    """
    head = parts[0]
    far = (head.abs() > LARGEST_ANGLE) & torch.isfinite(head)
    if not bool(far.any()):
        return parts
    note("arithmetic", "angles beyond 2^20 are reduced one by one, exactly and slowly")
    count = min(len(parts) + 1, most)
    wide = [part.double() for part in parts] + [torch.zeros_like(head, dtype=torch.float64)] * (count - len(parts))
    wide = [part.clone() for part in wide]
    turn = 2 * _pi()
    for place in far.nonzero().tolist():
        at = tuple(place)
        value = sum((Fraction(float(part[at])) for part in parts), Fraction(0))
        whole = (value.numerator << _BITS) // value.denominator
        rest = (whole + turn // 2) % turn - turn // 2
        for part, digits in zip(wide, known.components(rest >> (_BITS - known.BITS), count)):
            part[at] = digits
    return tuple(wide)


def _pi() -> int:
    """pi 2^_BITS, by Machin's formula."""
    return 16 * _inverse_tangent(5) - 4 * _inverse_tangent(239)


def _inverse_tangent(q: int) -> int:
    guard = 32
    power = (1 << (_BITS + guard)) // q
    total, k = power, 1
    while power:
        power //= -q * q
        k += 2
        total += power // k
    return total >> guard
