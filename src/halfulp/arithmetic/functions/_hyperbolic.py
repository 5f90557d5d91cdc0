"""Hyperbolic functions, their inverses, the sigmoid and powers of expansions, from exp and log."""

from __future__ import annotations

import math

from ...kernels import Value, exponent, floor, is_finite, select, times_power
from .._error_free import Terms, distill
from ..expansions._operators import added, divided, finished, multiplied, negated, rooted, scaled, square_root_of
from ._exp_log import constants, exp_terms, expm1_terms, log_terms, number, odd_at_zero

_LARGE = 2.0**120  # from here on sqrt(x^2 + 1) is |x| to all components


def _select_terms(condition, a: Terms, b: Terms) -> Terms:
    return [select(condition, s, t) for s, t in zip(a, b)]


def _size(x: Terms) -> Terms:
    return _select_terms(x[0] < 0.0, negated(x), x)


def _with_sign(x, made: Terms) -> Terms:
    return _select_terms(x < 0.0, negated(made), made)


def tanh(operands: list[Terms], n: int) -> Terms:
    """-e / (e + 2) with e = expm1(-2 |x|), and the sign of x."""
    x = operands[0]
    size = _size(x)
    one, zero = constants(x[0], [1.0, 0.0])
    far = size[0] > 400.0
    near = [select(far, one, size[0]), *(select(far, zero, t) for t in size[1:])]
    e = expm1_terms(scaled(near, -2.0), n)
    made = divided(negated(e), added(e, [one + one], n), n)
    made = [select(far, one, made[0]), *(select(far, zero, t) for t in made[1:])]
    return odd_at_zero(x, _with_sign(x[0], made))


def _halves(size: Terms, n: int) -> tuple[Terms, Terms]:
    """e^x / 2 and e^-x / 2 for x >= 0."""
    grown = exp_terms(size, n, less=1.0)
    return grown, divided(constants(size[0], [0.25]), grown, n)


def sinh(operands: list[Terms], n: int) -> Terms:
    """(e^x - e^-x) / 2, for |x| < 1 by expm1."""
    x = operands[0]
    size = _size(x)
    up, down = _halves(size, n)
    e = expm1_terms(size, n)
    near = scaled(added(e, divided(e, added(e, constants(x[0], [1.0]), n), n), n), 0.5)
    far = finished(up[0], added(up, [select(is_finite(up[0]), t, 0.0) for t in negated(down)], n))
    return odd_at_zero(x, _with_sign(x[0], _select_terms(size[0] < 1.0, near, far)))


def cosh(operands: list[Terms], n: int) -> Terms:
    """(e^x + e^-x) / 2."""
    up, down = _halves(_size(operands[0]), n)
    return finished(up[0], added(up, [select(is_finite(up[0]), t, 0.0) for t in down], n))


def _log_of_sum(x: Terms, rest: Terms, n: int) -> Terms:
    """log(1 + rest), and log(2 x) where x is large; x >= 0."""
    one, zero = constants(x[0], [1.0, 0.0])
    large = x[0] > _LARGE
    total = distill([one, *rest], n + 1)
    padded = list(x[: n + 1]) + [zero] * (n + 1 - len(x))
    return log_terms(_select_terms(large, padded, total), n, more=select(large, one, zero))


def asinh(operands: list[Terms], n: int) -> Terms:
    """log1p(a + a^2 / (1 + sqrt(1 + a^2))) for a = |x|, and the sign of x."""
    x = operands[0]
    size = _size(x)
    zero = number(x[0], 0.0)
    near = [select(size[0] > _LARGE, zero, t) for t in size]
    square = multiplied(near, near, n)
    one = constants(x[0], [1.0])
    below = added(rooted(added(square, one, n), n), one, n)
    made = _log_of_sum(size, added(near, divided(square, below, n), n), n)
    made = finished(select(is_finite(x[0]), made[0], size[0]), made)
    return odd_at_zero(x, _with_sign(x[0], made))


