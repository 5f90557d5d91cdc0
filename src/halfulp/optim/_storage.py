"""How one number is stored in memory, as device functions: 16 and 32 bits, and any format's values.

Contract between the pieces: a decoder never yields a NaN whose low 16 bits are set (bfloat16 payloads end in zeros,
the others are made canonical), and arithmetic passes such NaNs on or makes canonical ones. So an encoder may add
rounding bits to the word of a NaN without carrying into its sign, and needs no guard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import formats
from ..formats import Format
from ..kernels import Trace, run_trace_on_tensors
from ..kernels._device_function import ElementTraceBuilder, bind_free_variables
from ..kernels._operations import (
    add,
    bit_and,
    bit_or,
    load8,
    load16,
    load32,
    real,
    select,
    shr,
    store8,
    store16,
    store32,
    sub,
    to_real,
    to_word,
    word,
)
from ..kernels._trace import RecordedFunction
from ..rounding._device_functions import (
    E4M3FN_FUNCTIONS,
    E5M2_FUNCTIONS,
    FLOAT16_INFINITY,
    FLOAT16_LEAST_NORMAL_AS_FLOAT32,
    FLOAT16_NAN,
    FLOAT16_OVERFLOW_WORD,
    FLOAT16_REBIAS,
    FLOAT16_SIGN_MASK,
    THIRTEEN,
    encode_float16,
    widen_bfloat16,
    widen_float16,
)

ONE, EIGHT, SIXTEEN, NINETEEN = (np.uint32(n) for n in (1, 8, 16, 19))
MAGNITUDE_MASK, SIGN_MASK, EXPONENT_MASK, CANONICAL_NAN = (
    np.uint32(w) for w in (0x7FFFFFFF, 0x80000000, 0x7F800000, 0x7FC00000)
)
BF16_ROUNDING_ADDEND = np.uint32(0x7FFF)
TWO_TO_24, TWO_TO_MINUS_24 = np.float32(2.0**24), np.float32(2.0**-24)


@dataclass(frozen=True)
class Store:
    """The storage of one number in memory, as device functions."""

    name: str  # for messages and kernel names
    dtype: torch.dtype  # of the torch tensor that holds it
    load_code: Callable[[Any, Any], Any]  # (address, i) -> code
    store_code: Callable[[Any, Any, Any], None]  # (address, i, code)
    decode_code: Callable[[Any], Any]  # code -> float32
    round_to_nearest: Callable[[Any, Any], Any]  # (x, random) -> code, ties to even; the random word is not looked at
    round_stochastically: Callable[[Any, Any], Any]  # (x, random) -> code
    random_bits: int  # of that word: 16, which `round_stochastically` finds lowest, or 32, best in the upper ones
    mantissa_bits: int  # stored bits of the significand: the last place of 1 is 2^-mantissa_bits
    emin: int  # exponent of the smallest normal number
    constants: tuple[tuple[str, object], ...] = ()  # names and values that the functions find bound

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the float32 numbers of a tensor of `dtype`."""
        piece = _record_decoder(self)
        return run_trace_on_tensors(piece.trace, [x], results=piece.results)[0][0]

    def compute_function_digests(self) -> tuple[object, ...]:
        """Return a digest of what the device functions do, equal for a store that was made twice."""
        decoder = _record_decoder(self)
        coders = (_record_encoder(self, stochastic).digest() for stochastic in (False, True))
        return self.dtype, self.random_bits, decoder.trace.digest(), decoder.results, *coders

    def encode(self, x: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 numbers rounded to a tensor of `dtype`: to nearest, or by a random word per element."""
        out = torch.empty_like(x, dtype=self.dtype)
        inputs = {"value": x, "random": mask_random_words(random, self.random_bits)}
        run_trace_on_tensors(_record_encoder(self, random is not None), [out], inputs)
        return out


def decode_bf16(code):
    """Device function: the float32 of a bfloat16 code."""
    return real(widen_bfloat16(code))


def round_to_bf16(x, random):
    """Device function: the bfloat16 code nearest to x, ties to even."""
    bits = word(x)
    return shr(add(add(bits, BF16_ROUNDING_ADDEND), bit_and(shr(bits, SIXTEEN), ONE)), SIXTEEN)


def round_to_bf16_stochastically(x, random):
    """Device function: one of the two bfloat16 codes around x, the farther with the probability of its nearness."""
    return shr(add(word(x), random), SIXTEEN)


def decode_float32_word(code):
    """Device function: the float32 with these bits, every NaN made canonical."""
    return real(select(bit_and(code, MAGNITUDE_MASK) > EXPONENT_MASK, CANONICAL_NAN, code))


def encode_float32_word(x, random):
    """Device function: a float32 kept whole."""
    return word(x)


def decode_fp16(code):
    """Device function: the float32 of a float16 code."""
    return real(widen_float16(code))


def round_to_fp16(x, random):
    """Device function: the float16 code nearest to x, ties to even."""
    return encode_float16(word(x))


def round_to_fp16_stochastically(x, random):
    """Device function: one of the two float16 codes around x; beyond the largest finite one the upper is infinity."""
    bits = word(x)
    magnitude = bit_and(bits, MAGNITUDE_MASK)
    units = real(magnitude) * TWO_TO_24
    below = to_word(select(magnitude < FLOAT16_LEAST_NORMAL_AS_FLOAT32, units, TWO_TO_24))
    chance = to_real(shr(random, EIGHT)) * TWO_TO_MINUS_24
    tiny = add(below, select(chance < units - to_real(below), ONE, np.uint32(0)))
    normal = shr(sub(add(magnitude, shr(random, NINETEEN)), FLOAT16_REBIAS), THIRTEEN)
    finite = select(magnitude < FLOAT16_LEAST_NORMAL_AS_FLOAT32, tiny, normal)
    special = select(magnitude > EXPONENT_MASK, FLOAT16_NAN, FLOAT16_INFINITY)
    code = select(magnitude >= FLOAT16_OVERFLOW_WORD, special, finite)
    return bit_or(code, bit_and(shr(bits, SIXTEEN), FLOAT16_SIGN_MASK))


def make_nan_canonical(x):
    """Device function: a float32 from outside, of whose NaNs the sign alone is kept."""
    return select(x == x, x, real(bit_or(bit_and(word(x), SIGN_MASK), CANONICAL_NAN)))


def mask_random_words(random: torch.Tensor | None, random_bits: int) -> torch.Tensor | float:
    """Return int64 random words as a recorded function takes them: as many bits as a rounding uses."""
    if random is None:
        return 0
    return (random & 0xFFFF if random_bits == 16 else random).to(torch.int32)


@functools.cache
def _record_decoder(store: Store) -> RecordedFunction:
    element = ElementTraceBuilder(1)
    found = bind_free_variables(store.decode_code, dict(store.constants))(
        store.load_code(element.arrays[0], element.index)
    )
    return RecordedFunction(element.trace, (found.number,))


@functools.cache
def _record_encoder(store: Store, stochastic: bool) -> Trace:
    element = ElementTraceBuilder(1)
    value, random = make_nan_canonical(element.add_input("value")), element.add_input("random", "w32")
    rounded = bind_free_variables(
        store.round_stochastically if stochastic else store.round_to_nearest, dict(store.constants)
    )
    store.store_code(element.arrays[0], element.index, rounded(value, random))
    return element.trace


_BF16_CODE_FUNCTIONS = decode_bf16, round_to_bf16, round_to_bf16_stochastically
_FP16_CODE_FUNCTIONS = decode_fp16, round_to_fp16, round_to_fp16_stochastically
BF16 = Store("bf16", torch.bfloat16, load16, store16, *_BF16_CODE_FUNCTIONS, 16, 7, -126)
FP16 = Store("fp16", torch.float16, load16, store16, *_FP16_CODE_FUNCTIONS, 32, 10, -14)
F32 = Store(
    "fp32", torch.float32, load32, store32, decode_float32_word, encode_float32_word, encode_float32_word, 0, 23, -126
)
E4M3 = Store("e4m3fn", torch.float8_e4m3fn, load8, store8, *E4M3FN_FUNCTIONS, 32, 3, -6)
E5M2 = Store("e5m2", torch.float8_e5m2, load8, store8, *E5M2_FUNCTIONS, 32, 2, -14)
STORE_BY_DTYPE = {store.dtype: store for store in (BF16, FP16, F32)}
# What payloads of scaled tensors are stored in.
PAYLOAD_STORE_BY_DTYPE = {**STORE_BY_DTYPE, E4M3.dtype: E4M3, E5M2.dtype: E5M2}


# Bound per format.
KEPT_BITS_MASK = UNUSED_RANDOM_BIT_COUNT = ROUNDING_ADDEND = LOST_BIT_COUNT = np.uint32(0)
LOWEST_BINADE_WORD = ADDEND_EXPONENT_OFFSET = SPACING_EXPONENT_OFFSET = INVERSE_SPACING_EXPONENT_OFFSET = np.uint32(0)
LARGEST_FINITE = OVERFLOW_REPLACEMENT_WORD = np.uint32(0)


def round_to_nearest_by_masking(x, random):
    """Device function: to nearest where every word loses the same bits (8 exponent bits)."""
    bits = word(x)
    rounded = bit_and(add(add(bits, ROUNDING_ADDEND), bit_and(shr(bits, LOST_BIT_COUNT), ONE)), KEPT_BITS_MASK)
    return select(bit_and(bits, MAGNITUDE_MASK) > EXPONENT_MASK, bits, rounded)


def round_stochastically_by_masking(x, random):
    """Device function: stochastic where every word loses the same bits."""
    bits = word(x)
    rounded = bit_and(add(bits, shr(random, UNUSED_RANDOM_BIT_COUNT)), KEPT_BITS_MASK)
    return select(bit_and(bits, MAGNITUDE_MASK) > EXPONENT_MASK, bits, rounded)


def round_to_nearest_by_adder(x, random):
    """Device function: to nearest by the float adder, whose spacing at 2^(e - m + 23) is the format's at 2^e."""
    bits = word(x)
    magnitude = bit_and(bits, MAGNITUDE_MASK)
    large = real(add(floor_to_binade_word(magnitude), ADDEND_EXPONENT_OFFSET))
    rounded = word((real(magnitude) + large) - large)
    return bit_or(replace_overflowed_magnitude(magnitude, rounded), bit_and(bits, SIGN_MASK))


def round_stochastically_in_units(x, random):
    """Device function: a float32 rounded stochastically to a multiple of the format's spacing."""
    bits = word(x)
    magnitude = bit_and(bits, MAGNITUDE_MASK)
    bounded = select(magnitude < EXPONENT_MASK, magnitude, LOWEST_BINADE_WORD)
    binade = floor_to_binade_word(bounded)
    units = real(bounded) * real(sub(INVERSE_SPACING_EXPONENT_OFFSET, binade))
    below = to_real(to_word(units))
    above = below + np.float32(1.0)
    taken = select(to_real(shr(random, EIGHT)) * TWO_TO_MINUS_24 < units - below, above, below)
    rounded = word(taken * real(sub(binade, SPACING_EXPONENT_OFFSET)))
    return bit_or(
        replace_overflowed_magnitude(magnitude, select(magnitude < EXPONENT_MASK, rounded, magnitude)),
        bit_and(bits, SIGN_MASK),
    )


def floor_to_binade_word(bits):
    """Device function: the word of the power of two at or below a magnitude, at least LOWEST_BINADE_WORD."""
    binade = bit_and(bits, EXPONENT_MASK)
    return select(binade > LOWEST_BINADE_WORD, binade, LOWEST_BINADE_WORD)


def replace_overflowed_magnitude(magnitude, rounded):
    """Device function: what lies beyond the largest number, by the format's policy; NaN stays."""
    inside = select(rounded <= LARGEST_FINITE, rounded, OVERFLOW_REPLACEMENT_WORD)
    return select(magnitude > EXPONENT_MASK, magnitude, inside)


@functools.cache
def make_format_store(given: Format | str | None) -> Store | None:
    """Return the store of a format's values in float32; None for no format and for float32 itself."""
    fmt = None if given is None else formats.get(given)
    if fmt is None or fmt.layout == formats.fp32.layout:
        return None
    if not (fmt.signed and fmt.zero and fmt.subnormals and fmt.signed_zero) or fmt.mantissa_bits == 0:
        raise ValueError(f"format={fmt.name} cannot hold weights: a sign, both zeros and subnormals are needed")
    pieces: tuple[Callable, Callable]
    if fmt.exponent_bits == 8 and fmt.emin == -126:
        if fmt.mantissa_bits >= 23:
            raise ValueError(f"format={fmt.name} has more bits than the float32 parameters that are to hold it")
        lost, pieces = 23 - fmt.mantissa_bits, (round_to_nearest_by_masking, round_stochastically_by_masking)
        constants = {
            "KEPT_BITS_MASK": 0xFFFFFFFF << lost & 0xFFFFFFFF,
            "UNUSED_RANDOM_BIT_COUNT": 32 - lost,
            "ROUNDING_ADDEND": (1 << lost - 1) - 1,
            "LOST_BIT_COUNT": lost,
        }
    else:
        if fmt.emax - fmt.mantissa_bits + 24 > 127 or fmt.emin - fmt.mantissa_bits < -100 or fmt.mantissa_bits > 20:
            raise ValueError(
                f"format={fmt.name} does not fit into float32 parameters: its range or precision is too large"
            )
        pieces = round_to_nearest_by_adder, round_stochastically_in_units
        largest = int(np.float32(fmt.max).view(np.uint32))
        constants = {
            "LOWEST_BINADE_WORD": fmt.emin + 127 << 23,
            "ADDEND_EXPONENT_OFFSET": 23 - fmt.mantissa_bits << 23,
            "SPACING_EXPONENT_OFFSET": fmt.mantissa_bits << 23,
            "INVERSE_SPACING_EXPONENT_OFFSET": 254 + fmt.mantissa_bits << 23,
            "LARGEST_FINITE": largest,
            "OVERFLOW_REPLACEMENT_WORD": {"inf": 0x7F800000, "nan": 0x7FC00000}.get(fmt.overflow, largest),
        }
    words = tuple((name, np.uint32(value)) for name, value in constants.items())
    numbers = 32, fmt.mantissa_bits, fmt.emin
    return Store(fmt.name, torch.float32, load32, store32, decode_float32_word, *pieces, *numbers, words)
