"""Device functions that round one word: a mode, a path, overflow, the sign; and the codec of 8-bit floats.

A piece serves 32- and 64-bit words alike. `c` are the words of `TargetConstants`. Every choice is a select between
two values that are both computed, so that LLVM vectorizes the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..kernels._operations import (
    add,
    bit_and,
    bit_or,
    bit_xor,
    floor,
    real,
    select,
    shl,
    shr,
    sub,
    to_real,
    to_word,
    widen,
    word,
)

# ruff: noqa: F821  names that are free here (load, store, magnitude, addend, ...) are bound when a kernel is compiled


SIXTEEN, THIRTEEN, FLOAT16_INFINITY = np.uint32(16), np.uint32(13), np.uint32(0x7C00)
FLOAT16_LEAST_NORMAL, FLOAT16_MAGNITUDE_MASK, FLOAT16_SIGN_MASK = np.uint32(0x400), np.uint32(0x7FFF), np.uint32(0x8000)
FLOAT16_REBIAS, FLOAT16_LEAST_NORMAL_AS_FLOAT32 = np.uint32(112 << 23), np.uint32(113 << 23)
FLOAT32_INFINITY, FLOAT32_MAGNITUDE_MASK, FLOAT32_SIGN_MASK = (
    np.uint32(n) for n in (0x7F800000, 0x7FFFFFFF, 0x80000000)
)
FLOAT16_LEAST_SUBNORMAL = np.float32(2.0**-24)


def round_word(w, u, c):
    """Device function: a word, rounded with the random bits u."""
    a = bit_and(w, c.magnitude)
    return signed(w, limited(w, a, magnitude(w, a, u, c), c), c)


# paths: the rounded magnitude on a grid without end ----------------------------------------------------------


def round_by_fixed_shift(w, a, u, c):
    """Device function: every word loses the same bits, subnormals too."""
    keep = shl(c.ones, c.shift)
    return bit_and(add(a, addend(w, a, u, c.shift, keep, c)), keep)


def round_by_float_addition(w, a, u, c):
    """Device function: the float adder rounds once, to nearest even, at the spacing of a's binade.

    a + 2^(e - m + M) has exactly that spacing, for subnormals of the format too. Beyond LIMIT nothing is meant, and a
    NaN stays one.
    """
    binade = bit_and(a, c.infinity)
    large = real(add(select(binade > c.smallest_binade, binade, c.smallest_binade), c.raise_by))
    return word((real(a) + large) - large)


def round_by_exponent(w, a, u, c):
    """Device function: a word loses bits by its exponent; below the smallest number the choice is between it and 0."""
    e = shr(a, c.field)
    e = select(e < c.lowest, c.lowest, e)
    s = sub(c.base, select(e > c.highest, c.highest, e))
    keep = shl(c.ones, s)
    r = bit_and(add(a, addend(w, a, u, s, keep, c)), keep)
    small = select(reaches_smallest(w, a, u, c), c.tiny, c.floor)
    return select(a < c.tiny, small, r)


def round_in_fixed_point(w, a, u, c):
    """Device function: add random bits to the magnitude in fixed point, which has 23 or more bits of fraction.

    With e the exponent of a, or of the smallest normal number, a 2^(29 - e) is below 2^30 and a step is 2^(29 - m).
    """
    a = select(a < c.finite, a, c.finite)
    binade = bit_and(a, c.infinity)
    binade = select(binade > c.smallest_binade, binade, c.smallest_binade)
    point = to_word(real(a) * real(sub(c.up_scale, binade)))
    steps = bit_and(add(point, shr(u, c.spare_bits)), c.whole_steps)
    return word(to_real(steps) * real(sub(binade, c.down_scale)))


# modes: what is added before bits are dropped, and whether what is below the smallest number becomes it ------


def compute_nearest_addend(w, a, u, s, keep, c):
    """Device function: to nearest, ties to even: half a spacing less one, and the last bit that stays."""
    lost = bit_xor(keep, c.ones)
    last = shr(bit_or(bit_and(a, c.significand), c.implicit), s)
    return add(shr(lost, 1), bit_and(bit_and(last, 1), lost))


def compute_nearest_addend_at_fixed_shift(w, a, u, s, keep, c):
    """Device function: the same where no word loses its implicit bit."""
    lost = bit_xor(keep, c.ones)
    return add(shr(lost, 1), bit_and(bit_and(shr(a, s), 1), lost))


def exceeds_half_smallest(w, a, u, c):
    """Device function: beyond half the smallest number."""
    return a >= c.tie


def compute_random_addend(w, a, u, s, keep, c):
    """Device function: random bits below the last kept one; a carry has the probability of the fraction."""
    return shr(align_random_bits_below_sign(u, c), sub(c.last_bit, s))


def rounds_up_to_smallest_at_random(w, a, u, c):
    """Device function: with the probability a / TINY; the sum carries into the sign bit."""
    return add(align_random_bits_below_sign(u, c), compute_fraction_of_smallest(a, c)) >= c.sign


def compute_mode_addend(w, a, u, s, keep, c):
    """Device function: a spacing less one where the mode goes away from zero."""
    lost = bit_xor(keep, c.ones)
    # In two steps: the number of lost bits may be 0, and no word is shifted by its width.
    part = shl(shl(bit_and(a, lost), sub(c.last_bit, s)), 1)
    last = bit_and(shr(bit_or(bit_and(a, c.significand), c.implicit), s), 1)
    away = goes_away(part, c.sign, last == 1, w >= c.sign)
    return select(away, lost, 0)


def is_smallest_chosen_by_mode(w, a, u, c):
    """Device function: whether the mode takes the smallest number, beside 0, which is even."""
    part = shl(compute_fraction_of_smallest(a, c), 1)
    part = select(has_inexact_fraction_of_smallest(a, c), bit_or(part, 1), part)
    return (a > 0) & goes_away(part, c.sign, a < 0, w >= c.sign)


# random bits -------------------------------------------------------------------------------------------------


def align_random_bits_below_sign(u, c):
    """Device function: 31 random bits, or fewer in a word of 64 bits, below the sign bit."""
    return shr(u, 1) if c.sign.kind == "w32" else shr(shl(bit_and(widen(u), c.drawn), 32), 1)


def compute_ratio_to_smallest(a, c):
    """Device function: a / TINY in units of 2^-31."""
    scaled = real(a) * real(c.first_factor)
    return scaled if a.kind == "w32" else scaled * real(c.second_factor)


def compute_fraction_of_smallest(a, c):
    """Device function: the fraction a / TINY, aligned to the random bits, 0 from TINY on."""
    units = to_word(select(a < c.tiny, compute_ratio_to_smallest(a, c), 0.0))
    return units if a.kind == "w32" else shl(units, 32)


def has_inexact_fraction_of_smallest(a, c):
    """Device function: whether the fraction a / TINY has digits below 2^-31."""
    units = compute_ratio_to_smallest(a, c)
    return (a < c.tiny) & (floor(units) != units)


# beyond the largest number, and NaN --------------------------------------------------------------------------


def replace_overflow(w, a, r, c):
    """Device function: a result beyond the largest number becomes infinity or NaN; a NaN, larger than either, stays."""
    over = select(a > c.overflow, a, c.overflow)
    return select(r > c.largest, over, r)


def limit_to_largest(w, a, r, c):
    """Device function: a result beyond the largest number becomes the largest; NaN stays."""
    r = select(r < c.largest, r, c.largest)
    return select(a > c.infinity, c.nan, r)


def replace_overflow_of_input(w, a, r, c):
    """Device function: an overflow decided on the input, where rounding to nearest tells; r is NaN where a is.

    Reals are compared by one instruction, where unsigned words take two on processors with AVX2 alone.
    """
    return select(real(a) > real(c.limit), c.overflow, r)


def round_limited_input(w, a, r, c):
    """Device function: the adder's result of a limited input, a NaN stays one; 5 % faster on AVX2 than a limit behind.

    Compared as reals in this order: one instruction of x86, which takes its second operand where one is NaN.
    """
    largest = real(c.largest)
    return round_by_float_addition(w, word(select(largest < real(a), largest, real(a))), r, c)


def replace_directed_overflow(w, a, r, c):
    """Device function: a finite number that rounds toward zero stops at the largest; an infinity overflows."""
    outward = goes_away(a, c.sign, w != w, w >= c.sign)  # whatever the fraction is
    beyond = select(outward, c.overflow, c.largest)
    r = select(r > c.largest, beyond, r)
    r = select(a >= c.infinity, c.overflow, r)
    return select(a > c.infinity, c.nan, r)


# signs -------------------------------------------------------------------------------------------------------


def copy_sign(w, r, c):
    """Device function: every result has the sign of its input."""
    return bit_or(r, bit_and(w, c.sign))


def copy_allowed_sign(w, r, c):
    """Device function: a format may lack -0, or all negative numbers."""
    r = select(w > c.negative, c.nan, r)
    return bit_or(r, bit_and(w, select(r == 0, c.zero_sign, c.value_sign)))


# containers --------------------------------------------------------------------------------------------------


def widen_bfloat16(h):
    """Device function: the float32 word of a bfloat16's bits."""
    return shl(h, SIXTEEN)


