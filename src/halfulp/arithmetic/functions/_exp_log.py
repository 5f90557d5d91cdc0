"""exp, log and what is made of them, to the accuracy of n float64 components: tables, then short series.

An argument is reduced exactly (as a distilled sum) to a table point and a rest so small that few terms of a series are
left; where the function is near a zero, the table's entry is exactly 0, so the result is relatively accurate there.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from ...kernels import Traced, Value, exponent, floor, gather, is_finite, nearest_integer, power, select, times_power
from .. import _constants as known
from .._error_free import Terms, distill, two_product
from ..expansions._operators import added, divided, finished, multiplied, negated, scaled

_GUARD = 6  # bits beyond the components that series and constants are cut to


def constants(like, values) -> Terms:
    """Numbers as values of the kind of another."""
    if isinstance(like, Traced):
        return [like.trace.emit("constant", (), float(value).hex()) for value in values]
    return [torch.tensor(value, dtype=like.dtype, device=like.device) for value in values]


def number(like, value: float):
    """Return one number as a value of the kind of another."""
    return constants(like, [value])[0]


def looked_up(tables: list[tuple[float, ...]], index, n: int) -> Terms:
    """n components of a table's entry."""
    return [gather(tables[i], index) for i in range(n)]


def series(x: Terms, coefficients: list[Fraction], n: int, bits: float) -> Terms:
    """sum c_k x^k by Horner's rule; |x| <= 2^-bits, so that high terms need few components."""

    def width(k: int) -> int:
        return max(1, min(n, math.ceil((53 * n + _GUARD - bits * k) / 53)))

    last = len(coefficients) - 1
    total = _exact(x[0], coefficients[last], width(last))
    for k in range(last - 1, -1, -1):
        w = width(k)
        total = added(multiplied(total, x[: width(k + 1)], w), _exact(x[0], coefficients[k], w), w)
    return total


def _exact(like, value: Fraction, n: int) -> Terms:
    return constants(like, known.components(known.fixed(value), n))


def terms_for(n: int, bits: float, growth=lambda k: 1.0) -> int:
    """How many terms until 2^(-bits k) / growth(k) falls below n components."""
    k = 1
    while bits * k + math.log2(growth(k)) < 53 * n + _GUARD:
        k += 1
    return k + 1


def small_expm1(r: Terms, n: int) -> Terms:
    """e^r - 1 for |r| <= log(2) / 256."""
    count = terms_for(n, 8.5, lambda k: math.factorial(k + 1))
    h = series(r, [Fraction(1, math.factorial(k + 1)) for k in range(count)], n, 8.5)
    return multiplied(r, h, n)


def exp_parts(x: Terms, n: int) -> tuple[Value, Terms]:
    """q and y with e^x = 2^q (1 + y), -0.3 < y < 0.42."""
    large, low = x[0] > 800.0, x[0] < -800.0
    head = select(large, 800.0, select(low, -800.0, x[0]))
    # Components behind a head that is cut would shift what is left of it.
    x = [head, *(select(large | low, 0.0, t) for t in x[1:])]
    k = nearest_integer(head * (128.0 / math.log(2.0)))
    pieces = known.chunks(known.ln2() // 128, 35, (53 * n + 50) // 35 + 1)
    steps = [-(k * c) for c in constants(k, pieces)]
    r = distill(_interleaved([head, *x[1:]], steps), n)
    q = floor(k * (1.0 / 128.0) + 0.5)
    e = looked_up(known.fractional_powers(), k - q * 128.0 + 64.0, n)
    p = small_expm1(r, n)
    return q, added(e, added(p, multiplied(e, p, n), n), n)


def _interleaved(a: Terms, b: Terms) -> Terms:
    short = min(len(a), len(b))
    return [t for pair in zip(a, b) for t in pair] + list(a[short:]) + list(b[short:])


def exp_terms(x: Terms, n: int, less: float = 0.0) -> Terms:
    """2^-less e^x."""
    q, y = exp_parts(x, n)
    one = added(constants(x[0], [1.0]), y, n)
    return [times_power(t, q - less) for t in one]


def exp(operands: list[Terms], n: int) -> Terms:
    """e^x."""
    made = exp_terms(operands[0], n)
    return finished(made[0], made)


def expm1_terms(x: Terms, n: int) -> Terms:
    """e^x - 1."""
    q, y = exp_parts(x, n)
    one = constants(x[0], [1.0])
    power_of_e = [times_power(t, q) for t in added(one, y, n)]
    far = finished(power_of_e[0] - 1.0, added(power_of_e, negated(one), n))
    return [select(q == 0.0, a, b) for a, b in zip(y, far)]


def expm1(operands: list[Terms], n: int) -> Terms:
    """e^x - 1, with the sign of a zero."""
    return odd_at_zero(operands[0], expm1_terms(operands[0], n))


def odd_at_zero(x: Terms, made: Terms) -> Terms:
    """A function that is zero at zero keeps its sign there."""
    return finished(select(x[0] == 0.0, x[0], made[0]), made)


def log_terms(x: Terms, n: int, more=0.0) -> Terms:
    """log x + more log 2 for finite x > 0."""
    zero, one = constants(x[0], [0.0, 1.0])
    shift = select(x[0] < 2.0**-960, zero + 54.0, select(x[0] > 2.0**960, zero - 54.0, zero))
    x = scaled(x, power(shift))
    e = exponent(x[0])
    x = scaled(x, power(-e))
    high = x[0] > math.sqrt(2.0)
    x = scaled(x, select(high, one * 0.5, one))
    e = e + select(high, one, zero)
    index = nearest_integer(x[0] * 64.0) - 45.0
    c = gather(known.reciprocals()[0], index)
    products = [t for part in x for t in two_product(part, c)]
    r = distill([products[0], *constants(c, [-1.0]), *products[1:]], n)
    pieces = known.chunks(known.ln2(), 40, (53 * n + 40) // 40 + 1)
    whole = [(e - shift + more) * piece for piece in constants(c, pieces)]
    near = looked_up(known.reciprocals()[1], index, n + 1)
    return distill(_interleaved(_interleaved(whole, near), small_log1p(r, n)), n)


def small_log1p(r: Terms, n: int) -> Terms:
    """log(1 + r) = 2 atanh(r / (2 + r)) for |r| <= 1/88."""
    s = divided(r, added(constants(r[0], [2.0]), r, n), n)
    square = multiplied(s, s, n)
    bits = 14.8
    coefficients = [Fraction(2, 2 * k + 3) for k in range(terms_for(n, bits) - 1)]
    rest = multiplied(multiplied(s, square, n), series(square, coefficients, n, bits), n)
    return added(scaled(s, 2.0), rest, n)


def log_finished(x, made: Terms) -> Terms:
    """Return a logarithm's terms with the special values of log x."""
    beyond = select(x < 0.0, number(x, math.nan), select(x == 0.0, number(x, -math.inf), x))
    return finished(select((x > 0.0) & is_finite(x), made[0], beyond), made)


def log(operands: list[Terms], n: int) -> Terms:
    """The natural logarithm."""
    return log_finished(operands[0][0], log_terms(operands[0], n))


def log1p_terms(x: Terms, n: int) -> tuple[Value, Terms]:
    """1 + x, and its logarithm."""
    total = distill([*constants(x[0], [1.0]), *x], n + 1)
    return total[0], log_terms(total, n)


def log1p(operands: list[Terms], n: int) -> Terms:
    """log(1 + x), relatively accurate near zero."""
    x = operands[0]
    total, made = log1p_terms(x, n)
    return odd_at_zero(x, log_finished(select(is_finite(x[0]), total, x[0]), made))
