"""The scalar pieces of 8-bit states: codes to values and back, a tile of whole blocks at a time."""

from __future__ import annotations

import numpy as np

from ..kernels._scalar import (
    add,
    bit_and,
    divide,
    largest16,
    load16,
    load32,
    low_word,
    mul,
    real,
    shl,
    shr,
    signed_values16,
    store8,
    store16,
    sub,
    to_real,
    to_word,
    unsigned_values16,
)
from ..rounding._random import WEYL, draw

BLOCK = np.int64(32)
LANES = np.int64(16)
NAN = np.float32("nan")
ONE, S16, SIGN_8, LOW_8 = np.uint32(1), np.uint32(16), np.uint32(0x80), np.uint32(0xFF)
ZERO_WORD, ABS, INFINITY = np.uint32(0), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
BELOW_ONE, BF16_MAX = np.uint32(0xFFFF), np.uint32(0x7F7F)
ZERO, UNIT, TWO_M16, BIAS = (np.float32(x) for x in (0.0, 1.0, 2.0**-16, 128.0))
SIGNED_MOST, UNSIGNED_MOST = np.float32(127.0), np.float32(255.0)
MOST_CODE = np.uint32(255)
HUGE, HUGE_SQUARED, SHRINK, GROW = (np.float32(x) for x in (2.0**60, 2.0**120, 2.0**-80, 2.0**80))


def signed_code(value, inverse, random):
    """Piece: the signed code of a value, stochastic."""
    t = value * inverse
    t = t if t == t else ZERO
    t = t if t > -SIGNED_MOST else -SIGNED_MOST
    t = t if t < SIGNED_MOST else SIGNED_MOST
    code = sub(to_word(t + BIAS + to_real(bit_and(random, BELOW_ONE)) * TWO_M16), SIGN_8)
    return bit_and(code if value == value else SIGN_8, LOW_8)


def squared_code(value, inverse, random):
    """Piece: the unsigned code of a root, stochastic so that its square is right on average."""
    t = value * inverse
    t = t if t < UNSIGNED_MOST else UNSIGNED_MOST
    below = to_word(t)
    k = to_real(below)
    chance = to_real(bit_and(random, BELOW_ONE)) * TWO_M16
    code = add(below, ONE if chance * (k + k + UNIT) < (t - k) * (t + k) else ZERO_WORD)
    code = code if code < MOST_CODE else MOST_CODE
    least = ONE if value > ZERO else ZERO_WORD
    return code if code > least else least


def scale_code(top):
    """Piece: the bfloat16 code of the least scale not under a magnitude, at most the largest finite one."""
    code = shr(add(top, BELOW_ONE), S16)
    return code if code < BF16_MAX else BF16_MAX


def unit_of(code, most):
    """Piece: what one step of a code is worth."""
    return divide(real(shl(code, S16)), most)


def inverse_of(code, most):
    """Piece: codes per value; 0 for a block of zeros."""
    scale = real(shl(code, S16))
    return divide(most, scale) if scale > ZERO else ZERO


def decode_signed(codes, scales, begin, end, buffer):
    """Piece: the values of [begin, end) into a buffer."""
    for b in range(begin // BLOCK, end // BLOCK):
        unit, start = unit_of(load16(scales, b), SIGNED_MOST), b * BLOCK
        for j in range(0, BLOCK, LANES):
            signed_values16(codes, start + j, unit, buffer, start - begin + j)


def decode_squared(codes, scales, begin, end, buffer):
    """Piece: the roots of the values of [begin, end) into a buffer."""
    for b in range(begin // BLOCK, end // BLOCK):
        unit, start = unit_of(load16(scales, b), UNSIGNED_MOST), b * BLOCK
        for j in range(0, BLOCK, LANES):
            unsigned_values16(codes, start + j, unit, buffer, start - begin + j)


def encode_signed(codes, scales, begin, end, buffer, counter, shift):
    """Piece: values in a buffer into scales and codes; random halves from the word's counter at `begin`."""
    for b in range(begin // BLOCK, end // BLOCK):
        start = b * BLOCK
        scale = scale_code(largest(buffer, start - begin))
        inverse = inverse_of(scale, SIGNED_MOST)
        store16(scales, b, scale)
        at = add(counter, mul(low_word(start - begin), WEYL))
        for j in range(BLOCK):
            value = real(load32(buffer, start - begin + j))
            store8(codes, start + j, signed_code(value, inverse, shr(draw(at), shift)))
            at = add(at, WEYL)


def encode_squared(codes, scales, begin, end, buffer, counter, shift):
    """Piece: roots in a buffer into scales and codes; random halves from the word's counter at `begin`."""
    for b in range(begin // BLOCK, end // BLOCK):
        start = b * BLOCK
        scale = scale_code(largest(buffer, start - begin))
        inverse = inverse_of(scale, UNSIGNED_MOST)
        store16(scales, b, scale)
        at = add(counter, mul(low_word(start - begin), WEYL))
        for j in range(BLOCK):
            value = real(load32(buffer, start - begin + j))
            store8(codes, start + j, squared_code(value, inverse, shr(draw(at), shift)))
            at = add(at, WEYL)


def largest(buffer, start):
    """Piece: the word of the largest magnitude of a block."""
    top = ZERO_WORD
    for j in range(0, BLOCK, LANES):
        top = largest16(buffer, start + j, top)
    return top