def widen_float16(h):
    """Device function: the float32 word of a float16's bits, in integers where a float32 would be subnormal."""
    a = bit_and(h, FLOAT16_MAGNITUDE_MASK)
    finite = select(
        a < FLOAT16_LEAST_NORMAL, word(to_real(a) * FLOAT16_LEAST_SUBNORMAL), add(shl(a, THIRTEEN), FLOAT16_REBIAS)
    )
    special = select(a == FLOAT16_INFINITY, FLOAT32_INFINITY, FLOAT32_NAN)
    return bit_or(select(a < FLOAT16_INFINITY, finite, special), shl(bit_and(h, FLOAT16_SIGN_MASK), SIXTEEN))


def encode_bfloat16(w):
    """Device function: the bits of the bfloat16 nearest to a float32's word, ties to even."""
    last = bit_and(shr(w, SIXTEEN), 1)
    nearest = add(add(w, last), HALF_OF_16_BITS_LESS_ONE)
    return shr(select(bit_and(w, FLOAT32_MAGNITUDE_MASK) > FLOAT32_INFINITY, FLOAT32_NAN, nearest), SIXTEEN)


def encode_float16(w):
    """Device function: the bits of the float16 nearest to a float32's word, ties to even.

    The float adder rounds small ones: what is added has a spacing of 2^-24, that of float16's subnormals.
    """
    a = bit_and(w, FLOAT32_MAGNITUDE_MASK)
    last = bit_and(shr(a, THIRTEEN), 1)
    normal = shr(add(add(sub(a, FLOAT16_REBIAS), last), HALF_OF_13_BITS_LESS_ONE), THIRTEEN)
    h = select(a < FLOAT16_LEAST_NORMAL_AS_FLOAT32, sub(word(real(a) + ONE_HALF), ONE_HALF_WORD), normal)
    h = select(a < FLOAT16_OVERFLOW_WORD, h, select(a > FLOAT32_INFINITY, FLOAT16_NAN, FLOAT16_INFINITY))
    return bit_or(h, shr(bit_and(w, FLOAT32_SIGN_MASK), SIXTEEN))


