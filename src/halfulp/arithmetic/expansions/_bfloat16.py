"""Sums and products of pairs of bfloat16 in float32, a tenth of the work in float64, and where the two may differ.

x0 + x1 = X + xi exactly in float32, where xi is mostly 0, so that a sum or a product is v + w with an error below
2^-46 |v|. That decides both roundings to bfloat16 unless v or what its rounding left lies beside a tie. There, and
beside the ends of float32's range, the elements are in doubt, and a kernel computes them in float64 instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...kernels import product_error
from ...kernels.scalar._operations import add, bit_and, bit_or, bit_xor, real, shl, shr, sub, word
from .._error_free import Terms, fast_two_sum, two_sum

# Outside of these magnitudes float32 overflows, or loses bits below its normal numbers.
_LEAST, _MOST = (127 - 100) << 24, (127 + 126) << 24
_HIGH, _SIGN = 0xFFFF0000, 0x80000000


def quick(name: str, counts: tuple[int, ...]) -> Callable[..., Terms] | None:
    """Return the function of the operands' bfloat16 as float32: two components, and whether they are in doubt.

    Args:
        name: of the function of expansions.
        counts: components of the operands.
    """
    if name not in _SUMS or any(count > 2 for count in counts):
        return None
    return lambda *values: _SUMS[name](list(values[: counts[0]]), list(values[counts[0] :]))


def _add(x: Terms, y: Terms) -> Terms:
    (a, left_a), (b, left_b) = _together(x), _together(y)
    s, e = two_sum(a, b)
    v, w = fast_two_sum(s, e + (left_a + left_b))
    sign = bit_and(bit_and(word(x[0]), word(y[0])), _SIGN)
    first, second, doubt = _rounded(v, w, left_a, left_b)
    return [real(bit_or(word(first), sign)), second, doubt | (left_a != 0.0) & (left_b != 0.0)]


def _multiply(x: Terms, y: Terms) -> Terms:
    (a, left_a), (b, left_b) = _together(x), _together(y)
    p = a * b
    v, w = fast_two_sum(p, product_error(a, b, p) + (left_a * b + left_b * a))
    sign = bit_and(bit_xor(word(x[0]), word(y[0])), _SIGN)
    first, second, doubt = _rounded(v, w, left_a, left_b)
    return [real(bit_or(bit_and(word(first), _HIGH ^ _SIGN), sign)), second, doubt]


_SUMS: dict[str, Callable[[Terms, Terms], Terms]] = {
    "add": _add,
    "sub": lambda x, y: _add(x, [-t for t in y]),
    "mul": _multiply,
}


def _together(x: Terms) -> tuple[Any, Any]:
    return fast_two_sum(*x) if len(x) > 1 else (x[0], x[0] * 0.0)


def _rounded(v, w, left_a, left_b) -> tuple[Any, Any, Any]:
    """Round v + w to two bfloat16; say where they may be others, as other bits are lost or the range ends."""
    first = _nearest(v)
    rest = (v - first) + w
    lost = bit_or(bit_or(word(w), word(left_a)), word(left_b)) != 0
    # |v - first| of 4 units or more of v keeps what was lost below a unit or two of the rest.
    beside_tie = bit_and(add(word(v), 4), 0x7FF8) == 0
    rest_beside_tie = bit_and(add(word(rest), 0x8004), 0xFFF8) == 0
    size = shl(word(v), 1)
    in_range = (sub(size, _LEAST) < _MOST - _LEAST) | (size == 0)
    return first, _nearest(rest), lost & (beside_tie | rest_beside_tie) | ~in_range


def _nearest(x):
    """Round float32 to bfloat16, ties to even, still as float32."""
    bits = word(x)
    return real(bit_and(add(add(bits, 0x7FFF), bit_and(shr(bits, 16), 1)), _HIGH))
