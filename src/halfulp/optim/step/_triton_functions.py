"""The pieces of 8-bit states on a tile whose rows are blocks: `i` counts elements, `b` blocks, one per row."""

from __future__ import annotations

from ...kernels.scalar._operations import bit_xor, load8, load16, real, shl, store8, store16, sub, to_real
from ...kernels.triton._operations import row_amax
from ..states._int8_device_functions import (
    NAN,
    S16,
    SIGN_8,
    SIGNED_UNIT,
    TINY,
    UNSIGNED_UNIT,
    ZERO,
    inverse_of,
    scale_code,
    signed_code,
    squared_code,
)


def decode_signed(codes, scales, i, b):
    """Device function: values; code -128 is NaN."""
    code = load8(codes, i)
    k = to_real(sub(bit_xor(code, SIGN_8), SIGN_8))
    value = k * k * k * SIGNED_UNIT * real(shl(load16(scales, b), S16))
    return NAN if code == SIGN_8 else value


def decode_squared(codes, scales, i, b):
    """Device function: the roots of values."""
    k = to_real(load8(codes, i))
    return k * k * k * UNSIGNED_UNIT * real(shl(load16(scales, b), S16))


def encode_signed(codes, scales, i, b, value, random):
    """Device function: values into scales and codes."""
    scale = scale_code(row_amax(value))
    store16(scales, b, scale)
    store8(codes, i, signed_code(in_units(value, inverse_of(scale)), random))


def encode_squared(codes, scales, i, b, value, random):
    """Device function: roots into scales and codes."""
    scale = scale_code(row_amax(value))
    store16(scales, b, scale)
    store8(codes, i, squared_code(in_units(value, inverse_of(scale)), random))


def in_units(value, inverse):
    """Device function: a value in units of its block's scale; a positive one never 0."""
    x = value * inverse
    return TINY if value > ZERO and x == ZERO else x
