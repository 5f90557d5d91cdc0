"""Device functions of 8-bit states: codes whose cubes are the values, a tile of whole blocks at a time.

A magnitude is scale x (k / most)^3. The codes lie 1.2% (of 255) or 2.4% (of 127) apart at the block's largest value and
reach down to 6e-8 or 5e-7 of it. All cubes are below 2^24, so that float32 compares them exactly.
"""

from __future__ import annotations

import numpy as np

from ...kernels.scalar._operations import (
    add,
    bit_and,
    bit_xor,
    divide,
    largest16,
    load16,
    load32,
    real,
    scaled16,
    shl,
    shr,
    signed_cubes16,
    store8,
    store16,
    sub,
    to_real,
    to_word,
    unsigned_cubes16,
    word,
)
from ...rounding._random_bits import WEYL, draw

BLOCK = np.int64(32)
LANES = np.int64(16)
NAN = np.float32("nan")
ONE, S5, S16, S21, S31 = (np.uint32(n) for n in (1, 5, 16, 21, 31))
SIGN_8, ZERO_WORD, BELOW_ONE = np.uint32(0x80), np.uint32(0), np.uint32(0xFFFF)
ZERO, HALF_CHANCE, UNIT, THREE, TWO_M16 = (np.float32(x) for x in (0.0, 0.5, 1.0, 3.0, 2.0**-16))
TINY = np.float32(2.0**-126)
SIGNED_CUBES, UNSIGNED_CUBES = np.float32(127.0**3), np.float32(255.0**3)
SIGNED_UNIT, UNSIGNED_UNIT = np.float32(1 / 127**3), np.float32(1 / 255**3)
# Scales have three significant bits: finer ones move as their block decays, and all its codes are rounded again.
BELOW_STEP, LEAST_SCALE, MOST_SCALE = np.uint32((1 << 21) - 1), np.uint32(0x0080), np.uint32(0x7F60)
# An inverse cube root from the bits of a float32 (right within 3.5%), then one step of third order (2e-4).
ROOT_MAGIC, THIRD, TWO_NINTHS = np.uint32(0x54A2FA8C), np.float32(1 / 3), np.float32(2 / 9)
LEAST_ROOTED, MARGIN = np.float32(2.0**-6), np.float32(0.125)
HUGE, HUGE_SQUARED, SHRINK, GROW = (np.float32(x) for x in (2.0**60, 2.0**120, 2.0**-80, 2.0**80))


def cube_floor(x):
    """Device function: the largest whole number whose cube is at most x < 2^24, as a float32."""
    safe = x if x > LEAST_ROOTED else LEAST_ROOTED
    y = real(sub(ROOT_MAGIC, to_word(to_real(word(safe)) * THIRD)))
    off = UNIT - safe * (y * y * y)
    y = y + y * off * (THIRD + off * TWO_NINTHS)
    k = to_real(to_word(safe * y * y - MARGIN))  # at most one too low: a state that moves by 1e-3 of a code is decided
    above = k + UNIT
    return above if above * above * above <= x else k


def chance_of(random):
    """Device function: a number in (0, 1)."""
    return (to_real(bit_and(random, BELOW_ONE)) + HALF_CHANCE) * TWO_M16


def signed_code(value, random):
    """Device function: the signed code of a value in units of its block's scale; -128 for NaN."""
    x = abs(value) * SIGNED_CUBES
    x = x if x < SIGNED_CUBES else SIGNED_CUBES
    k = cube_floor(x)
    up = chance_of(random) * (THREE * (k * (k + UNIT)) + UNIT) < x - k * k * k
    code = to_word(k + UNIT if up else k)
    negative = sub(ZERO_WORD, shr(word(value), S31))
    code = sub(bit_xor(code, negative), negative)
    return code if value == value else SIGN_8


def squared_code(value, random):
    """Device function: the unsigned code of a root in units of its block's scale; a positive one is never 0."""
    x = value * UNSIGNED_CUBES
    x = x if x < UNSIGNED_CUBES else UNSIGNED_CUBES
    k = cube_floor(x)
    t = k + chance_of(random)
    code = to_word(k + UNIT if t * t * t < x else k)
    least = ONE if value > ZERO else ZERO_WORD
    return code if code > least else least


def scale_code(top):
    """Device function: the bfloat16 code of the least scale not under a finite magnitude's word; 0 for 0."""
    code = shl(shr(add(top, BELOW_STEP), S21), S5)
    code = code if code < MOST_SCALE else MOST_SCALE
    code = code if code > LEAST_SCALE else LEAST_SCALE
    return code if top > ZERO_WORD else ZERO_WORD


def inverse_of(code):
    """Device function: one over a scale; 1 for a block of zeros."""
    scale = real(shl(code, S16))
    return divide(UNIT, scale) if scale > ZERO else UNIT


def decode_signed(codes, scales, begin, end, buffer):
    """Device function: the values of [begin, end) into a buffer."""
    for b in range(begin // BLOCK, end // BLOCK):
        scale, start = real(shl(load16(scales, b), S16)), b * BLOCK
        for j in range(0, BLOCK, LANES):
            signed_cubes16(codes, start + j, scale, buffer, start - begin + j)


def decode_squared(codes, scales, begin, end, buffer):
    """Device function: the roots of the values of [begin, end) into a buffer."""
    for b in range(begin // BLOCK, end // BLOCK):
        scale, start = real(shl(load16(scales, b), S16)), b * BLOCK
        for j in range(0, BLOCK, LANES):
            unsigned_cubes16(codes, start + j, scale, buffer, start - begin + j)


def encode_signed(codes, scales, begin, end, buffer, counter, shift):
    """Device function: values in a buffer into scales and codes; random halves from the word's counter at `begin`."""
    into_units(scales, begin, end, buffer)
    at = counter
    for j in range(end - begin):
        store8(codes, begin + j, signed_code(real(load32(buffer, j)), shr(draw(at), shift)))
        at = add(at, WEYL)


def encode_squared(codes, scales, begin, end, buffer, counter, shift):
    """Device function: roots in a buffer into scales and codes; random halves from the word's counter at `begin`."""
    into_units(scales, begin, end, buffer)
    at = counter
    for j in range(end - begin):
        store8(codes, begin + j, squared_code(real(load32(buffer, j)), shr(draw(at), shift)))
        at = add(at, WEYL)


def into_units(scales, begin, end, buffer):
    """Device function: the scales of [begin, end), and the buffer's values in units of them, in place."""
    for b in range(begin // BLOCK, end // BLOCK):
        start = b * BLOCK - begin
        scale = scale_code(largest(buffer, start))
        store16(scales, b, scale)
        inverse = inverse_of(scale)
        for j in range(0, BLOCK, LANES):
            scaled16(buffer, start + j, inverse)


def largest(buffer, start):
    """Device function: the word of the largest finite magnitude of a block."""
    top = ZERO_WORD
    for j in range(0, BLOCK, LANES):
        top = largest16(buffer, start + j, top)
    return top
