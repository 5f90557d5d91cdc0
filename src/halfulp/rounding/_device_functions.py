"""Device functions that round one word: a mode, a path, overflow, the sign; and the codec of 8-bit floats.

A piece serves 32- and 64-bit words alike: the operations below are bound to those of the width. `c` are the constants
of `_constants`. Every choice is a select between two values that are both computed, so that LLVM vectorizes the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..kernels import floor
from ..kernels._operations import (
    add,
    add64,
    and64,
    bit_and,
    bit_or,
    load16,
    or64,
    real,
    real64,
    select,
    shl,
    shl64,
    shr,
    shr64,
    store16,
    sub,
    sub64,
    to_real,
    to_word,
    to_word64,
    widen,
    word,
    word64,
    xor64,
)
from ..kernels._operations import add as plus
from ..kernels._operations import bit_and as both
from ..kernels._operations import bit_or as either
from ..kernels._operations import bit_xor as flip
from ..kernels._operations import select as choose
from ..kernels._operations import shl as left
from ..kernels._operations import shr as right
from ..kernels._operations import sub as minus
from ._target import (
    BASE,
    DOWN_SCALE,
    DRAWN,
    FIELD,
    FINITE,
    FIRST_FACTOR,
    FLOOR,
    HALF_WORD,
    HIGHEST,
    IMPLICIT,
    INFINITY,
    LARGEST,
    LAST_BIT,
    LIMIT,
    LOWEST,
    MAGNITUDE,
    NAN,
    NEGATIVE,
    ONE,
    ONES,
    OVERFLOW,
    RAISE,
    SECOND_FACTOR,
    SHIFT,
    SIGN,
    SIGNIFICAND,
    SMALLEST_BINADE,
    SPARE_BITS,
    TIE,
    TINY,
    UP_SCALE,
    VALUE_SIGN,
    WHOLE_STEPS,
    ZERO_SIGN,
)

# ruff: noqa: F821  names that are free here (load, store, magnitude, addend, ...) are bound when a kernel is compiled


# What the pieces below are bound to for 64-bit words.
WIDE: dict[str, Callable] = {
    "plus": add64,
    "minus": sub64,
    "both": and64,
    "either": or64,
    "flip": xor64,
    "left": shl64,
    "right": shr64,
    "as_real": real64,
    "as_word": word64,
}

as_real, as_word = real, word
SIXTEEN, THIRTEEN, HALF_INFINITY = np.uint32(16), np.uint32(13), np.uint32(0x7C00)
HALF_NORMAL, HALF_MAGNITUDE, HALF_SIGN = np.uint32(0x400), np.uint32(0x7FFF), np.uint32(0x8000)
REBIAS, SINGLE_NORMAL = np.uint32(112 << 23), np.uint32(113 << 23)
SINGLE_INFINITY, SINGLE_MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
HALF_UNIT = np.float32(2.0**-24)


plus32 = plus


def rounded(w, u, c):
    """Device function: a word, rounded with the random bits u."""
    a = both(w, c[MAGNITUDE])
    return signed(w, limited(w, a, magnitude(w, a, u, c), c), c)


# paths: the rounded magnitude on a grid without end ----------------------------------------------------------


def fixed(w, a, u, c):
    """Device function: every word loses the same bits, subnormals too."""
    keep = left(c[ONES], c[SHIFT])
    return both(plus(a, addend(w, a, u, c[SHIFT], keep, c)), keep)


def adder(w, a, u, c):
    """Device function: the float adder rounds once, to nearest even, at the spacing of a's binade.

    a + 2^(e - m + M) has exactly that spacing, for subnormals of the format too. Beyond LIMIT nothing is meant, and a
    NaN stays one.
    """
    binade = both(a, c[INFINITY])
    large = as_real(plus(choose(binade > c[SMALLEST_BINADE], binade, c[SMALLEST_BINADE]), c[RAISE]))
    return as_word((as_real(a) + large) - large)


def saturating_adder(w, a, u, c):
    """Device function: the same of a magnitude that is at most the largest number, or NaN.

    Compared as reals in this order: one instruction of x86, which takes its second operand where one is NaN.
    """
    largest = as_real(c[LARGEST])
    return adder(w, as_word(choose(largest < as_real(a), largest, as_real(a))), u, c)


def packed(w, a, u, c):
    """Device function: a word loses bits by its exponent; below the smallest number the choice is between it and 0."""
    e = right(a, c[FIELD])
    e = choose(e < c[LOWEST], c[LOWEST], e)
    s = minus(c[BASE], choose(e > c[HIGHEST], c[HIGHEST], e))
    keep = left(c[ONES], s)
    r = both(plus(a, addend(w, a, u, s, keep, c)), keep)
    small = choose(reaches_smallest(w, a, u, c), c[TINY], c[FLOOR])
    return choose(a < c[TINY], small, r)


def scaled(w, a, u, c):
    """Device function: add random bits to the magnitude in fixed point, which has 23 or more bits of fraction.

    With e the exponent of a, or of the smallest normal number, a 2^(29 - e) is below 2^30 and a step is 2^(29 - m).
    """
    a = choose(a < c[FINITE], a, c[FINITE])
    binade = both(a, c[INFINITY])
    binade = choose(binade > c[SMALLEST_BINADE], binade, c[SMALLEST_BINADE])
    point = to_word(real(a) * real(minus(c[UP_SCALE], binade)))
    steps = both(plus(point, right(u, c[SPARE_BITS])), c[WHOLE_STEPS])
    return word(to_real(steps) * real(minus(binade, c[DOWN_SCALE])))


# modes: what is added before bits are dropped, and whether what is below the smallest number becomes it ------


def half_addend(w, a, u, s, keep, c):
    """Device function: to nearest, ties to even: half a spacing less one, and the last bit that stays."""
    lost = flip(keep, c[ONES])
    last = right(either(both(a, c[SIGNIFICAND]), c[IMPLICIT]), s)
    return plus(right(lost, c[ONE]), both(both(last, c[ONE]), lost))


def half_addend_fixed(w, a, u, s, keep, c):
    """Device function: the same where no word loses its implicit bit."""
    lost = flip(keep, c[ONES])
    return plus(right(lost, c[ONE]), both(both(right(a, s), c[ONE]), lost))


def half_reaches_smallest(w, a, u, c):
    """Device function: beyond half the smallest number."""
    return a >= c[TIE]


def no_addend(w, a, u, s, keep, c):
    """Device function: toward zero."""
    return minus(a, a)


def never_reaches_smallest(w, a, u, c):
    """Device function: toward zero."""
    return a > c[INFINITY]


def random_addend(w, a, u, s, keep, c):
    """Device function: random bits below the last kept one; a carry has the probability of the fraction."""
    return right(aligned(u, c), minus(c[LAST_BIT], s))


def randomly_reaches_smallest(w, a, u, c):
    """Device function: with the probability a / TINY; the sum carries into the sign bit."""
    return plus(aligned(u, c), fraction(a, c)) >= c[SIGN]


def away_addend(w, a, u, s, keep, c):
    """Device function: a number that moves away from zero goes up by a spacing less one."""
    return choose(outward(w, c), flip(keep, c[ONES]), minus(a, a))


def away_reaches_smallest(w, a, u, c):
    """Device function: whatever is not zero moves, if outward."""
    return (a > minus(a, a)) & outward(w, c)


def chosen_addend(w, a, u, s, keep, c):
    """Device function: a spacing less one where a mode of somebody's own goes away from zero."""
    lost = flip(keep, c[ONES])
    # In two steps: the number of lost bits may be 0, and no word is shifted by its width.
    fraction = left(left(both(a, lost), minus(c[LAST_BIT], s)), c[ONE])
    last = both(right(either(both(a, c[SIGNIFICAND]), c[IMPLICIT]), s), c[ONE])
    away = goes_away(fraction, c[SIGN], last == c[ONE], w >= c[SIGN])
    return choose(away, lost, minus(a, a))


