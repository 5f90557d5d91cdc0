"""Arithmetic on expansions without branches: error-free transforms, + - * / and roots of sums of components.

An expansion is a list of values, the largest first, each at most half an ulp of the one before. Two components follow
the algorithms and bounds of Joldes, Muller and Popescu (ACM TOMS 44, 2017) and Lefevre, Louvet, Muller, Picot and
Rideau (2023), u = 2^-p: sum 3u^2, product 5u^2, quotient 15u^2, root 25/8 u^2, with a plain operand 2u^2. Three and
more components are distilled from all exact partial results: at most 2^-(n p - 4).
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import (
    Value,
    is_computed_in_float64,
    is_finite,
    power_of_two,
    power_of_two_below,
    product_error,
    record_out_of_line,
    round_to_float32,
    scale_by_power_of_two,
    select,
    square_root,
)

Terms = list[Any]  # of values: tensors, or traced ones


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b = s + e exactly, s = fl(a + b) (Knuth 1969, Moller 1965); 6 operations."""
    s = a + b
    other = s - a
    return s, (a - (s - other)) + (b - other)


def fast_two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b = s + e exactly for |a| >= |b| or a = 0 (Dekker 1971); 3 operations."""
    s = a + b
    return s, b - (s - a)


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """a b = p + e exactly where e is representable, p = fl(a b)."""
    p = a * b
    return p, product_error(a, b, p)


def vec_sum(terms: Terms, first: int = 0) -> Terms:
    """Add error-free from the last term up to `first`: the sum stays, its head gathers there (VecSum)."""
    out = list(terms)
    for i in range(len(out) - 2, first - 1, -1):
        out[i], out[i + 1] = two_sum(out[i], out[i + 1])
    return out


@record_out_of_line
def distill_terms(terms: Terms, keep: int) -> Terms:
    """Return the `keep` leading components of a sum of any terms: pass after pass, each fixing one more of them.

    The order of the terms does not matter, nor how much of them cancels (Priest 1992; Ogita, Rump, Oishi 2005: each
    pass divides the condition of what is left by an ulp).
    """
    out = list(terms)
    for _ in range(2):
        out = vec_sum(out)
    for first in range(1, min(keep, len(out) - 1) + 1):
        out = vec_sum(vec_sum(out, first), first - 1)
    return out[:keep] + [out[0] * 0.0] * (keep - len(out))


def set_special_values(plain, terms: Terms) -> Terms:
    """Return the terms with the plain operation's infinities, NaNs and signs of zero."""
    head = select(is_finite(plain) & (abs(terms[0]) > 0.0), terms[0], plain)
    sound = is_finite(plain) & is_finite(terms[0])
    return [head, *(select(sound, t, 0.0) for t in terms[1:])]


def set_zero_signs(plain, terms: Terms) -> Terms:
    """Return the terms with the plain operation's zeros' signs; like `set_special_values`, for sums and products."""
    sound = is_finite(terms[0])
    head = select(sound & (abs(terms[0]) > 0.0), terms[0], plain)
    return [head, *(select(sound, t, 0.0) for t in terms[1:])]


def sum_terms(x: Terms, keep: int) -> Terms:
    """Return the sum of any terms as `keep` components: infinities and NaN as the plain sum, a zero head's sign."""
    plain = x[0]
    for t in x[1:]:
        plain = plain + t
    nothing = select(x[0] == 0.0, x[0], 0.0)
    return set_special_values(select(is_finite(plain), nothing, plain), distill_terms(x, keep))


def negate(x: Terms) -> Terms:
    """-x."""
    return [-t for t in x]


def scale_terms(x: Terms, factor) -> Terms:
    """x times a power of two."""
    return [t * factor for t in x]


