"""A float32 weight split into the narrow parameter and its low bits."""

# ruff: noqa: F821  names that are free here (weight_load, fitting, ...) are bound when a kernel is written
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...arithmetic._operators import two_sum
from ...kernels._operations import (
    add,
    bit_and,
    bit_xor,
    divide,
    load8,
    load16,
    real,
    select,
    shl,
    shr,
    store8,
    store16,
    sub,
    to_real,
    to_word,
    word,
)
from .._storage import Store
from ._weight_update import WeightUpdate, make_store_bindings, read_rounding_name, register_weight_update

ZERO, ONE, SHIFT_8, SHIFT_15, SHIFT_16 = (np.uint32(n) for n in (0, 1, 8, 15, 16))
HALF_OF_16_BITS, LOW_8_MASK, TOP_24_MASK = np.uint32(0x8000), np.uint32(0xFF), np.uint32(0xFFFFFF00)
SIGN_MASK_8, SIGN_MASK_16, HALF_OF_8_BITS = np.uint32(0x80), np.uint32(0x8000), np.uint32(0x80)
SIGNED_8_BIAS, TWO_TO_MINUS_16 = np.float32(128.0), np.float32(2.0**-16)
LEAST_SIGNED_8, LARGEST_SIGNED_8 = np.float32(-128.0), np.float32(128.0)
FLOAT32_EXPONENT_MASK, FP16_LEAST_EXPONENT = np.uint32(0x7F800000), np.uint32(113 << 23)
FP16_UNIT_EXPONENT_OFFSET = np.uint32(18 << 23)
FLOAT32_TOP_EXPONENT = np.uint32(0x7F000000)
FP16_SIGN_AND_FRACTION, FP16_LEAST_NORMAL, QUARTER_OF_8_BITS = np.uint32(0x83FF), np.uint32(0x0400), np.uint32(0x40)
FLOAT32_ONE, FLOAT32_ZERO, FLOAT32_HALF = np.float32(1.0), np.float32(0.0), np.float32(0.5)
LOW_16_MASK = np.uint32(0xFFFF)


@dataclass(frozen=True)
class Split16(WeightUpdate):
    """w in two parts: bfloat16, nearest to w, and the 16 bits that it misses: exact float32.

    word(w) = (p << 16) + c with c a signed 16-bit integer: one to one on all 2^32 words, ties away from zero. Any 16
    bits fit any parameter: what an unseen write leaves in them is half an ulp of the parameter at most.

    To nearest, as everywhere in float32, an update near half an ulp of float32 is biased (|u|/|w| = 1e-7: by up to a
    half) and a smaller one is lost: `SplitStochastic` keeps it.
    """

    name: ClassVar[str] = "split"
    stochastic: ClassVar[bool] = False

    def check_store(self, store: Store) -> None:
        if store.dtype != torch.bfloat16:
            raise ValueError(
                f"weight_update {self.name!r} cuts a float32 word in two, which bfloat16 parameters allow, not "
                f"{store.name} ones: use 'kahan', 'split8' or 'master'"
            )

    def describe_auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        return (("low_bits", torch.int16),)

    def list_random_bits_per_draw(self, store: Store) -> tuple[int, ...]:
        return (16,) if self.stochastic else ()

    def make_bindings(self, store: Store) -> dict[str, object]:
        rounded = round_sum_stochastically if self.stochastic else round_sum_to_nearest
        pieces = {
            "read_weight": read_split_weight,
            "write_weight": write_split_weight,
            "fill_weight": fill_split_weight,
        }
        return pieces | {"rounded_sum": rounded} | make_store_bindings(store, False)


