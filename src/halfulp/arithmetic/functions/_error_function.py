"""The error function of expansions, and what it leaves to 1."""

from __future__ import annotations

import math

from ...kernels import gather, nearest_integer, select, times_power
from .. import _constants as known
from .._error_free import Terms, distill
from ..expansions._operators import added, fitted, multiplied, negated, scaled
from ._exp_log import constants, looked_up, number, odd_at_zero

_LAST = 873  # erfc(873 / 32) is below the smallest float64


def _edge(n: int) -> int:
    """From this many sixteenths on erf is 1 to n components."""
    x = 1.0
    while x * x * math.log2(math.e) + math.log2(x * math.sqrt(math.pi)) < 53 * n + 3:
        x += 1 / 16
    return math.ceil(x * 16) + 1


def erf(operands: list[Terms], n: int) -> Terms:
    """erf(c) + 2/sqrt(pi) e^(-c^2) integral of e^(-2 c s - s^2) over [0, r], for the sixteenth c nearest to |x|.

    The terms t_k = b_k r^k of the integrand's series obey (k + 1) t_(k+1) = -2 (c r t_k + r^2 t_(k-1)).
    """
    x = operands[0]
    last = _edge(n)
    size = [select(x[0] < 0.0, -t, t) for t in x]
    far = size[0] > last / 16
    size = [select(far, number(x[0], last / 16), size[0]), *(select(far, 0.0, t) for t in size[1:])]
    index = nearest_integer(size[0] * 16.0)
    r = distill([size[0], -(index * (1.0 / 16.0)), *size[1:]], n)
    slope = multiplied(r, [index * (-1.0 / 8.0)], n)
    square = scaled(multiplied(r, r, n), -2.0)
    total = _integral(slope, square, n, last / 16)
    value, bell = (looked_up(table, index, n) for table in known.bells(last + 1))
    made = added(value, multiplied(multiplied(bell, r, n), total, n), n)
    one = constants(x[0], [1.0])
    made = [select(far, a, b) for a, b in zip(fitted(one, n), made)]
    made = [select(x[0] < 0.0, -t, t) for t in made]
    return odd_at_zero(x, [select(x[0] == x[0], made[0], x[0]), *made[1:]])


def erfc(operands: list[Terms], n: int) -> Terms:
    """1 - erf(x) by the same integral, from the 32nd c nearest to |x|, where erfc(c) is known without cancellation."""
    x = operands[0]
    one, zero = constants(x[0], [1.0, 0.0])
    size = [select(x[0] < 0.0, -t, t) for t in x]
    far = size[0] > _LAST / 32
    size = [select(far, zero + _LAST / 32, size[0]), *(select(far, zero, t) for t in size[1:])]
    index = nearest_integer(size[0] * 32.0)
    r = distill([size[0], -(index * (1.0 / 32.0)), *size[1:]], n)
    slope = multiplied(r, [index * (-1.0 / 16.0)], n)
    total = _integral(slope, scaled(multiplied(r, r, n), -2.0), n, _LAST / 64)
    value, bell = (looked_up(table, index, n) for table in known.tails(_LAST + 1)[:2])
    made = added(value, negated(multiplied(multiplied(bell, r, n), total, n)), n)
    shift = gather(known.tails(_LAST + 1)[2], index)
    made = [select(far, zero, times_power(t, -shift)) for t in made]
    left = added([one + one], negated(made), n)
    made = [select(x[0] < 0.0, a, b) for a, b in zip(left, made)]
    return [select(x[0] == x[0], made[0], x[0]), *made[1:]]


def _integral(slope: Terms, square: Terms, n: int, largest: float) -> Terms:
    """sum t_k / (k + 1)."""
    earlier, term = None, constants(slope[0], [1.0])
    total, k = term, 0
    before, bound = 0.0, 1.0
    while bound > 2.0 ** -(53 * n + 4) or before > 2.0 ** -(53 * n + 4):
        width = max(1, min(n, math.ceil((53 * n + 6 + math.log2(max(bound, before))) / 53)))
        following = multiplied(slope, term, width)
        if earlier is not None:
            following = added(following, multiplied(square, earlier, width), width)
        share = constants(slope[0], known.components(known.ONE // (k + 1), width))
        earlier, term = term, multiplied(following, share, width)
        before, bound = bound, (largest / 16 * bound + before / 512) / (k + 1)
        k += 1
        share = constants(slope[0], known.components(known.ONE // (k + 1), width))
        total = added(total, multiplied(term, share, width), n)
    return total