def chosen_reaches_smallest(w, a, u, c):
    """Device function: whether a mode of somebody's own takes the smallest number, beside 0, which is even."""
    zero = minus(a, a)
    part = either(left(fraction(a, c), c[ONE]), choose(has_residue(a, c), c[ONE], zero))
    return (a > zero) & goes_away(part, c[SIGN], a < zero, w >= c[SIGN])


def positive(w, c):
    """Device function: rounding up moves positive numbers away from zero."""
    return w < c[SIGN]


def negative(w, c):
    """Device function: rounding down moves negative numbers away from zero."""
    return w >= c[SIGN]


def never(w, c):
    """Device function: rounding toward zero moves nothing away from it."""
    return w != w


# random bits -------------------------------------------------------------------------------------------------


def aligned32(u, c):
    """Device function: 31 random bits below the sign bit."""
    return shr(u, ONE32)


def fraction32(a, c):
    """Device function: the fraction a / TINY in units of 2^-31, 0 from TINY on."""
    return to_word(choose(a < c[TINY], real(a) * real(c[FIRST_FACTOR]), NOTHING))


def has_residue32(a, c):
    """Device function: whether the fraction a / TINY has digits below 2^-31."""
    scaled = real(a) * real(c[FIRST_FACTOR])
    return (a < c[TINY]) & (floor(scaled) != scaled)


