"""Networks of the exact remainder and of quotients cut to integers.

r <- r - q b with an integer q at most r / b, again and again until |r| < |b|, is exact in enough components, whatever
the quotient's size; a rounded quotient would decide wrongly beside every integer.
"""

from __future__ import annotations

import math

from ...kernels import floor, is_finite, nearest_integer, select
from .._error_free import Terms, distill, two_product
from .._operators import added, fitted, negated, quotient
from ._exp_log import constants, number

# A quotient that is rounded three times is less than this much too large.
_BELOW = 1.0 - 2.0**-51


def _size(x: Terms) -> Terms:
    return [select(x[0] < 0.0, -t, t) for t in x]


def _differ(a: Terms, b: Terms):
    """Return whether exactly one of two is negative."""
    return ((a[0] < 0.0) & ~(b[0] < 0.0)) | (~(a[0] < 0.0) & (b[0] < 0.0))


def _reaches(r: Terms, b: Terms):
    """Return whether |r| >= |b|, for finite operands and b that is not 0."""
    over = distill([*_size(r), *negated(_size(b))], 1)[0] >= 0.0
    return over & is_finite(r[0]) & is_finite(b[0]) & (b[0] != 0.0)


def _scale_near(r, b: Terms) -> Terms:
    """Return b times a power of two such that r / b is at most 2^999."""
    far = abs(r) * 2.0**-600 > abs(b[0])
    farther = abs(r) * 2.0**-600 * 2.0**-600 > abs(b[0])
    b = [select(far, t * 2.0**600, t) for t in b]
    return [select(farther, t * 2.0**498, t) for t in b]


def step(operands: list[Terms], n: int) -> Terms:
    """r less an integer multiple of b, of r's sign, to n - 1 components; behind them 1 where |r| >= |b| still."""
    r, b = operands
    one, zero = constants(r[0], [1.0, 0.0])
    near = _scale_near(r[0], [select(is_finite(part), part, zero) for part in b])
    whole = floor(abs(r[0] / select(near[0] == 0.0, one, near[0])) * _BELOW)
    whole = select(whole == 0.0, one, whole)
    q = select(_differ(r, b), -whole, whole)
    q = select(_reaches(r, b), q, zero)
    taken = [t for part in near for t in two_product(-q, part)]
    rest = distill([*r, *taken], n - 1)
    return [*rest, select(_reaches(rest, b), one, zero)]


def _is_regular(a: Terms, b: Terms):
    return is_finite(a[0]) & (b[0] == b[0]) & (b[0] != 0.0)


def _finish_irregular(regular, zero_of, made: Terms, head) -> Terms:
    """Return a result with `head` where the operands are not regular, and the sign of `zero_of` where it is 0."""
    sound = regular & is_finite(made[0])
    first = select(regular, select(made[0] == 0.0, zero_of, made[0]), head)
    return [first, *(select(sound, t, 0.0) for t in made[1:])]


def _turns(r: Terms, b: Terms):
    """Return whether a remainder that is not 0 has the other sign than b."""
    return (r[0] != 0.0) & _differ(r, b)


def fmod(operands: list[Terms], n: int) -> Terms:
    """Return the remainder of a's sign, from (a, r, b)."""
    a, r, b = operands
    return _finish_irregular(_is_regular(a, b), a[0] * 0.0, distill(r, n + 1), number(a[0], math.nan))


def remainder(operands: list[Terms], n: int) -> Terms:
    """Return the remainder of b's sign, from (a, r, b); torch leaves a zero a's sign."""
    a, r, b = operands
    turns = _turns(r, b)
    sums = distill([*r, *(select(turns & is_finite(b[0]), t, 0.0) for t in b)], n + 1)
    sums = [select(turns & ~is_finite(b[0]), b[0], sums[0]), *sums[1:]]
    return _finish_irregular(_is_regular(a, b), a[0] * 0.0, sums, number(a[0], math.nan))


def _whole_quotient(a: Terms, r: Terms, b: Terms, n: int) -> Terms:
    """(a - r) / b, an integer but for roundings, each component to the nearest one."""
    difference = distill([*a, *negated(r)], n + 2)
    real = quotient(difference, b, n + 1)
    whole = distill([nearest_integer(t) for t in real], n + 1)
    return [select(is_finite(real[0]), whole[0], real[0]), *whole[1:]]


def trunc_divide(operands: list[Terms], n: int) -> Terms:
    """a / b cut toward zero, from (a, r, b)."""
    a, r, b = operands
    plain = a[0] / b[0]
    regular = _is_regular(a, b) & is_finite(b[0])
    return _finish_irregular(regular, plain * 0.0, _whole_quotient(a, r, b, n), plain)


def floor_divide(operands: list[Terms], n: int) -> Terms:
    """a / b cut down, from (a, r, b); NaN for an infinite a, as in torch."""
    a, r, b = operands
    plain = a[0] / b[0]
    whole = _whole_quotient(a, r, b, n)
    whole = fitted([select(is_finite(b[0]), t, 0.0) for t in whole], n + 1)
    less = added(whole, [select(_turns(r, b), number(a[0], -1.0), 0.0)], n + 1)
    less = [select(is_finite(whole[0]), less[0], whole[0]), *less[1:]]
    head = select(b[0] == 0.0, plain, number(a[0], math.nan))
    return _finish_irregular(_is_regular(a, b), select(is_finite(plain), plain, 0.0) * 0.0, less, head)