@record_out_of_line
def add(x: Terms, y: Terms, n: int) -> Terms:
    """x + y to n components; special values are not looked after."""
    if len(x) < len(y):
        x, y = y, x
    if n == 1 and len(x) == 1:
        return [x[0] + y[0]]
    if len(x) == 1:
        return pad_or_cut_terms(list(two_sum(x[0], y[0])), n)
    if n <= 2 and len(x) == 2:
        high, low = two_sum(x[0], y[0])
        if len(y) == 1:
            return list(fast_two_sum(high, x[1] + low))[:n]
        t, t1 = two_sum(x[1], y[1])
        v, w = fast_two_sum(high, low + t)
        return list(fast_two_sum(v, t1 + w))[:n]
    merged = [t for pair in zip(x, y) for t in pair] + list(x[len(y) :])
    return distill_terms(merged, n)


@record_out_of_line
def multiply(x: Terms, y: Terms, n: int) -> Terms:
    """x y to n components; special values are not looked after."""
    if len(x) < len(y):
        x, y = y, x
    if n == 1:
        return [x[0] * y[0]] if len(x) == 1 else multiply(x, y, 2)[:1]
    if len(x) == 1:
        return pad_or_cut_terms(list(two_product(x[0], y[0])), n)
    if n == 2:
        high, low = two_product(x[0], y[0])
        if len(y) > 1:
            return list(fast_two_sum(high, low + (x[0] * y[1] + x[1] * y[0])))
        t, t1 = fast_two_sum(high, x[1] * y[0])
        return list(fast_two_sum(t, t1 + low))
    return _distill_product(x, y, n)


def _distill_product(x: Terms, y: Terms, n: int) -> Terms:
    """Return a product of two sums as n terms, of partial products that are exact below order n and rounded at n."""
    orders: list[list] = [[] for _ in range(n + 1)]
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            if i + j < n:
                p, e = two_product(a, b)
                orders[i + j].append(p)
                orders[i + j + 1].append(e)
            elif i + j == n:
                orders[n].append(a * b)
    terms = [t for order in orders[:n] for t in order] + ([sum(orders[n][1:], orders[n][0])] if orders[n] else [])
    # Nothing cancels between orders, so n passes leave an error of order u^n (Ogita, Rump, Oishi 2005).
    for _ in range(n):
        terms = vec_sum(terms)
    return distill_terms(terms[: 2 * n], n)


@record_out_of_line
def divide(x: Terms, y: Terms, n: int) -> Terms:
    """x / y to n components, for y and the quotient away from the ends of the range."""
    if n == 1:
        return [x[0] / y[0]] if len(x) == len(y) == 1 else divide(x, y, 2)[:1]
    quotient, rest = [x[0] / y[0]], list(x)
    if n == 2:
        part = multiply(y, quotient, 2)
        low = rest[1] - part[1] if len(rest) > 1 else -part[1]
        return list(fast_two_sum(quotient[0], ((rest[0] - part[0]) + low) / y[0]))
    for _ in range(n):
        rest = add(rest, negate(multiply(y, quotient[-1:], n + 1)), n + 1)
        quotient.append(rest[0] / y[0])
    return distill_terms(quotient, n)


@record_out_of_line
def take_square_root(x: Terms, n: int) -> Terms:
    """Return the square root to n components, for x away from the ends of the range."""
    digits = [square_root(x[0])]
    if n == 1:
        return digits if len(x) == 1 else take_square_root(x, 2)[:1]
    # Behind the root of zero follow zeros.
    twice = select(digits[0] == 0.0, digits[0] * 0.0 + 1.0, digits[0] + digits[0])
    if n == 2:
        p, e = two_product(digits[0], digits[0])
        rest = (x[0] - p) - e
        return list(fast_two_sum(digits[0], (rest + x[1] if len(x) > 1 else rest) / twice))
    for _ in range(n):
        known = distill_terms(digits, len(digits))
        rest = add(list(x), negate(multiply(known, known, n + 1)), n + 1)
        digits.append(rest[0] / twice)
    return distill_terms(digits, n)


def divide_with_scaling(x: Terms, y: Terms, n: int) -> Terms:
    """x / y for all operands: scaled to the middle of the range, and back with one rounding."""
    x, kx = center_exponents(x)
    y, ky = center_exponents(y)
    plain = x[0] / y[0]
    return set_special_values(
        scale_by_power_of_two(plain, kx - ky), [scale_by_power_of_two(t, kx - ky) for t in divide(x, y, n)]
    )