def aligned64(u, c):
    """Device function: random bits below the sign bit of a 64-bit word."""
    return right(left(both(widen(u), c[DRAWN]), c[HALF_WORD]), c[ONE])


def fraction64(a, c):
    """Device function: the fraction a / TINY in units of 2^-31, aligned to the random bits, 0 from TINY on."""
    scaled = real64(a) * real64(c[FIRST_FACTOR]) * real64(c[SECOND_FACTOR])
    return left(to_word64(choose(a < c[TINY], scaled, NOTHING64)), c[HALF_WORD])


def has_residue64(a, c):
    """Device function: the same of a 64-bit word."""
    scaled = real64(a) * real64(c[FIRST_FACTOR]) * real64(c[SECOND_FACTOR])
    return (a < c[TINY]) & (floor(scaled) != scaled)


ONE32, NOTHING, NOTHING64 = np.uint32(1), np.float32(0), np.float64(0)
# beyond the largest number, and NaN --------------------------------------------------------------------------


def limited_outward(w, a, r, c):
    """Device function: a result beyond the largest number becomes infinity or NaN; a NaN, larger than either, stays."""
    over = choose(a > c[OVERFLOW], a, c[OVERFLOW])
    return choose(r > c[LARGEST], over, r)


def saturated(w, a, r, c):
    """Device function: a result beyond the largest number becomes the largest; NaN stays."""
    r = choose(r < c[LARGEST], r, c[LARGEST])
    return choose(a > c[INFINITY], c[NAN], r)


def limited_by_input(w, a, r, c):
    """Device function: the same decided on the input, where rounding to nearest tells from there; r is NaN where a is.

    Reals are compared by one instruction, where unsigned words take two on processors with AVX2 alone.
    """
    return choose(as_real(a) > as_real(c[LIMIT]), c[OVERFLOW], r)


def unlimited(w, a, r, c):
    """Device function: what `saturating_adder` returns needs no limit."""
    return r


def limited_directed(w, a, r, c):
    """Device function: a finite number that rounds toward zero stops at the largest; an infinity overflows."""
    beyond = choose(outward(w, c), c[OVERFLOW], c[LARGEST])
    r = choose(r > c[LARGEST], beyond, r)
    r = choose(a >= c[INFINITY], c[OVERFLOW], r)
    return choose(a > c[INFINITY], c[NAN], r)


# signs -------------------------------------------------------------------------------------------------------


def signed_plain(w, r, c):
    """Device function: every result has the sign of its input."""
    return either(r, both(w, c[SIGN]))


def signed_special(w, r, c):
    """Device function: a format may lack -0, or all negative numbers."""
    r = choose(w > c[NEGATIVE], c[NAN], r)
    zero = minus(r, r)
    return either(r, both(w, choose(r == zero, c[ZERO_SIGN], c[VALUE_SIGN])))


# containers --------------------------------------------------------------------------------------------------


