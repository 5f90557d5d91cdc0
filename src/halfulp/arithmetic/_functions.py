"""Elementary functions of expansions: remainders, exp and log, trigonometric functions, and the list of all.

An argument is reduced exactly (as a distilled sum) to a table point and a rest so small that few terms of a series are
left; where the function is near a zero, the table's entry is exactly 0, so the result is relatively accurate there.

r <- r - q b with an integer q at most r / b, again and again until |r| < |b|, is exact in enough components, whatever
the quotient's size; a rounded quotient would decide wrongly beside every integer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from ..kernels import (
    Traced,
    Value,
    exponent,
    floor,
    gather,
    is_finite,
    nearest_integer,
    note_fallback,
    power,
    select,
    times_power,
)
from . import _constants as known
from . import _operators as nets
from ._error_free import Terms, distill, two_product
from ._operators import added, divided, finished, fitted, multiplied, negated, quotient, rooted, scaled, square_root_of

_GUARD = 6  # bits beyond the components that series and constants are cut to


def constants(like, values) -> Terms:
    """Return numbers as constants of the trace, or as tensors of the dtype and device, of another value."""
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
    total = _rational_constant(x[0], coefficients[last], width(last))
    for k in range(last - 1, -1, -1):
        w = width(k)
        total = added(multiplied(total, x[: width(k + 1)], w), _rational_constant(x[0], coefficients[k], w), w)
    return total


def _rational_constant(like, value: Fraction, n: int) -> Terms:
    return constants(like, known.components(known.fixed(value), n))


def terms_for(n: int, bits: float, growth=lambda k: 1.0) -> int:
    """Return how many terms there are until 2^(-bits k) / growth(k) falls below n components."""
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
    r = distill(_interleave([head, *x[1:]], steps), n)
    q = floor(k * (1.0 / 128.0) + 0.5)
    e = looked_up(known.fractional_powers(), k - q * 128.0 + 64.0, n)
    p = small_expm1(r, n)
    return q, added(e, added(p, multiplied(e, p, n), n), n)


def _interleave(a: Terms, b: Terms) -> Terms:
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
    return _select_terms(q == 0.0, y, far)


def expm1(operands: list[Terms], n: int) -> Terms:
    """e^x - 1, with the sign of a zero."""
    return odd_at_zero(operands[0], expm1_terms(operands[0], n))


def odd_at_zero(x: Terms, made: Terms) -> Terms:
    """Keep the sign of x in the result of a function that is zero at zero."""
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
    return distill(_interleave(_interleave(whole, near), small_log1p(r, n)), n)


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
    """Return the natural logarithm."""
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


_LARGE = 2.0**120  # from here on sqrt(x^2 + 1) is |x| to all components


def _select_terms(condition, a: Terms, b: Terms) -> Terms:
    return [select(condition, s, t) for s, t in zip(a, b)]


def _copy_sign(x, made: Terms) -> Terms:
    return _select_terms(x < 0.0, negated(made), made)


def _absolute(x: Terms) -> Terms:
    return _copy_sign(x[0], x)


def _bounded(far, limit, x: Terms) -> Terms:
    """Return x, or a limit where it is far."""
    return [select(far, limit, x[0]), *(select(far, 0.0, t) for t in x[1:])]


def tanh(operands: list[Terms], n: int) -> Terms:
    """-e / (e + 2) with e = expm1(-2 |x|), and the sign of x."""
    x = operands[0]
    size, one = _absolute(x), number(x[0], 1.0)
    far = size[0] > 400.0
    near = _bounded(far, one, size)
    e = expm1_terms(scaled(near, -2.0), n)
    made = divided(negated(e), added(e, [one + one], n), n)
    made = _bounded(far, one, made)
    return odd_at_zero(x, _copy_sign(x[0], made))


def _halves(size: Terms, n: int) -> tuple[Terms, Terms]:
    """e^x / 2 and e^-x / 2 for x >= 0."""
    grown = exp_terms(size, n, less=1.0)
    return grown, divided(constants(size[0], [0.25]), grown, n)


def sinh(operands: list[Terms], n: int) -> Terms:
    """(e^x - e^-x) / 2, for |x| < 1 by expm1."""
    x = operands[0]
    size = _absolute(x)
    up, down = _halves(size, n)
    e = expm1_terms(size, n)
    near = scaled(added(e, divided(e, added(e, constants(x[0], [1.0]), n), n), n), 0.5)
    far = finished(up[0], added(up, [select(is_finite(up[0]), t, 0.0) for t in negated(down)], n))
    return odd_at_zero(x, _copy_sign(x[0], _select_terms(size[0] < 1.0, near, far)))


def cosh(operands: list[Terms], n: int) -> Terms:
    """(e^x + e^-x) / 2."""
    up, down = _halves(_absolute(operands[0]), n)
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
    size = _absolute(x)
    zero = number(x[0], 0.0)
    near = [select(size[0] > _LARGE, zero, t) for t in size]
    square = multiplied(near, near, n)
    one = constants(x[0], [1.0])
    below = added(rooted(added(square, one, n), n), one, n)
    made = _log_of_sum(size, added(near, divided(square, below, n), n), n)
    made = finished(select(is_finite(x[0]), made[0], size[0]), made)
    return odd_at_zero(x, _copy_sign(x[0], made))


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
    e = exp_terms(negated(_absolute(x)), n)
    one, zero = constants(x[0], [1.0, 0.0])
    above = _select_terms(x[0] < 0.0, e, [one, *([zero] * (n - 1))])
    made = divided(above, added(e, [one], n), n)
    # e^x is far below the middle of the range there, and 1 + e^x is 1.
    made = _select_terms(x[0] < -200.0, e, made)
    return finished(made[0], made)


def _whole(x: Terms) -> tuple[Value, Value]:
    """Return whether a value is an integer, and whether it is an odd one."""
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
    size = _absolute(x)
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
    a, b = map(_absolute, operands)
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


_LAST = 873  # erfc(873 / 32) is below the smallest float64


def _edge(n: int) -> int:
    """Return from how many sixteenths on erf(x) is 1 to n components."""
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
    size = _absolute(x)
    far = size[0] > last / 16
    size = _bounded(far, number(x[0], last / 16), size)
    index = nearest_integer(size[0] * 16.0)
    r = distill([size[0], -(index * (1.0 / 16.0)), *size[1:]], n)
    slope = multiplied(r, [index * (-1.0 / 8.0)], n)
    square = scaled(multiplied(r, r, n), -2.0)
    total = _integral(slope, square, n, last / 16)
    value, bell = (looked_up(table, index, n) for table in known.bells(last + 1))
    made = added(value, multiplied(multiplied(bell, r, n), total, n), n)
    one = constants(x[0], [1.0])
    made = _select_terms(far, fitted(one, n), made)
    made = _copy_sign(x[0], made)
    return odd_at_zero(x, [select(x[0] == x[0], made[0], x[0]), *made[1:]])


def erfc(operands: list[Terms], n: int) -> Terms:
    """1 - erf(x) by the same integral, from the 32nd c nearest to |x|, where erfc(c) is known without cancellation."""
    x = operands[0]
    one, zero = constants(x[0], [1.0, 0.0])
    size = _absolute(x)
    far = size[0] > _LAST / 32
    size = _bounded(far, zero + _LAST / 32, size)
    index = nearest_integer(size[0] * 32.0)
    r = distill([size[0], -(index * (1.0 / 32.0)), *size[1:]], n)
    slope = multiplied(r, [index * (-1.0 / 16.0)], n)
    total = _integral(slope, scaled(multiplied(r, r, n), -2.0), n, _LAST / 64)
    value, bell = (looked_up(table, index, n) for table in known.tails(_LAST + 1)[:2])
    made = added(value, negated(multiplied(multiplied(bell, r, n), total, n)), n)
    shift = gather(known.tails(_LAST + 1)[2], index)
    made = [select(far, zero, times_power(t, -shift)) for t in made]
    left = added([one + one], negated(made), n)
    made = _select_terms(x[0] < 0.0, left, made)
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


# A quotient that is rounded three times is less than this much too large.
_BELOW = 1.0 - 2.0**-51


def _differ(a: Terms, b: Terms):
    """Return whether exactly one of two is negative."""
    return ((a[0] < 0.0) & ~(b[0] < 0.0)) | (~(a[0] < 0.0) & (b[0] < 0.0))


def _reaches(r: Terms, b: Terms):
    """Return whether |r| >= |b|, for finite operands and b that is not 0."""
    over = distill([*_absolute(r), *negated(_absolute(b))], 1)[0] >= 0.0
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
    size = _absolute(x)
    steep, far = size[0] > 1.0, size[0] > 2.0**400
    inside = _bounded(far, one, size)
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
    made = _select_terms(steep, added(right, negated(below), n), flat)
    made = _copy_sign(x[0], made)
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
    note_fallback("arithmetic", "angles beyond 2^20 are reduced one by one, exactly and slowly")
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


@dataclass(frozen=True)
class Function:
    """One function: its number of operands and its network.

    Attributes:
        operands: how many expansions it takes.
        network: (operands as lists of terms, components) -> terms, complete with special values.
        any_precision: whether it also runs in float32 arithmetic.
    """

    operands: int
    network: Callable[[list[Terms], int], Terms]
    any_precision: bool = False


def _addcmul(x: list[Terms], n: int) -> Terms:
    """a + b c, with an error relative to |a| + |b c|, not to the result of a cancellation."""
    plain = x[0][0] + x[1][0] * x[2][0]
    if n == 2 and len(x[0]) == 2 and len(x[1]) == 1:
        return nets.settled(plain, nets.updated(x[0], x[1][0], x[2]))
    product = nets.multiplied(x[1], x[2], n if len(x[1]) + len(x[2]) > 2 else 2)
    return nets.settled(plain, nets.added(x[0], product, n))


def _same(x: list[Terms], n: int) -> Terms:
    """Return all terms unchanged, so that the stored result is rounded from the whole sum."""
    many = max(n, len(x[0]))
    return nets.gathered(x[0], many) if len(x[0]) > 1 else nets.fitted(x[0], n)


def _sign(x: list[Terms], n: int) -> Terms:
    """-1, 0 or 1 as x - y is; 2 for NaN."""
    a, b = x[0][0], x[1][0]
    difference = distill([*x[0], *nets.negated(x[1])], 1)[0]
    exact = is_finite(a) & is_finite(b)
    one = a * 0.0 + 1.0
    less = exact & (difference < 0.0) | ~exact & (a < b)
    more = exact & (difference > 0.0) | ~exact & (a > b)
    known = select(more, 1.0, select(less, -1.0, 0.0 * one))
    return nets.fitted([select((a != a) | (b != b), 2.0, known)], n)


FUNCTIONS: dict[str, Function] = {
    "add": Function(2, lambda x, n: nets.settled(x[0][0] + x[1][0], added(x[0], x[1], n)), True),
    "sub": Function(2, lambda x, n: nets.settled(x[0][0] - x[1][0], added(x[0], negated(x[1]), n)), True),
    "mul": Function(2, lambda x, n: nets.settled(x[0][0] * x[1][0], multiplied(x[0], x[1], n)), True),
    "div": Function(2, lambda x, n: nets.quotient(x[0], x[1], n), True),
    "sqrt": Function(1, lambda x, n: nets.square_root_of(x[0], n), True),
    "reciprocal": Function(1, lambda x, n: nets.quotient([nets.one_like(x[0][0])], x[0], n), True),
    "addcmul": Function(3, _addcmul, True),
    "renormalize": Function(1, _same, True),
    "compare": Function(2, _sign, True),
    "exp": Function(1, exp),
    "expm1": Function(1, expm1),
    "log": Function(1, log),
    "log1p": Function(1, log1p),
    "sinh": Function(1, sinh),
    "cosh": Function(1, cosh),
    "tanh": Function(1, tanh),
    "asinh": Function(1, asinh),
    "acosh": Function(1, acosh),
    "sigmoid": Function(1, sigmoid),
    "pow": Function(2, powered),
    "sin": Function(1, sin),
    "cos": Function(1, cos),
    "atan": Function(1, atan),
    "erf": Function(1, erf),
    "erfc": Function(1, erfc),
    "hypot": Function(2, hypot),
}

# What ends a division whose remainder is known: functions of (a, r, b). `_pointwise` makes r by "remainder step".
STEP = "remainder step"
DIVISIONS: dict[str, Function] = {
    "fmod": Function(3, fmod),
    "remainder": Function(3, remainder),
    "trunc_divide": Function(3, trunc_divide),
    "floor_divide": Function(3, floor_divide),
}
NETWORKS = {**FUNCTIONS, **DIVISIONS, STEP: Function(2, step)}