@dataclass(frozen=True)
class Split8(WeightUpdate):
    """w in two parts: the 16-bit parameter, nearest to w, and 8 bits below its last: the memory default.

    Both hold w to 2^-16 of its value (2^-19 in float16); the last bit is stored by stochastic rounding, so that no
    drift is lost on average.
    """

    name: ClassVar[str] = "split8"

    def check_store(self, store: Store) -> None:
        if store.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"weight_update 'split8' is for bfloat16 and float16 parameters, not {store.name} in float32 ones: "
                "use 'kahan'"
            )

    def describe_auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        return (("low_bits", torch.int8),)

    def list_random_bits_per_draw(self, store: Store) -> tuple[int, ...]:
        return (8 if store.name == "bf16" else 16,)

    def make_bindings(self, store: Store) -> dict[str, object]:
        """Return the device functions: on words for bfloat16, on units of the last place for float16."""
        is_bf16 = store.name == "bf16"
        pieces = {
            "read_weight": read_split8_weight if is_bf16 else read_fp16_split8_weight,
            "write_weight": write_split8_weight,
            "fill_weight": fill_split8_weight,
            "save_split8": store_bf16_split8_weight if is_bf16 else store_fp16_split8_weight,
            "NEAREST_DRAW": HALF_OF_8_BITS if is_bf16 else HALF_OF_16_BITS,
        }
        return pieces | make_store_bindings(store, False)


def read_split_weight(a0, a1, a2, a3, i):
    """Device function: (p << 16) + c as a float32."""
    shown = shl(weight_load(a0, i), SHIFT_16)
    w = ignore_low_bits_of_nonfinite_weight(
        real(sub(add(shown, bit_xor(load16(a1, i), SIGN_MASK_16)), SIGN_MASK_16)), real(shown)
    )
    return w, w, w, w


def ignore_low_bits_of_nonfinite_weight(w, shown):
    """Device function: a weight, or the parameter's value if stale low bits make it infinite or NaN."""
    # Beside a zero negative low bits would be a NaN's; beside an infinity positive ones; beside a NaN they may carry.
    return select(w - w == FLOAT32_ZERO, w, shown)


def write_split_weight(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1):
    """Device function: the word of the sum, cut after rounding its upper half."""
    new = rounded_sum(w, u, r0)
    fill_split_weight(a0, a1, a2, a3, i, new)
    return new


def fill_split_weight(a0, a1, a2, a3, i, value):
    """Device function: a float32, split exactly."""
    bits = word(value)
    weight_save(a0, i, shr(add(bits, HALF_OF_16_BITS), SHIFT_16))
    store16(a1, i, bits)


def round_sum_to_nearest(w, u, random):
    """Device function: w + u to nearest."""
    return w + u


def round_sum_stochastically(w, u, random):
    """Device function: w + u exactly (Knuth), then rounded stochastically to one of the two float32 around it."""
    # The chance is a whole number of 2^-16, and no chance at all below half of that: updates down to 2^-41 |w|.
    total, error = two_sum(w, u)
    bits = word(total)
    outwards = select((error < FLOAT32_ZERO) == (total < FLOAT32_ZERO), add(bits, ONE), sub(bits, ONE))
    gap = abs(real(outwards) - total)
    chance = (to_real(bit_and(random, LOW_16_MASK)) + FLOAT32_HALF) * TWO_TO_MINUS_16
    return select(chance * gap < abs(error), real(outwards), total)


def read_split8_weight(a0, a1, a2, a3, i):
    """Device function: (p << 16) + (c << 8) as a float32."""
    low = sub(bit_xor(load8(a1, i), SIGN_MASK_8), SIGN_MASK_8)
    shown = shl(weight_load(a0, i), SHIFT_16)
    w = ignore_low_bits_of_nonfinite_weight(real(add(shown, shl(low, SHIFT_8))), real(shown))
    return w, w, w, w


def write_split8_weight(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1):
    """Device function: the sum, whose 8 bits are rounded stochastically."""
    return save_split8(a0, a1, i, w + u, r0)


def fill_split8_weight(a0, a1, a2, a3, i, value):
    """Device function: what is nearest to a float32."""
    save_split8(a0, a1, i, value, NEAREST_DRAW)


def store_bf16_split8_weight(a0, a1, i, new, random):
    """Device function: the upper 24 bits of a float32, rounded by a random word."""
    bits = bit_and(add(word(new), random), TOP_24_MASK)
    weight_save(a0, i, shr(add(bits, HALF_OF_16_BITS), SHIFT_16))
    store8(a1, i, shr(bits, SHIFT_8))
    return real(bits)


