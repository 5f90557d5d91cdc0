"""Angles beyond the reach of the kernels' reduction, brought into one turn by exact integer arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction

import torch

from ...kernels import note
from .. import _constants as known
from ._trigonometric import LARGEST_ANGLE

_BITS = 1700  # the largest float64 has 1024 binades above 1; as many digits again must be right behind the point


def beyond_reach(head: torch.Tensor) -> torch.Tensor | None:
    """Return which finite angles are beyond the kernels' reduction; None if none is."""
    far = (head.abs() > LARGEST_ANGLE) & torch.isfinite(head)
    return far if bool(far.any()) else None


def reduced_exactly(parts: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Angles in one dimension as k pi / 2 + r: k modulo 4, and r, at most pi / 4, as `count` float64 components.

    One element at a time, which `halfulp.kernels.report()` counts.
    """
    note("arithmetic", "angles beyond 2^20 are reduced one by one, exactly and slowly")
    right, quadrants, rows = _pi() // 2, [], []
    for terms in zip(*(part.tolist() for part in parts)):
        value = sum(map(Fraction, terms), Fraction(0))
        whole = (value.numerator << _BITS) // value.denominator
        k = (2 * whole + right) // (2 * right)
        quadrants.append(k % 4)
        rows.append(known.components((whole - k * right) >> (_BITS - known.BITS), count))
    device = parts[0].device
    rest = tuple(torch.tensor(column, dtype=torch.float64, device=device) for column in zip(*rows))
    return torch.tensor(quadrants, dtype=torch.int64, device=device), rest


@functools.cache
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
