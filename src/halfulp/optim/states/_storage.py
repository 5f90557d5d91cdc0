"""How one number is stored in memory: a torch reference and device functions with the same bits.

Contract between the pieces: a decoder never yields a NaN whose low 16 bits are set (bfloat16 payloads end in zeros,
the others are made canonical), and arithmetic passes such NaNs on or makes canonical ones. So an encoder may add
rounding bits to the word of a NaN without carrying into its sign, and needs no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.scalar._operations import (
    add,
    bit_and,
    bit_or,
    load16,
    load32,
    real,
    select,
    shl,
    shr,
    store16,
    store32,
    sub,
    to_real,
    to_word,
    word,
)

ONE, S8, S13, S16 = (np.uint32(n) for n in (1, 8, 13, 16))
ABS, SIGN, EXPONENT, CANONICAL_NAN = (np.uint32(w) for w in (0x7FFFFFFF, 0x80000000, 0x7F800000, 0x7FC00000))
BF16_HALF = np.uint32(0x7FFF)
FP16_HALF, FP16_REBIAS, FP16_LOW, FP16_INFINITY = (np.uint32(w) for w in (0x0FFF, 112 << 23, 0x1FFF, 0x7C00))
FP16_NAN, FP16_ABS, FP16_SIGN = np.uint32(0x7E00), np.uint32(0x7FFF), np.uint32(0x8000)
FP16_TINY_WORD, FP16_OVERFLOW_WORD, FP16_MAGIC_WORD = np.uint32(113 << 23), np.uint32(0x477FF000), np.uint32(126 << 23)
FP16_TOP_WORD = np.uint32(0x47800000)
FP16_MAGIC, TWO_112, TWO_24, TWO_M24 = (np.float32(x) for x in (0.5, 2.0**112, 2.0**24, 2.0**-24))


@dataclass(frozen=True)
class Store:
    """One number in memory.

    Attributes:
        name: for messages and kernel names.
        dtype: of the torch tensor that holds it.
        load: piece (address, i) -> code.
        save: piece (address, i, code).
        real: piece code -> float32.
        nearest: piece (x, random) -> code, ties to even; the random word is not looked at.
        stochastic: piece (x, random) -> code.
        random_bits: how many low bits of that word `stochastic` uses: 16 or 32.
        decode: reference, tensor of `dtype` -> float32 tensor.
        encode: reference, (float32 tensor, int64 random words or None for nearest) -> tensor of `dtype`.
        mantissa_bits: stored bits of the significand: the last place of 1 is 2^-mantissa_bits.
        emin: exponent of the smallest normal number.
        constants: names and values that the pieces find bound.
    """

    name: str
    dtype: torch.dtype
    load: Callable
    save: Callable
    real: Callable
    nearest: Callable
    stochastic: Callable
    random_bits: int
    decode: Callable[[torch.Tensor], torch.Tensor]
    encode: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    mantissa_bits: int
    emin: int
    constants: tuple[tuple[str, object], ...] = ()


def bf16_real(code):
    """Device function: the float32 of a bfloat16 code."""
    return real(shl(code, S16))


def bf16_nearest(x, random):
    """Device function: the bfloat16 code nearest to x, ties to even."""
    bits = word(x)
    return shr(add(add(bits, BF16_HALF), bit_and(shr(bits, S16), ONE)), S16)


def bf16_stochastic(x, random):
    """Device function: one of the two bfloat16 codes around x, the farther with the probability of its nearness."""
    return shr(add(word(x), random), S16)


def f32_real(code):
    """Device function: the float32 with these bits, every NaN made canonical."""
    return real(select(bit_and(code, ABS) > EXPONENT, CANONICAL_NAN, code))


def f32_exact(x, random):
    """Device function: a float32 kept whole."""
    return word(x)


def fp16_real(code):
    """Device function: the float32 of a float16 code; the product places subnormals too, without rounding."""
    magnitude = bit_and(code, FP16_ABS)
    scaled = word(real(shl(magnitude, S13)) * TWO_112)
    special = select(magnitude == FP16_INFINITY, EXPONENT, CANONICAL_NAN)
    value = select(magnitude >= FP16_INFINITY, special, scaled)
    return real(bit_or(value, shl(bit_and(code, FP16_SIGN), S16)))


def fp16_nearest(x, random):
    """Device function: the float16 code nearest to x, ties to even; the float32 adder rounds the subnormals."""
    bits = word(x)
    magnitude = bit_and(bits, ABS)
    tiny = sub(word(real(magnitude) + FP16_MAGIC), FP16_MAGIC_WORD)
    rounded = add(add(magnitude, FP16_HALF), bit_and(shr(magnitude, S13), ONE))
    normal = shr(sub(rounded, FP16_REBIAS), S13)
    finite = select(magnitude < FP16_TINY_WORD, tiny, normal)
    special = select(magnitude > EXPONENT, FP16_NAN, FP16_INFINITY)
    code = select(magnitude >= FP16_OVERFLOW_WORD, special, finite)
    return bit_or(code, bit_and(shr(bits, S16), FP16_SIGN))


def fp16_stochastic(x, random):
    """Device function: one of the two float16 codes around x; beyond the largest finite one the upper is infinity."""
    bits = word(x)
    magnitude = bit_and(bits, ABS)
    units = real(magnitude) * TWO_24
    below = to_word(select(magnitude < FP16_TINY_WORD, units, TWO_24))
    chance = to_real(shr(random, S8)) * TWO_M24
    tiny = add(below, select(chance < units - to_real(below), ONE, sub(ONE, ONE)))
    normal = shr(sub(add(magnitude, bit_and(random, FP16_LOW)), FP16_REBIAS), S13)
    finite = select(magnitude < FP16_TINY_WORD, tiny, normal)
    special = select(magnitude > EXPONENT, FP16_NAN, FP16_INFINITY)
    code = select(magnitude >= FP16_TOP_WORD, special, finite)
    return bit_or(code, bit_and(shr(bits, S16), FP16_SIGN))


def float_words(x: torch.Tensor) -> torch.Tensor:
    """The bits of a float32 tensor as int64 in [0, 2^32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def words_float(words: torch.Tensor) -> torch.Tensor:
    """The float32 tensor with these bits."""
    return _signed(words, 32).to(torch.int32).view(torch.float32)


def _signed(words: torch.Tensor, bits: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    return ((words & (2 * half - 1)) ^ half) - half


def _codes(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _signed(words, 16).to(torch.int16).view(dtype)


def _decode_bf16(x: torch.Tensor) -> torch.Tensor:
    return words_float((x.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF) << 16)


def _encode_bf16(x: torch.Tensor, random: torch.Tensor | None) -> torch.Tensor:
    words = float_words(x)
    added = 0x7FFF + ((words >> 16) & 1) if random is None else random & 0xFFFF
    kept = torch.where(x.isnan(), words & 0xFFFF0000 | 0x00400000, (words + added) & 0xFFFFFFFF)
    return _codes(kept >> 16, torch.bfloat16)


def _decode_fp16(x: torch.Tensor) -> torch.Tensor:
    return _decode_f32(x.float())


def _encode_fp16(x: torch.Tensor, random: torch.Tensor | None) -> torch.Tensor:
    if random is None:
        return x.to(torch.float16)
    words = float_words(x)
    magnitude = words & 0x7FFFFFFF
    units = x.abs() * 2.0**24
    below = torch.where(magnitude < 113 << 23, units, 0.0).floor()
    chance = (random >> 8).float() * 2.0**-24
    tiny = below.to(torch.int64) + (chance < units - below).to(torch.int64)
    normal = (magnitude + (random & 0x1FFF) - (112 << 23)) >> 13
    code = torch.where(magnitude < 113 << 23, tiny, normal)
    code = torch.where(magnitude >= 0x47800000, torch.where(x.isnan(), 0x7E00, 0x7C00), code)
    return _codes(code | ((words >> 16) & 0x8000), torch.float16)


def _decode_f32(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.nan, x)


def _encode_f32(x: torch.Tensor, random: torch.Tensor | None) -> torch.Tensor:
    return x


BF16 = Store(
    "bf16",
    torch.bfloat16,
    load16,
    store16,
    bf16_real,
    bf16_nearest,
    bf16_stochastic,
    16,
    _decode_bf16,
    _encode_bf16,
    7,
    -126,
)
FP16 = Store(
    "fp16",
    torch.float16,
    load16,
    store16,
    fp16_real,
    fp16_nearest,
    fp16_stochastic,
    32,
    _decode_fp16,
    _encode_fp16,
    10,
    -14,
)
F32 = Store(
    "fp32", torch.float32, load32, store32, f32_real, f32_exact, f32_exact, 0, _decode_f32, _encode_f32, 23, -126
)
STORES = {store.dtype: store for store in (BF16, FP16, F32)}