HALF_OF_16_BITS_LESS_ONE, HALF_OF_13_BITS_LESS_ONE, FLOAT32_NAN, FLOAT16_NAN = (
    np.uint32(n) for n in (0x7FFF, 0xFFF, 0x7FC00000, 0x7E00)
)
ONE_HALF, ONE_HALF_WORD, FLOAT16_OVERFLOW_WORD = np.float32(0.5), np.uint32(0x3F000000), np.uint32(0x47800000)


ZERO_WORD, ONE_WORD, SHIFT_8, SHIFT_24, SIGN_MASK_8, MAGNITUDE_MASK_8, NAN_CODE_8 = (
    np.uint32(n) for n in (0, 1, 8, 24, 0x80, 0x7F, 0x7F)
)
TWO_TO_MINUS_24 = np.float32(2.0**-24)


class Float8Functions(NamedTuple):
    """Device functions of a format: between float32 and codes, which are the low bytes of words."""

    decode_code: Callable[..., Any]
    round_to_nearest: Callable[..., Any]
    round_stochastically: Callable[..., Any]


def _make_float8_functions(
    name: str, mantissa_bits: int, emin: int, largest: int, infinity: int, is_infinite: bool
) -> Float8Functions:
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
    magic_word = magic.view(np.uint32)
    units, raised = np.float32(2.0 ** (mantissa_bits - emin)), np.float32(2.0 ** (126 + emin))
    last_code, first_special = np.uint32(largest), np.uint32(infinity)
    infinite_word, last_number = (
        FLOAT32_INFINITY if is_infinite else FLOAT32_NAN,
        np.uint32(FLOAT32_INFINITY - (not is_infinite)),
    )

    def decode_code(code):
        """Device function: the float32 of a code; the product places subnormals too, without rounding."""
        magnitude = bit_and(code, MAGNITUDE_MASK_8)
        placed = word(real(shl(magnitude, lost)) * raised)
        special = select(magnitude == first_special, infinite_word, FLOAT32_NAN)
        value = select(magnitude >= first_special, special, placed)
        return real(bit_or(value, shl(bit_and(code, SIGN_MASK_8), SHIFT_24)))

    def round_to_nearest(x, random):
        """Device function: the code nearest to x, ties to even; the float adder rounds subnormals."""
        magnitude = bit_and(word(x), FLOAT32_MAGNITUDE_MASK)
        tiny = sub(word(real(magnitude) + magic), magic_word)
        rounded = add(add(magnitude, half), bit_and(shr(magnitude, lost), ONE_WORD))
        return encode_magnitude_with_sign(x, magnitude, tiny, shr(sub(rounded, rebias), lost))

    def round_stochastically(x, random):
        """Device function: one of the two codes around x, the farther with the probability of its nearness."""
        magnitude = bit_and(word(x), FLOAT32_MAGNITUDE_MASK)
        steps = real(magnitude) * units
        below = to_word(select(magnitude < least_normal, steps, units))
        tiny = add(
            below, select(to_real(shr(random, SHIFT_8)) * TWO_TO_MINUS_24 < steps - to_real(below), ONE_WORD, ZERO_WORD)
        )
        normal = shr(sub(add(magnitude, shr(random, undrawn)), rebias), lost)
        return encode_magnitude_with_sign(x, magnitude, tiny, normal)

    def encode_magnitude_with_sign(x, magnitude, tiny, normal):
        limited = select(normal < last_code, normal, last_code)
        finite = select(magnitude < least_normal, tiny, limited)
        code = select(magnitude > last_number, NAN_CODE_8, finite)
        return bit_or(code, bit_and(shr(word(x), SHIFT_24), SIGN_MASK_8))

    for function in (decode_code, round_to_nearest, round_stochastically):
        function.__qualname__ = f"{name}.{function.__name__}"
    return Float8Functions(decode_code, round_to_nearest, round_stochastically)


# e4m3fn saturates, and has NaN where infinity would be; e5m2's numbers beyond the range become infinity.
E4M3FN_FUNCTIONS = _make_float8_functions("E4M3FN_FUNCTIONS", 3, -6, 0x7E, 0x7F, False)
E5M2_FUNCTIONS = _make_float8_functions("E5M2_FUNCTIONS", 2, -14, 0x7C, 0x7C, True)