def compute_fp16_low_bits_unit(p):
    """Device function: 2^-18 of the power of two at or below |p|."""
    exponent = bit_and(word(p), FLOAT32_EXPONENT_MASK)
    exponent = select(exponent > FP16_LEAST_EXPONENT, exponent, FP16_LEAST_EXPONENT)
    exponent = select(exponent < FLOAT32_TOP_EXPONENT, exponent, FLOAT32_TOP_EXPONENT)
    return real(sub(exponent, FP16_UNIT_EXPONENT_OFFSET))


def read_fp16_split8_weight(a0, a1, a2, a3, i):
    """Device function: p + c units."""
    p = weight_real(weight_load(a0, i))
    low = sub(bit_xor(load8(a1, i), SIGN_MASK_8), SIGN_MASK_8)
    w = p + to_real(low) * compute_fp16_low_bits_unit(p)
    return w, w, w, w


def store_fp16_split8_weight(a0, a1, i, new, random):
    """Device function: the nearest float16 to a float32, and what it misses in units, rounded by a random word."""
    code = weight_nearest(new, new)
    p = weight_real(code)
    unit = compute_fp16_low_bits_unit(p)
    units = (new - p) * (divide(FLOAT32_ONE, unit))
    units = select(units - units == FLOAT32_ZERO, units, FLOAT32_ZERO)
    units = select(units > LEAST_SIGNED_8, units, LEAST_SIGNED_8)
    units = select(units < LARGEST_SIGNED_8, units, LARGEST_SIGNED_8)
    biased = to_word(units + SIGNED_8_BIAS + to_real(bit_and(random, LOW_16_MASK)) * TWO_TO_MINUS_16)
    # 128 units are half a place: too many for a byte, so they become -128 beside the next number up, or -64 of the
    # next binade's, whose units are twice as large.
    up = sub(add(code, ONE), shl(shr(code, SHIFT_15), ONE))
    below = select(bit_and(up, FP16_SIGN_AND_FRACTION) == ZERO, QUARTER_OF_8_BITS, ZERO)
    below = select(up > FP16_LEAST_NORMAL, below, ZERO)
    code = select(biased > LOW_8_MASK, up, code)
    low = sub(select(biased > LOW_8_MASK, below, biased), SIGN_MASK_8)
    weight_save(a0, i, code)
    store8(a1, i, low)
    p = weight_real(code)
    return p + to_real(low) * compute_fp16_low_bits_unit(p)


@dataclass(frozen=True)
class SplitStochastic(Split16):
    """Split whose float32 sums are rounded stochastically: no update is too small for it, at split's two bytes.

    All of an update is kept on average, with noise of one float32 ulp a step: less than Kahan's, in as many bytes, down
    to |u|/|w| = 2^-25, and more below.
    """

    name: ClassVar[str] = "split-stochastic"
    stochastic: ClassVar[bool] = True


def Split(bits: int = 16, rounding: str | None = None) -> WeightUpdate:
    """Return a narrow parameter plus its low bits: 16 (exact float32 beside bfloat16) or 8 (stored stochastically).

    Args:
        bits: 16 or 8.
        rounding: of the sum, "nearest" or "stochastic" or the rounding object, for 16 bits; 8 are always stochastic.

    Raises:
        ValueError: other numbers of bits, or roundings.

    >>> Split(8)
    Split8()
    """
    if bits not in (8, 16):
        raise ValueError(f"Split(bits={bits!r}): allowed are 16 (exact float32, bfloat16 only) and 8")
    chosen = None if rounding is None else read_rounding_name(rounding)
    if bits == 16:
        return SplitStochastic() if chosen == "stochastic" else Split16()
    if chosen == "nearest":
        raise ValueError("Split(bits=8) is rounded stochastically, 8 bits to nearest would stall: leave rounding out")
    return Split8()


for _update in (Split16(), SplitStochastic(), Split8()):
    register_weight_update(_update)