def load_bfloat16(address, i):
    """Device function: a bfloat16 as a float32's word."""
    return bfloat16_word(load16(address, i))


def bfloat16_word(h):
    """Device function: the float32 word of a bfloat16's bits."""
    return shl(h, SIXTEEN)


def store_bfloat16(address, i, w):
    """Device function: a word whose low half is zero as a bfloat16."""
    store16(address, i, shr(w, SIXTEEN))


def load_float16(address, i):
    """Device function: a float16 as a float32's word."""
    return float16_word(load16(address, i))


def float16_word(h):
    """Device function: the float32 word of a float16's bits, in integers where a float32 would be subnormal."""
    a = both32(h, HALF_MAGNITUDE)
    finite = choose(a < HALF_NORMAL, word(to_real(a) * HALF_UNIT), plus32(shl(a, THIRTEEN), REBIAS))
    special = choose(a == HALF_INFINITY, SINGLE_INFINITY, SINGLE_NAN)
    return either32(choose(a < HALF_INFINITY, finite, special), shl(both32(h, HALF_SIGN), SIXTEEN))


def round_to_bfloat16(address, i, w):
    """Device function: a float32's word, rounded to the nearest bfloat16, ties to even."""
    store16(address, i, bfloat16_code(w))


def bfloat16_code(w):
    """Device function: the bits of the bfloat16 nearest to a float32's word, ties to even."""
    last = both32(shr(w, SIXTEEN), ONE32)
    nearest = plus32(plus32(w, last), BELOW_SIXTEEN)
    return shr(choose(both32(w, SINGLE_MAGNITUDE) > SINGLE_INFINITY, SINGLE_NAN, nearest), SIXTEEN)


def store_float16(address, i, w):
    """Device function: a float32's word as the nearest float16, ties to even."""
    store16(address, i, float16_code(w))


def float16_code(w):
    """Device function: the bits of the float16 nearest to a float32's word, ties to even.

    The float adder rounds small ones: what is added has a spacing of 2^-24, that of float16's subnormals.
    """
    a = both32(w, SINGLE_MAGNITUDE)
    last = both32(shr(a, THIRTEEN), ONE32)
    normal = shr(plus32(plus32(sub(a, REBIAS), last), BELOW_THIRTEEN), THIRTEEN)
    h = choose(a < SINGLE_NORMAL, sub(word(real(a) + ONE_HALF), ONE_HALF_WORD), normal)
    h = choose(a < BEYOND_HALF, h, choose(a > SINGLE_INFINITY, HALF_NAN, HALF_INFINITY))
    return either32(h, shr(both32(w, flip32(SINGLE_MAGNITUDE, ONES32)), SIXTEEN))


both32, either32, flip32, ONES32 = both, either, flip, np.uint32(0xFFFFFFFF)
BELOW_SIXTEEN, BELOW_THIRTEEN, SINGLE_NAN, HALF_NAN = (np.uint32(n) for n in (0x7FFF, 0xFFF, 0x7FC00000, 0x7E00))
ONE_HALF, ONE_HALF_WORD, BEYOND_HALF = np.float32(0.5), np.uint32(0x3F000000), np.uint32(0x47800000)


ABS, INFINITE, CANONICAL_NAN = (np.uint32(w) for w in (0x7FFFFFFF, 0x7F800000, 0x7FC00000))
NONE, ONE_WORD, S8, S24, SIGN_8, ABS_8, NAN_8 = (np.uint32(n) for n in (0, 1, 8, 24, 0x80, 0x7F, 0x7F))
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
        rounded = add(add(magnitude, half), bit_and(shr(magnitude, lost), ONE_WORD))
        return signed(x, magnitude, tiny, shr(sub(rounded, rebias), lost))

    def stochastic(x, random):
        """Device function: one of the two codes around x, the farther with the probability of its nearness."""
        magnitude = bit_and(word(x), ABS)
        steps = real(magnitude) * units
        below = to_word(select(magnitude < least_normal, steps, units))
        tiny = add(below, select(to_real(shr(random, S8)) * TWO_M24 < steps - to_real(below), ONE_WORD, NONE))
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
