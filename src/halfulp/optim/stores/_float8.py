"""Stores of 8 bits: e4m3fn and e5m2 (Micikevicius et al., arXiv 2209.05433), as payloads of scaled tensors."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.scalar._operations import (
    add,
    bit_and,
    bit_or,
    load8,
    real,
    select,
    shl,
    shr,
    store8,
    sub,
    to_real,
    to_word,
    word,
)
from ._storage import ABS, CANONICAL_NAN, EXPONENT, ONE, S8, STORES, TWO_M24, Store, fp16_real

S11, S12, S20, S21, S24, SIGN_8, ABS_8 = (np.uint32(n) for n in (11, 12, 20, 21, 24, 0x80, 0x7F))
NONE = np.uint32(0)

E4_HALF, E4_REBIAS, E4_TINY = (np.uint32(w) for w in (0x7FFFF, 120 << 23, 121 << 23))
E4_LARGEST, E4_NAN, E4_MAGIC_WORD = np.uint32(0x7E), np.uint32(0x7F), np.uint32(141 << 23)
E4_MAGIC, E4_UNITS, E4_RAISE = (np.float32(x) for x in (2.0**14, 2.0**9, 2.0**120))

E5_HALF, E5_REBIAS, E5_TINY = (np.uint32(w) for w in (0xFFFFF, 112 << 23, 113 << 23))
E5_INFINITY, E5_NAN, E5_MAGIC_WORD = np.uint32(0x7C), np.uint32(0x7F), np.uint32(134 << 23)
E5_MAGIC, E5_UNITS = np.float32(2.0**7), np.float32(2.0**16)


def e4m3_real(code):
    """Device function: the float32 of an e4m3fn code; the product places subnormals too, without rounding."""
    magnitude = bit_and(code, ABS_8)
    scaled = word(real(shl(magnitude, S20)) * E4_RAISE)
    value = select(magnitude == E4_NAN, CANONICAL_NAN, scaled)
    return real(bit_or(value, shl(bit_and(code, SIGN_8), S24)))


def e4m3_nearest(x, random):
    """Device function: the e4m3fn code nearest to x, ties to even; finite numbers saturate, infinities are NaN."""
    magnitude = bit_and(word(x), ABS)
    tiny = sub(word(real(magnitude) + E4_MAGIC), E4_MAGIC_WORD)
    rounded = add(add(magnitude, E4_HALF), bit_and(shr(magnitude, S20), ONE))
    return e4m3_signed(x, magnitude, tiny, shr(sub(rounded, E4_REBIAS), S20))


def e4m3_stochastic(x, random):
    """Device function: one of the two e4m3fn codes around x, the farther with the probability of its nearness."""
    magnitude = bit_and(word(x), ABS)
    units = real(magnitude) * E4_UNITS
    below = to_word(select(magnitude < E4_TINY, units, E4_UNITS))
    tiny = add(below, select(to_real(shr(random, S8)) * TWO_M24 < units - to_real(below), ONE, NONE))
    normal = shr(sub(add(magnitude, shr(random, S12)), E4_REBIAS), S20)
    return e4m3_signed(x, magnitude, tiny, normal)


def e4m3_signed(x, magnitude, tiny, normal):
    """Device function: the code of a rounded magnitude, with its sign and within the range."""
    limited = select(normal < E4_LARGEST, normal, E4_LARGEST)
    finite = select(magnitude < E4_TINY, tiny, limited)
    code = select(magnitude >= EXPONENT, E4_NAN, finite)
    return bit_or(code, bit_and(shr(word(x), S24), SIGN_8))


def e5m2_real(code):
    """Device function: the float32 of an e5m2 code, which is the upper half of a float16's."""
    return fp16_real(shl(code, S8))


def e5m2_nearest(x, random):
    """Device function: the e5m2 code nearest to x, ties to even; beyond the largest finite one infinity."""
    magnitude = bit_and(word(x), ABS)
    tiny = sub(word(real(magnitude) + E5_MAGIC), E5_MAGIC_WORD)
    rounded = add(add(magnitude, E5_HALF), bit_and(shr(magnitude, S21), ONE))
    return e5m2_signed(x, magnitude, tiny, shr(sub(rounded, E5_REBIAS), S21))


def e5m2_stochastic(x, random):
    """Device function: one of the two e5m2 codes around x; beyond the largest finite one the upper is infinity."""
    magnitude = bit_and(word(x), ABS)
    units = real(magnitude) * E5_UNITS
    below = to_word(select(magnitude < E5_TINY, units, E5_UNITS))
    tiny = add(below, select(to_real(shr(random, S8)) * TWO_M24 < units - to_real(below), ONE, NONE))
    normal = shr(sub(add(magnitude, shr(random, S11)), E5_REBIAS), S21)
    return e5m2_signed(x, magnitude, tiny, normal)


def e5m2_signed(x, magnitude, tiny, normal):
    """Device function: the code of a rounded magnitude, with its sign and within the range."""
    limited = select(normal < E5_INFINITY, normal, E5_INFINITY)
    finite = select(magnitude < E5_TINY, tiny, limited)
    code = select(magnitude > EXPONENT, E5_NAN, finite)
    return bit_or(code, bit_and(shr(word(x), S24), SIGN_8))


E4M3 = Store(
    "e4m3fn",
    torch.float8_e4m3fn,
    load8,
    store8,
    e4m3_real,
    e4m3_nearest,
    e4m3_stochastic,
    32,
    3,
    -6,
)
E5M2 = Store(
    "e5m2",
    torch.float8_e5m2,
    load8,
    store8,
    e5m2_real,
    e5m2_nearest,
    e5m2_stochastic,
    32,
    2,
    -14,
)
# What payloads of scaled tensors are stored in.
PAYLOADS = {**STORES, E4M3.dtype: E4M3, E5M2.dtype: E5M2}
