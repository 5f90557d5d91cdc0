"""Elementary functions of expansions: remainders, exp and log, trigonometric functions, and the list of all.

An argument is reduced exactly (as a distilled sum) to a table point and a rest so small that few terms of a series are
left; where the function is near a zero, the table's entry is exactly 0, so the result is relatively accurate there.

r <- r - q b with an integer q at most r / b, again and again until |r| < |b|, is exact in enough components, whatever
the quotient's size; a rounded quotient would decide wrongly beside every integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    power_of_two,
    round_to_integer,
    scale_by_power_of_two,
    select,
)
from . import _constants as constants
from ._operators import (
    Terms,
    add,
    distill_terms,
    divide,
    divide_with_scaling,
    fast_two_sum,
    multiply,
    negate,
    pad_or_cut_terms,
    scale_terms,
    set_special_values,
    set_zero_signs,
    sum_terms,
    take_square_root,
    take_square_root_with_scaling,
    two_product,
    two_sum,
)

_GUARD_BITS = 6  # bits beyond the components that series and constants are cut to


def make_constants(like, values) -> Terms:
    """Return numbers as constants of the trace, or as tensors of the dtype and device, of another value."""
    if isinstance(like, Traced):
        return [like.trace.emit("constant", (), float(value).hex()) for value in values]
    return [torch.tensor(value, dtype=like.dtype, device=like.device) for value in values]


def gather_table_terms(tables: list[tuple[float, ...]], index, n: int) -> Terms:
    """n components of a table's entry."""
    return [gather(tables[i], index) for i in range(n)]


def evaluate_series(x: Terms, coefficients: list[Fraction], n: int, bits: float) -> Terms:
    """sum c_k x^k by Horner's rule; |x| <= 2^-bits, so that high terms need few components."""

    def width(k: int) -> int:
        return max(1, min(n, math.ceil((53 * n + _GUARD_BITS - bits * k) / 53)))

    total: Terms = []
    for k in range(len(coefficients) - 1, -1, -1):
        w = width(k)
        coefficient = make_constants(x[0], constants.split_into_floats(coefficients[k], w))
        total = add(multiply(total, x[: width(k + 1)], w), coefficient, w) if total else coefficient
    return total


def count_series_terms(n: int, bits: float, growth=lambda k: 1.0) -> int:
    """Return how many terms there are until 2^(-bits k) / growth(k) falls below n components."""
    k = 1
    while bits * k + math.log2(growth(k)) < 53 * n + _GUARD_BITS:
        k += 1
    return k + 1