def take_square_root_with_scaling(x: Terms, n: int) -> Terms:
    """Return the square root for all operands; NaN below zero."""
    scaled_x, k = center_exponents(x)
    plain = square_root(scaled_x[0])
    digits = take_square_root(scaled_x, n)
    return set_special_values(
        scale_by_power_of_two(plain, k * 0.5), [scale_by_power_of_two(t, k * 0.5) for t in digits]
    )


def center_exponents(x: Terms) -> tuple[Terms, Value]:
    """x 2^-k and k: an even power of two that brings very large and very small values into the middle."""
    edge, step = (2.0**500, 600.0) if is_computed_in_float64(x[0]) else (2.0**50, 70.0)
    size = abs(x[0])
    zero = size * 0.0
    k = select(size > edge, zero + step, select(size < 1.0 / edge, zero - step, zero))
    return scale_terms(x, power_of_two(-k)), k


def pad_or_cut_terms(terms: Terms, n: int) -> Terms:
    """Return the first n terms, padded with zeros."""
    return list(terms[:n]) + [select(is_finite(terms[0]), terms[0], 0.0) * 0.0] * (n - len(terms))


# Bits, exponent of the smallest normal number, largest number.
SIXTEEN_BIT_LIMITS_BY_DTYPE = {torch.float16: (11, -14, 65504.0), torch.bfloat16: (8, -126, (2.0 - 2.0**-7) * 2.0**127)}


def round_to_narrow_dtype(x, dtype: torch.dtype):
    """Return a float64 rounded to a narrower type's numbers, ties to even, still as float64."""
    if dtype == torch.float32:
        return round_to_float32(x)
    precision, lowest, largest = SIXTEEN_BIT_LIMITS_BY_DTYPE[dtype]
    unit = power_of_two_below(x) * 2.0 ** (1 - precision)
    smallest = 2.0 ** (lowest + 1 - precision)
    unit = select(unit > smallest, unit, unit * 0.0 + smallest)
    # Adding 1.5 * 2^52 units leaves no bit below one unit, and taking it away again is exact.
    magic = unit * (1.5 * 2.0**52)
    nearest = (x + magic) - magic
    # Near the end of float64's range the magic number itself overflows.
    nearest = select(abs(x) < 2.0 * largest, nearest, x)
    nearest = select(abs(nearest) > largest, nearest * float("inf"), nearest)
    return select(is_finite(x) & (nearest != 0.0), nearest, select(is_finite(x), x * 0.0, x))


def round_to_components(terms: Terms, dtype: torch.dtype, n: int) -> Terms:
    """n components of a narrower type, largest first; behind an infinity or NaN follow zeros."""
    rest, out = list(terms), []
    for _ in range(n):
        out.append(_round_sum_once(rest, dtype))
        rest = [rest[0] - out[-1], *rest[1:]]
        if len(rest) > 1:
            rest = vec_sum(rest)
    return [out[0], *(select(is_finite(out[0]), part, 0.0) for part in out[1:])]


def _round_sum_once(rest: Terms, dtype: torch.dtype):
    """Return the sum rounded once: a tie of the first term is broken by the second."""
    part = round_to_narrow_dtype(rest[0], dtype)
    if len(rest) == 1:
        return part
    left = rest[0] - part
    other = part + (left + left)
    same_side = (rest[1] > 0.0) & (left > 0.0) | (rest[1] < 0.0) & (left < 0.0)
    return select(same_side & (round_to_narrow_dtype(other, dtype) == other), other, part)


def to_float64_terms(parts: Terms) -> Terms:
    """Return a narrower type's components, converted to float64, as a canonical float64 expansion."""
    return list(parts) if len(parts) == 1 else sum_terms(list(parts), len(parts))


def sum_float16_components(parts: Terms) -> Terms:
    """Components of float16, converted to float64, as one: all bits that they have lie between 2^16 and 2^-24."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [select(parts[0] == 0.0, parts[0], total)]
