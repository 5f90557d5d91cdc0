"""The pieces of 8-bit states on a tile whose rows are blocks: `i` counts elements, `b` blocks, one per row."""

from __future__ import annotations

from ..kernels._scalar import bit_xor, load8, load16, store8, store16, sub, to_real
from ..kernels._triton_operations import row_peak
from ._block_pieces import (
    NAN,
    SIGN_8,
    SIGNED_MOST,
    UNSIGNED_MOST,
    inverse_of,
    scale_code,
    signed_code,
    squared_code,
    unit_of,
)


def decode_signed(codes, scales, i, b):
    """Piece: values; code -128 is NaN."""
    code = load8(codes, i)
    value = to_real(sub(bit_xor(code, SIGN_8), SIGN_8)) * unit_of(load16(scales, b), SIGNED_MOST)
    return NAN if code == SIGN_8 else value


def decode_squared(codes, scales, i, b):
    """Piece: the roots of values."""
    return to_real(load8(codes, i)) * unit_of(load16(scales, b), UNSIGNED_MOST)


def encode_signed(codes, scales, i, b, value, random):
    """Piece: values into scales and codes."""
    scale = scale_code(row_peak(value))
    store16(scales, b, scale)
    store8(codes, i, signed_code(value, inverse_of(scale, SIGNED_MOST), random))


def encode_squared(codes, scales, i, b, value, random):
    """Piece: roots into scales and codes."""
    scale = scale_code(row_peak(value))
    store16(scales, b, scale)
    store8(codes, i, squared_code(value, inverse_of(scale, UNSIGNED_MOST), random))