def split_exp_into_exponent_and_fraction(x: Terms, n: int) -> tuple[Value, Terms]:
    """q and y with e^x = 2^q (1 + y), -0.3 < y < 0.42."""
    large, low = x[0] > 800.0, x[0] < -800.0
    head = select(large, 800.0, select(low, -800.0, x[0]))
    # Components behind a head that is cut would shift what is left of it.
    x = [head, *(select(large | low, 0.0, t) for t in x[1:])]
    k = round_to_integer(head * (128.0 / math.log(2.0)))
    pieces = constants.split_into_bit_chunks(constants.compute_log(2) / 128, 35, (53 * n + 50) // 35 + 1)
    steps = [-(k * c) for c in make_constants(k, pieces)]
    r = distill_terms(_interleave_terms([head, *x[1:]], steps), n)
    q = floor(k * (1.0 / 128.0) + 0.5)
    e = gather_table_terms(constants.make_fractional_power_tables(), k - q * 128.0 + 64.0, n)
    count = count_series_terms(n, 8.5, lambda k: math.factorial(k + 1))
    h = evaluate_series(r, [Fraction(1, math.factorial(k + 1)) for k in range(count)], n, 8.5)
    p = multiply(r, h, n)  # e^r - 1 for |r| <= log(2) / 256
    return q, add(e, add(p, multiply(e, p, n), n), n)


def _interleave_terms(a: Terms, b: Terms) -> Terms:
    short = min(len(a), len(b))
    return [t for pair in zip(a, b) for t in pair] + list(a[short:]) + list(b[short:])


def evaluate_exp(x: Terms, n: int) -> Terms:
    """Return e^x, of finite x."""
    q, y = split_exp_into_exponent_and_fraction(x, n)
    one = add(make_constants(x[0], [1.0]), y, n)
    return [scale_by_power_of_two(t, q) for t in one]


def exp(x: Terms, n: int) -> Terms:
    """e^x."""
    made = evaluate_exp(x, n)
    return set_special_values(made[0], made)


def evaluate_expm1(x: Terms, n: int) -> Terms:
    """e^x - 1."""
    q, y = split_exp_into_exponent_and_fraction(x, n)
    one = make_constants(x[0], [1.0])
    power_of_e = [scale_by_power_of_two(t, q) for t in add(one, y, n)]
    far = set_special_values(power_of_e[0] - 1.0, add(power_of_e, negate(one), n))
    return _select_terms(q == 0.0, y, far)


def expm1(x: Terms, n: int) -> Terms:
    """e^x - 1, with the sign of a zero."""
    return keep_sign_of_zero(x, evaluate_expm1(x, n))


def keep_sign_of_zero(x: Terms, made: Terms) -> Terms:
    """Keep the sign of x in the result of a function that is zero at zero."""
    return set_special_values(select(x[0] == 0.0, x[0], made[0]), made)


def evaluate_log(x: Terms, n: int, more=0.0) -> Terms:
    """log x + more log 2 for finite x > 0."""
    zero, one = make_constants(x[0], [0.0, 1.0])
    shift = select(x[0] < 2.0**-960, zero + 54.0, select(x[0] > 2.0**960, zero - 54.0, zero))
    x = scale_terms(x, power_of_two(shift))
    e = exponent(x[0])
    x = scale_terms(x, power_of_two(-e))
    high = x[0] > math.sqrt(2.0)
    x = scale_terms(x, select(high, one * 0.5, one))
    e = e + select(high, one, zero)
    index = round_to_integer(x[0] * 64.0) - 45.0
    c = gather(constants.make_reciprocal_and_log_tables()[0], index)
    products = [t for part in x for t in two_product(part, c)]
    r = distill_terms([products[0], *make_constants(c, [-1.0]), *products[1:]], n)
    pieces = constants.split_into_bit_chunks(constants.compute_log(2), 40, (53 * n + 40) // 40 + 1)
    whole = [(e - shift + more) * piece for piece in make_constants(c, pieces)]
    near = gather_table_terms(constants.make_reciprocal_and_log_tables()[1], index, n + 1)
    return distill_terms(_interleave_terms(_interleave_terms(whole, near), _evaluate_small_log1p(r, n)), n)


def _evaluate_small_log1p(r: Terms, n: int) -> Terms:
    """log(1 + r) = 2 atanh(r / (2 + r)) for |r| <= 1/88."""
    s = divide(r, add(make_constants(r[0], [2.0]), r, n), n)
    square = multiply(s, s, n)
    bits = 14.8
    coefficients = [Fraction(2, 2 * k + 3) for k in range(count_series_terms(n, bits) - 1)]
    rest = multiply(multiply(s, square, n), evaluate_series(square, coefficients, n, bits), n)
    return add(scale_terms(s, 2.0), rest, n)


def set_logarithm_special_values(x, made: Terms) -> Terms:
    """Return a logarithm's terms with the special values of log x."""
    nan, lowest = make_constants(x, [math.nan, -math.inf])
    beyond = select(x < 0.0, nan, select(x == 0.0, lowest, x))
    return set_special_values(select((x > 0.0) & is_finite(x), made[0], beyond), made)


def log(x: Terms, n: int) -> Terms:
    """Return the natural logarithm."""
    return set_logarithm_special_values(x[0], evaluate_log(x, n))


def log1p(x: Terms, n: int) -> Terms:
    """log(1 + x), relatively accurate near zero."""
    total = distill_terms([*make_constants(x[0], [1.0]), *x], n + 1)
    return keep_sign_of_zero(
        x, set_logarithm_special_values(select(is_finite(x[0]), total[0], x[0]), evaluate_log(total, n))
    )


def _select_terms(condition, a: Terms, b: Terms) -> Terms:
    return [select(condition, s, t) for s, t in zip(a, b)]


def _copy_sign(x, made: Terms) -> Terms:
    return _select_terms(x < 0.0, negate(made), made)


def _take_absolute(x: Terms) -> Terms:
    return _copy_sign(x[0], x)


def _select_limit_where_far(far, limit, x: Terms) -> Terms:
    """Return x, or a limit where it is far."""
    return [select(far, limit, x[0]), *(select(far, 0.0, t) for t in x[1:])]


def tanh(x: Terms, n: int) -> Terms:
    """-e / (e + 2) with e = expm1(-2 |x|), and the sign of x."""
    size, (one,) = _take_absolute(x), make_constants(x[0], [1.0])
    far = size[0] > 400.0
    near = _select_limit_where_far(far, one, size)
    e = evaluate_expm1(scale_terms(near, -2.0), n)
    made = divide(negate(e), add(e, [one + one], n), n)
    made = _select_limit_where_far(far, one, made)
    return keep_sign_of_zero(x, _copy_sign(x[0], made))


def asinh(x: Terms, n: int) -> Terms:
    """log1p(a + a^2 / (1 + sqrt(1 + a^2))) for a = |x|, log(2 a) where a is large, and the sign of x."""
    size = _take_absolute(x)
    one, zero = make_constants(x[0], [1.0, 0.0])
    large = size[0] > 2.0**120  # from here on sqrt(a^2 + 1) is a to all components
    near = [select(large, zero, t) for t in size]
    square = multiply(near, near, n)
    below = add(take_square_root(add(square, [one], n), n), [one], n)
    total = distill_terms([one, *add(near, divide(square, below, n), n)], n + 1)
    padded = list(size[: n + 1]) + [zero] * (n + 1 - len(size))
    made = evaluate_log(_select_terms(large, padded, total), n, more=select(large, one, zero))
    made = set_special_values(select(is_finite(x[0]), made[0], size[0]), made)
    return keep_sign_of_zero(x, _copy_sign(x[0], made))


def sigmoid(x: Terms, n: int) -> Terms:
    """1 / (1 + e^-x), as e^x / (1 + e^x) below zero."""
    e = evaluate_exp(negate(_take_absolute(x)), n)
    one, zero = make_constants(x[0], [1.0, 0.0])
    above = _select_terms(x[0] < 0.0, e, [one, *([zero] * (n - 1))])
    made = divide(above, add(e, [one], n), n)
    # e^x is far below the middle of the range there, and 1 + e^x is 1.
    made = _select_terms(x[0] < -200.0, e, made)
    return set_special_values(made[0], made)


def _find_integer_and_odd_masks(x: Terms) -> tuple[Value, Value]:
    """Return whether a value is an integer, and whether it is an odd one."""
    whole, odd = _find_term_integer_and_odd_masks(x[0])
    for t in x[1:]:
        w, o = _find_term_integer_and_odd_masks(t)
        whole, odd = whole & w, (odd & ~o) | (~odd & o)
    return whole, whole & odd


def _find_term_integer_and_odd_masks(t):
    whole, half = floor(t) == t, t * 0.5
    return whole, whole & (floor(half) != half) & is_finite(t)


def raise_to_power(x: Terms, y: Terms, n: int) -> Terms:
    """x^y = e^(y log |x|), with the sign and special values of C's pow."""
    one, zero, nan, inf = make_constants(x[0], [1.0, 0.0, math.nan, math.inf])
    size = _take_absolute(x)
    sound = is_finite(x[0]) & (x[0] != 0.0)
    base = [select(sound, size[0], one), *(select(sound, t, zero) for t in size[1:])]
    logarithm = evaluate_log(base, n + 1)
    product = multiply(y, logarithm, n + 1)
    plain = y[0] * select(x[0] == 0.0, -inf, select(sound, logarithm[0], select(x[0] == x[0], inf, nan)))
    made = evaluate_exp(
        [select(is_finite(plain), product[0], plain), *(select(is_finite(plain), t, zero) for t in product[1:])], n
    )
    head = select(is_finite(plain), made[0], select(plain > 0.0, inf, select(plain < 0.0, zero, nan)))
    whole, odd = _find_integer_and_odd_masks(y)
    negative = (x[0] < 0.0) | ((x[0] == 0.0) & (one / select(x[0] == 0.0, x[0], one) < 0.0))
    head = select((x[0] < 0.0) & is_finite(x[0]) & is_finite(y[0]) & ~whole, nan, head)
    head, low = (select(negative & odd, -head, head), [select(negative & odd, -t, t) for t in made[1:]])
    is_one = x[0] == 1.0
    for t in x[1:]:
        is_one = is_one & (t == 0.0)
    unit = (y[0] == 0.0) | is_one | ((x[0] == -1.0) & ~is_finite(y[0]) & (y[0] == y[0]))
    return set_special_values(select(unit, one, head), [select(unit, one, head), *(select(unit, zero, t) for t in low)])


LARGEST_ANGLE = 2.0**20  # of the kernels' reduction


def _find_index_sine_and_cosm1(x: Terms, n: int) -> tuple[Value, Terms, Terms]:
    """Return the table's index k, sin r and cos r - 1 for r = x - k pi / 32, |r| <= pi / 64."""
    head = select(abs(x[0]) > 2.0 * LARGEST_ANGLE, 0.0, x[0])
    k = round_to_integer(head * (32.0 / math.pi))
    # Cancellation may take 53 bits per component and the size of k; what is left must still be accurate.
    pieces = constants.split_into_bit_chunks(constants.compute_pi() / 32, 28, (53 * (2 * n) + 60) // 28 + 1)
    steps = [-(k * c) for c in make_constants(x[0], pieces)]
    r = distill_terms([head, *steps[:2], *x[1:], *steps[2:]], n)
    index = k - round_to_integer(k * (1.0 / 64.0) - 0.5 + 1.0 / 128.0) * 64.0
    square = multiply(r, r, n)
    bits = 8.69
    count = count_series_terms(n, bits, lambda k: math.factorial(2 * k + 1))
    odd = [Fraction((-1) ** (k + 1), math.factorial(2 * k + 3)) for k in range(count)]
    even = [Fraction((-1) ** (k + 1), math.factorial(2 * k + 2)) for k in range(count)]
    sine = add(r, multiply(multiply(r, square, n), evaluate_series(square, odd, n, bits), n), n)
    return index, sine, multiply(square, evaluate_series(square, even, n, bits), n)


def _rotate_table_entry(tables: tuple, index, along: Terms, across: Terms, n: int, sign: float) -> Terms:
    """a + (a (cos r - 1) + sign b sin r) for a and b from the tables."""
    a, b = gather_table_terms(tables[0], index, n), gather_table_terms(tables[1], index, n)
    rest = add(multiply(a, along, n), scale_terms(multiply(b, across, n), sign), n)
    return add(a, rest, n)


def sin(x: Terms, n: int) -> Terms:
    """Return the sine, for |x| <= 2^20."""
    index, sine, versine = _find_index_sine_and_cosm1(x, n)
    made = _rotate_table_entry(constants.make_sine_cosine_tables(), index, versine, sine, n, 1.0)
    return keep_sign_of_zero(x, set_special_values(select(is_finite(x[0]), made[0], x[0] - x[0]), made))


def cos(x: Terms, n: int) -> Terms:
    """Return the cosine, for |x| <= 2^20."""
    index, sine, versine = _find_index_sine_and_cosm1(x, n)
    made = _rotate_table_entry(constants.make_sine_cosine_tables()[::-1], index, versine, sine, n, -1.0)
    return set_special_values(select(is_finite(x[0]), made[0], x[0] - x[0]), made)


@dataclass(frozen=True)
class ExpansionFunction:
    """One function: its number of operands and its network."""

    operands: int
    network: Callable[..., Terms]  # (terms of each operand, components) -> terms, complete with special values
    any_precision: bool = False  # whether it also runs in float32 arithmetic


def _addcmul(a: Terms, b: Terms, c: Terms, n: int) -> Terms:
    """a + b c, with an error relative to |a| + |b c|, not to the result of a cancellation."""
    plain = a[0] + b[0] * c[0]
    if n == 2 and len(a) == 2 and len(b) == 1:  # at most 4 u^2 off, for half the work of a product and a sum
        product, error = two_product(c[0], b[0])
        high, low = two_sum(a[0], product)
        rest = low + (error + c[1] * b[0] if len(c) > 1 else error)
        return set_zero_signs(plain, list(fast_two_sum(high, a[1] + rest)))
    product = multiply(b, c, n if len(b) + len(c) > 2 else 2)
    return set_zero_signs(plain, add(a, product, n))


def _find_sign_of_difference(x: Terms, y: Terms, n: int) -> Terms:
    """-1, 0 or 1 as x - y is; 2 for NaN."""
    a, b = x[0], y[0]
    difference = distill_terms([*x, *negate(y)], 1)[0]
    exact = is_finite(a) & is_finite(b) & is_finite(difference)  # which overflows only where the signs differ
    one = a * 0.0 + 1.0
    less = exact & (difference < 0.0) | ~exact & (a < b)
    more = exact & (difference > 0.0) | ~exact & (a > b)
    sign = select(more, 1.0, select(less, -1.0, 0.0 * one))
    return pad_or_cut_terms([select((a != a) | (b != b), 2.0, sign)], n)


EXPANSION_FUNCTION_BY_NAME: dict[str, ExpansionFunction] = {
    "add": ExpansionFunction(2, lambda x, y, n: set_zero_signs(x[0] + y[0], add(x, y, n)), True),
    "sub": ExpansionFunction(2, lambda x, y, n: set_zero_signs(x[0] - y[0], add(x, negate(y), n)), True),
    "mul": ExpansionFunction(2, lambda x, y, n: set_zero_signs(x[0] * y[0], multiply(x, y, n)), True),
    "div": ExpansionFunction(2, divide_with_scaling, True),
    "sqrt": ExpansionFunction(1, take_square_root_with_scaling, True),
    "reciprocal": ExpansionFunction(
        1, lambda x, n: divide_with_scaling([select(is_finite(x[0]), x[0], 0.0) * 0.0 + 1.0], x, n), True
    ),
    "addcmul": ExpansionFunction(3, _addcmul, True),
    # All terms stay, so that the stored result is rounded from the whole sum.
    "renormalize": ExpansionFunction(
        1, lambda x, n: sum_terms(x, max(n, len(x))) if len(x) > 1 else pad_or_cut_terms(x, n), True
    ),
    "compare": ExpansionFunction(2, _find_sign_of_difference, True),
    "pow": ExpansionFunction(2, raise_to_power),
}
for _function in (exp, expm1, log, log1p, tanh, asinh, sigmoid, sin, cos):
    EXPANSION_FUNCTION_BY_NAME[_function.__name__] = ExpansionFunction(1, _function)
