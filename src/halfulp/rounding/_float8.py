"""Floats of 8 bits, e4m3fn and e5m2 (Micikevicius et al., arXiv 2209.05433): one codec, two sets of constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..kernels.scalar._operations import add, bit_and, bit_or, real, select, shl, shr, sub, to_real, to_word, word

ABS, INFINITE, CANONICAL_NAN = (np.uint32(w) for w in (0x7FFFFFFF, 0x7F800000, 0x7FC00000))
NONE, ONE, S8, S24, SIGN_8, ABS_8, NAN_8 = (np.uint32(n) for n in (0, 1, 8, 24, 0x80, 0x7F, 0x7F))
TWO_M24 = np.float32(2.0**-24)


class Float8(NamedTuple):
    """Device functions of a format: between float32 and codes, which are the low bytes of words."""

    decode: Callable[..., Any]
    nearest: Callable[..., Any]
    stochastic: Callable[..., Any]


def _codec(name: str, mantissa_bits: int, emin: int, largest: int, infinity: int, is_infinite: bool) -> Float8:
    """Return the device functions of a format.

    Args:
        name: of the result in this module, by which its functions are pickled.
        mantissa_bits: stored bits of the significand.
        emin: exponent of the smallest normal number.
        largest: the code that numbers beyond the range become.
        infinity: the code of infinity, or else of NaN, at which numbers end.
        is_infinite: whether infinity has a code.
    """
    lost, undrawn, half = (np.uint32(n) for n in (23 - mantissa_bits, 9 + mantissa_bits, (1 << 22 - mantissa_bits) - 1))
    rebias, least_normal = np.uint32(emin + 126 << 23), np.uint32(emin + 127 << 23)
    # The last place of 2^(emin + lost) is the smallest number.
    magic = np.float32(2.0 ** (emin + 23 - mantissa_bits))
    magic_word = word(magic)
    units, raised = np.float32(2.0 ** (mantissa_bits - emin)), np.float32(2.0 ** (126 + emin))
    last_code, first_special = np.uint32(largest), np.uint32(infinity)
    infinite_word, last_number = INFINITE if is_infinite else CANONICAL_NAN, np.uint32(INFINITE - (not is_infinite))

    def decode(code):
        """Device function: the float32 of a code; the product places subnormals too, without rounding."""
        magnitude = bit_and(code, ABS_8)
        placed = word(real(shl(magnitude, lost)) * raised)
        special = select(magnitude == first_special, infinite_word, CANONICAL_NAN)
        value = select(magnitude >= first_special, special, placed)
        return real(bit_or(value, shl(bit_and(code, SIGN_8), S24)))

    def nearest(x, random):
        """Device function: the code nearest to x, ties to even; the float adder rounds subnormals."""
        magnitude = bit_and(word(x), ABS)
        tiny = sub(word(real(magnitude) + magic), magic_word)
        rounded = add(add(magnitude, half), bit_and(shr(magnitude, lost), ONE))
        return signed(x, magnitude, tiny, shr(sub(rounded, rebias), lost))

    def stochastic(x, random):
        """Device function: one of the two codes around x, the farther with the probability of its nearness."""
        magnitude = bit_and(word(x), ABS)
        steps = real(magnitude) * units
        below = to_word(select(magnitude < least_normal, steps, units))
        tiny = add(below, select(to_real(shr(random, S8)) * TWO_M24 < steps - to_real(below), ONE, NONE))
        normal = shr(sub(add(magnitude, shr(random, undrawn)), rebias), lost)
        return signed(x, magnitude, tiny, normal)

    def signed(x, magnitude, tiny, normal):
        limited = select(normal < last_code, normal, last_code)
        finite = select(magnitude < least_normal, tiny, limited)
        code = select(magnitude > last_number, NAN_8, finite)
        return bit_or(code, bit_and(shr(word(x), S24), SIGN_8))

    for function in (decode, nearest, stochastic):
        function.__qualname__ = f"{name}.{function.__name__}"
    return Float8(decode, nearest, stochastic)


# e4m3fn saturates, and has NaN where infinity would be; e5m2's numbers beyond the range become infinity.
E4M3FN = _codec("E4M3FN", 3, -6, 0x7E, 0x7F, False)
E5M2 = _codec("E5M2", 2, -14, 0x7C, 0x7C, True)
