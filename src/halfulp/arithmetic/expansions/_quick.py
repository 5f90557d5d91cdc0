"""Sums and products of 16-bit components in a few instructions, and where their bits may not be the network's.

Pairs of bfloat16 take float32. x0 + x1 = X + xi exactly, where xi is mostly 0, so that a sum or a product is v + w with
an error below 2^-46 |v|. That decides both roundings to bfloat16 unless v or what its rounding left lies beside a tie.

All others take float64, which mostly holds an operand's components together. There, and beside the ends of the range,
the elements are in doubt: a kernel computes them by the network instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ...kernels import power_below, product_error, select
from ...kernels.scalar._operations import add, bit_and, bit_or, bit_xor, real, shl, shr, sub, word
from .._error_free import Terms, fast_two_sum, two_sum
from .._operators import SHAPES

# Outside of these magnitudes float32 overflows, or loses bits below its normal numbers.
_LEAST, _MOST = (127 - 100) << 24, (127 + 126) << 24
_HIGH, _SIGN = 0xFFFF0000, 0x80000000
_EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def quick(
    name: str, counts: tuple[int, ...], components: int, dtype: torch.dtype
) -> tuple[Callable[..., Terms], torch.dtype] | None:
    """Return a function of the operands' components to the result's, and whether they are in doubt; and its arithmetic.

    Args:
        name: of the function of expansions.
        counts: components of the operands.
        components: of the result.
        dtype: of all components.
    """
    if name not in _EXACT or dtype not in SHAPES:
        return None
    if dtype == torch.bfloat16 and components == 2 and max(counts) <= 2:
        return lambda *values: _PAIRS[name](list(values[: counts[0]]), list(values[counts[0] :])), torch.float32

    def together(*values: Any) -> Terms:
        (a, doubt_a), (b, doubt_b) = (
            _add_components(list(x), dtype) for x in (values[: counts[0]], values[counts[0] :])
        )
        rest = _EXACT[name](a, b)
        doubt = doubt_a | doubt_b | ~(abs(rest) < SHAPES[dtype][2] / 2)
        found = []
        for _ in range(components):
            found.append(_round_in_range(rest, dtype))
            rest = rest - found[-1]
        return [*found, doubt]

    return together, torch.float64


def _add_components(x: Terms, dtype: torch.dtype) -> tuple[Any, Any]:
    """Add components up in float64; a first one of 0, which has a sign, is all. Say where bits were lost."""
    total, lost = x[0], x[0] != x[0]
    for part in x[1:]:
        before, total = total, total + part
        if dtype != torch.float16:  # all of whose bits fit
            lost = lost | (total - before != part) | (total - part != before)
    return select(x[0] == 0.0, x[0], total), lost


def _round_in_range(x, dtype: torch.dtype):
    """Round a float64 that no rounding makes infinite: see `rounded`."""
    precision, lowest, _ = SHAPES[dtype]
    magic, least = power_below(x) * (1.5 * 2.0 ** (53 - precision)), 1.5 * 2.0 ** (lowest + 53 - precision)
    magic = select(magic > least, magic, least)
    nearest = (x + magic) - magic
    return select(nearest == 0.0, x * 0.0, nearest)


def _add(x: Terms, y: Terms) -> Terms:
    (a, left_a), (b, left_b) = _together(x), _together(y)
    s, e = two_sum(a, b)
    v, w = fast_two_sum(s, e + (left_a + left_b))
    sign = bit_and(bit_and(word(x[0]), word(y[0])), _SIGN)
    first, second, doubt = _round_sum(v, w, left_a, left_b, v == 0.0)
    return [real(bit_or(word(first), sign)), second, doubt | (left_a != 0.0) & (left_b != 0.0)]


def _multiply(x: Terms, y: Terms) -> Terms:
    (a, left_a), (b, left_b) = _together(x), _together(y)
    p = a * b
    v, w = fast_two_sum(p, product_error(a, b, p) + (left_a * b + left_b * a))
    sign = bit_and(bit_xor(word(x[0]), word(y[0])), _SIGN)
    # A product that float32 takes for 0 leaves the sign of a second component to the network.
    is_zero = (v == 0.0) & ((a == 0.0) | (b == 0.0))
    first, second, doubt = _round_sum(v, w, left_a, left_b, is_zero)
    return [real(bit_or(bit_and(word(first), _HIGH ^ _SIGN), sign)), second, doubt]


_PAIRS: dict[str, Callable[[Terms, Terms], Terms]] = {
    "add": _add,
    "sub": lambda x, y: _add(x, [-t for t in y]),
    "mul": _multiply,
}


def _together(x: Terms) -> tuple[Any, Any]:
    return fast_two_sum(*x) if len(x) > 1 else (x[0], x[0] * 0.0)


def _round_sum(v, w, left_a, left_b, is_zero) -> tuple[Any, Any, Any]:
    """Round v + w to two bfloat16; say where they may be others, as other bits are lost or the range ends."""
    first = _nearest(v)
    rest = (v - first) + w
    lost = bit_or(bit_or(word(w), word(left_a)), word(left_b)) != 0
    # |v - first| of 4 units or more of v keeps what was lost below a unit or two of the rest.
    beside_tie = bit_and(add(word(v), 4), 0x7FF8) == 0
    rest_beside_tie = bit_and(add(word(rest), 0x8004), 0xFFF8) == 0
    size = shl(word(v), 1)
    in_range = (sub(size, _LEAST) < _MOST - _LEAST) | is_zero
    return first, _nearest(rest), lost & (beside_tie | rest_beside_tie) | ~in_range


def _nearest(x):
    """Round float32 to bfloat16, ties to even, still as float32."""
    bits = word(x)
    return real(bit_and(add(add(bits, 0x7FFF), bit_and(shr(bits, 16), 1)), _HIGH))