def acosh(operands: list[Terms], n: int) -> Terms:
    """log1p(t + sqrt(t (t + 2))) for t = x - 1."""
    x = operands[0]
    near = [select(x[0] > _LARGE, number(x[0], 1.0), x[0]), *(select(x[0] > _LARGE, 0.0, t) for t in x[1:])]
    t = distill([near[0], *constants(x[0], [-1.0]), *near[1:]], n)
    inner = multiplied(t, added(t, constants(x[0], [2.0]), n), n)
    rest = added(t, square_root_of(inner, n), n)
    made = _log_of_sum(x, rest, n)
    beyond = select(t[0] < 0.0, number(x[0], math.nan), made[0])
    unbounded = select(x[0] > 0.0, x[0], x[0] - x[0])
    return finished(select(is_finite(x[0]), beyond, unbounded), made)


def sigmoid(operands: list[Terms], n: int) -> Terms:
    """1 / (1 + e^-x), as e^x / (1 + e^x) below zero."""
    x = operands[0]
    e = exp_terms(negated(_size(x)), n)
    one, zero = constants(x[0], [1.0, 0.0])
    above = _select_terms(x[0] < 0.0, e, [one, *([zero] * (n - 1))])
    made = divided(above, added(e, [one], n), n)
    # e^x is far below the middle of the range there, and 1 + e^x is 1.
    made = _select_terms(x[0] < -200.0, e, made)
    return finished(made[0], made)


def _whole(x: Terms) -> tuple[Value, Value]:
    """Whether a value is an integer, and whether it is an odd one."""
    whole, odd = _whole_term(x[0])
    for t in x[1:]:
        w, o = _whole_term(t)
        whole, odd = whole & w, (odd & ~o) | (~odd & o)
    return whole, whole & odd


def _whole_term(t):
    whole, half = floor(t) == t, t * 0.5
    return whole, whole & (floor(half) != half) & is_finite(t)


def powered(operands: list[Terms], n: int) -> Terms:
    """x^y = e^(y log |x|), with the sign and special values of C's pow."""
    x, y = operands
    one, zero, nan, inf = constants(x[0], [1.0, 0.0, math.nan, math.inf])
    size = _size(x)
    sound = is_finite(x[0]) & (x[0] != 0.0)
    base = [select(sound, size[0], one), *(select(sound, t, zero) for t in size[1:])]
    logarithm = log_terms(base, n + 1)
    product = multiplied(y, logarithm, n + 1)
    plain = y[0] * select(x[0] == 0.0, -inf, select(sound, logarithm[0], select(x[0] == x[0], inf, nan)))
    made = exp_terms(
        [select(is_finite(plain), product[0], plain), *(select(is_finite(plain), t, zero) for t in product[1:])], n
    )
    head = select(is_finite(plain), made[0], select(plain > 0.0, inf, select(plain < 0.0, zero, nan)))
    whole, odd = _whole(y)
    negative = (x[0] < 0.0) | ((x[0] == 0.0) & (one / select(x[0] == 0.0, x[0], one) < 0.0))
    head = select((x[0] < 0.0) & is_finite(x[0]) & is_finite(y[0]) & ~whole, nan, head)
    head, low = (select(negative & odd, -head, head), [select(negative & odd, -t, t) for t in made[1:]])
    is_one = x[0] == 1.0
    for t in x[1:]:
        is_one = is_one & (t == 0.0)
    unit = (y[0] == 0.0) | is_one | ((x[0] == -1.0) & ~is_finite(y[0]) & (y[0] == y[0]))
    return finished(select(unit, one, head), [select(unit, one, head), *(select(unit, zero, t) for t in low)])


def hypot(operands: list[Terms], n: int) -> Terms:
    """sqrt(a^2 + b^2), both scaled by one power of two; infinite where either is, whatever the other."""
    a, b = map(_size, operands)
    one, zero, inf = constants(a[0], [1.0, 0.0, math.inf])
    largest = select(a[0] > b[0], a[0], b[0])
    # Below the normal numbers their own exponent says nothing, and none is needed.
    sound = is_finite(a[0]) & is_finite(b[0]) & (largest != 0.0)
    k = select(sound & (largest > 2.0**-1000), exponent(select(sound, largest, one)), zero - 1000.0)
    x, y = ([times_power(select(sound, t, zero), -k) for t in terms] for terms in (a, b))
    squares = added(multiplied(x, x, n), multiplied(y, y, n), n)
    made = [times_power(t, k) for t in rooted([select(sound, squares[0], one), *squares[1:]], n)]
    plain = a[0] + b[0]
    plain = select((a[0] == inf) | (b[0] == inf), inf, plain)
    return finished(select(sound, made[0], plain), made)
