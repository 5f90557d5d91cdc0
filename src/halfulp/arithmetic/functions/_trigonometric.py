"""sin, cos and atan of expansions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from ...kernels import Value, is_finite, nearest_integer, note, select
from .. import _constants as known
from .._error_free import Terms, distill
from .._operators import added, divided, finished, multiplied, negated, scaled
from ._exp_log import constants, looked_up, odd_at_zero, series, terms_for

LARGEST_ANGLE = 2.0**20


def _reduce_angle(x: Terms, n: int) -> tuple[Value, Terms]:
    """k and x - k pi / 32, relatively accurate however close x is to a multiple of pi / 2."""
    head = select(abs(x[0]) > 2.0 * LARGEST_ANGLE, 0.0, x[0])
    k = nearest_integer(head * (32.0 / math.pi))
    # Cancellation may take 53 bits per component and the size of k; what is left must still be accurate.
    pieces = known.chunks(known.pi() // 32, 28, (53 * (2 * n) + 60) // 28 + 1)
    steps = [-(k * c) for c in constants(x[0], pieces)]
    return k, distill([head, *steps[:2], *x[1:], *steps[2:]], n)


def _parts(x: Terms, n: int) -> tuple[Value, Terms, Terms]:
    """Return the table's index, sin r and cos r - 1 for the reduced argument r, |r| <= pi / 64."""
    k, r = _reduce_angle(x, n)
    index = k - nearest_integer(k * (1.0 / 64.0) - 0.5 + 1.0 / 128.0) * 64.0
    square = multiplied(r, r, n)
    bits = 8.69
    count = terms_for(n, bits, lambda k: math.factorial(2 * k + 1))
    odd = [Fraction((-1) ** (k + 1), math.factorial(2 * k + 3)) for k in range(count)]
    even = [Fraction((-1) ** (k + 1), math.factorial(2 * k + 2)) for k in range(count)]
    sine = added(r, multiplied(multiplied(r, square, n), series(square, odd, n, bits), n), n)
    return index, sine, multiplied(square, series(square, even, n, bits), n)


def _rotate(tables: tuple, index, along: Terms, across: Terms, n: int, sign: float) -> Terms:
    """a + (a (cos r - 1) + sign b sin r) for a and b from the tables."""
    a, b = looked_up(tables[0], index, n), looked_up(tables[1], index, n)
    rest = added(multiplied(a, along, n), scaled(multiplied(b, across, n), sign), n)
    return added(a, rest, n)


def sin(operands: list[Terms], n: int) -> Terms:
    """Return the sine, for |x| <= 2^20."""
    x = operands[0]
    index, sine, versine = _parts(x, n)
    made = _rotate(known.circle(), index, versine, sine, n, 1.0)
    return odd_at_zero(x, finished(select(is_finite(x[0]), made[0], x[0] - x[0]), made))


def cos(operands: list[Terms], n: int) -> Terms:
    """Return the cosine, for |x| <= 2^20."""
    x = operands[0]
    index, sine, versine = _parts(x, n)
    made = _rotate(known.circle()[::-1], index, versine, sine, n, -1.0)
    return finished(select(is_finite(x[0]), made[0], x[0] - x[0]), made)


def atan(operands: list[Terms], n: int) -> Terms:
    """atan(j / 32) + atan((t - j/32) / (1 + t j/32)) for t = |x| or 1 / |x|."""
    x = operands[0]
    one, zero = constants(x[0], [1.0, 0.0])
    size = [select(x[0] < 0.0, -t, t) for t in x]
    steep, far = size[0] > 1.0, size[0] > 2.0**400
    inside = [select(far, one, size[0]), *(select(far, zero, t) for t in size[1:])]
    top = [select(steep, one, inside[0]), *(select(steep, zero, t) for t in inside[1:])]
    bottom = [select(steep, inside[0], one), *(select(steep, t, zero) for t in inside[1:])]
    index = nearest_integer(top[0] / bottom[0] * 32.0)
    c = [index * (1.0 / 32.0)]
    # (p/q - c) / (1 + c p/q) = (p - c q) / (q + c p)
    rest = divided(_cross(top, negated(c), bottom, n), _cross(bottom, c, top, n), n)
    square = multiplied(rest, rest, n)
    bits = 11.99
    coefficients = [Fraction((-1) ** (k + 1), 2 * k + 3) for k in range(terms_for(n, bits))]
    small = added(rest, multiplied(multiplied(rest, square, n), series(square, coefficients, n, bits), n), n)
    flat = added(looked_up(known.arcs(), index, n), small, n)
    right = constants(x[0], known.components(known.pi() // 2, n))
    below = [select(far, zero, t) for t in flat]
    made = [select(steep, a, b) for a, b in zip(added(right, negated(below), n), flat)]
    made = [select(x[0] < 0.0, -t, t) for t in made]
    return odd_at_zero(x, [select(x[0] == x[0], made[0], x[0]), *made[1:]])


def _cross(a: Terms, c: Terms, b: Terms, n: int) -> Terms:
    """a + c b, accurate through cancellation."""
    return distill([*a, *multiplied(b, c, n + 1)], n)


_BITS = 1700  # the largest float64 has 1024 binades above 1; as many digits again must be right behind the point


def beyond_reach(head: torch.Tensor) -> torch.Tensor | None:
    """Return which finite angles are beyond the kernels' reduction; None if none is."""
    far = (head.abs() > LARGEST_ANGLE) & torch.isfinite(head)
    return far if bool(far.any()) else None


def reduced_exactly(parts: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Reduce angles of one dimension to k pi / 2 + r: k modulo 4, and |r| <= pi / 4 as `count` float64.

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
