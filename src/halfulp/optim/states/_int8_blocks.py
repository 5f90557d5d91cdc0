"""8-bit states in blocks: codes whose cubes are the values, beside a scale per block.

A magnitude is scale x (k / most)^3. The codes lie 1.2% (of 255) or 2.4% (of 127) apart at the block's largest value and
reach down to 6e-8 or 5e-7 of it. All cubes are below 2^24, so that float32 compares them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels._operations import (
    add,
    bit_and,
    bit_or,
    divide,
    load8,
    load16,
    multiply_add,
    multiply_packed_high16,
    real,
    select,
    shl,
    shr,
    sqrt,
    store8,
    store16,
    sub,
    to_real,
    word,
)
from ._codec import TensorCodec, find_largest_finite_magnitude_word

CODEC_VERSION = 2


@dataclass(frozen=True)
class BlockCodec(TensorCodec):
    """The base of codes in blocks, each under a scale; of second moments where `squared`."""

    columns: ClassVar[int] = 2
    random_word_for_nearest: ClassVar[int] = 0x8000
    random_bits: ClassVar[int] = 16

    block: int
    squared: bool

    @property
    def scale_block_length(self) -> int:
        """The number of elements in a block."""
        return self.block


class Int8Blocks(BlockCodec):
    """8-bit codes in blocks: value = scale x (code / 127)^3, or the square of scale x (code / 255)^3 (second moments).

    The scale is the block's largest finite magnitude, rounded up to three significant bits. Cubes give codes that lie
    close together where most values are, beside the largest, and still reach down to 5e-7 of it (6e-8 for roots).
    Codes are rounded stochastically, such that a first moment is right on average, and of a second moment the code,
    its sixth root: noise of v then leaves the mean of 1 / sqrt(v) as it is, by which the update is made. A positive
    second moment never gets code 0, which would divide by eps alone. An infinity is kept out of the scale and stored
    as the largest code; -128 is NaN.
    """

    def describe_tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        codes, scales = torch.uint8 if self.squared else torch.int8, compute_scale_shape(shape, self.block)
        return {f"{name}_codes": (shape, codes), f"{name}_scale": (scales, torch.bfloat16)}

    def load_unsquared(self, arrays: Sequence[Any], i: Any, block: Any) -> Any:
        """Device function: the float32 of element i before squaring; code -128 of a first moment is NaN."""
        codes, scales = arrays
        code, scale = load8(codes, i), real(shl(load16(scales, block), SHIFT_16))
        if self.squared:
            k = to_real(code)
            return k * k * k * INVERSE_UNSIGNED_CUBE * scale
        k = to_real(shl(code, SHIFT_24))  # times 2^24, as the sign is then the word's
        return select(k == LEAST_SHIFTED_CODE, NAN, k * k * k * INVERSE_SHIFTED_CUBE * scale)

    def save_unsquared(self, arrays: Sequence[Any], i: Any, block: Any, root: Any, random: Any) -> None:
        """Device function: store element i, given before squaring, and the scale of its block."""
        codes, scales = arrays
        scale = encode_scale(find_largest_finite_magnitude_word(root))
        store16(scales, block, scale)
        inner = real(shl(scale, SHIFT_16))
        share = root * select(inner > ZERO, divide(UNIT, inner), UNIT)  # 1 for a block of zeros
        store8(codes, i, encode_root(share, root, random) if self.squared else encode_signed(share, random))

    def load(self, arrays: Sequence[Any], i: Any, block: Any, scale: Any) -> Any:
        root = self.load_unsquared(arrays, i, block)
        return root * root if self.squared else root

    def save(self, arrays: Sequence[Any], i: Any, block: Any, value: Any, inverse: Any, random: Any) -> None:
        self.save_unsquared(arrays, i, block, sqrt(value) if self.squared else value, random)


def compute_scale_shape(shape: torch.Size, block: int) -> torch.Size:
    """Return the shape of scales, in blocks along the last dimension where they divide it, else along dimension 0."""
    if len(shape) > 0 and shape[-1] % block == 0:
        return torch.Size([*shape[:-1], shape[-1] // block])
    row = prod(shape[1:])
    if len(shape) > 1 and row % block == 0:
        return torch.Size([shape[0], row // block])
    return torch.Size([-(-prod(shape) // block)])


NAN = np.float32("nan")
SHIFT_5, SHIFT_16, SHIFT_21, SHIFT_24 = (np.uint32(n) for n in (5, 16, 21, 24))
SIGN_MASK_32, ZERO_WORD, CHANCE_BITS_MASK = (np.uint32(n) for n in (0x80000000, 0, 0xFFFE))
# 128 and 2^-16, the last place of its binade, as a word.
CHANCE_BIAS, CHANCE_BIAS_WORD = np.float32(128), np.uint32(0x43000001)
ZERO, NEGATIVE_ZERO, UNIT, THREE = (np.float32(x) for x in (0.0, -0.0, 1.0, 3.0))
# Its last place is 1: a number added to it is rounded to nearest, and is the low byte of the sum's word.
MAGIC = np.float32(1.5 * 2.0**23)
# LLVM adds it under a mask, and makes a 1 of the mask itself, which takes longer.
ONE_IN_LOW_BYTE = np.uint32(0x101)
LEAST_SHIFTED_CODE, INVERSE_SHIFTED_CUBE = np.float32(-(2.0**31)), np.float32(1 / 127**3) * np.float32(2.0**-72)
LARGEST_SIGNED_CUBE, LARGEST_UNSIGNED_CUBE = np.float32(127.0**3), np.float32(255.0**3)
INVERSE_UNSIGNED_CUBE = np.float32(1 / 255**3)
# Scales have three significant bits: finer ones move as their block decays, and all its codes are rounded again.
BELOW_SCALE_STEP, LEAST_SCALE_CODE, LARGEST_SCALE_CODE = np.uint32((1 << 21) - 1), np.uint32(0x0080), np.uint32(0x7F60)
INVERSE_ROOT_START, THIRD_OF_WORD = np.uint32(0x54A1B000), np.uint32(0x55555555)
ROOT_COEFFICIENT_0, ROOT_COEFFICIENT_1, ROOT_COEFFICIENT_2 = (np.float32(x) for x in (2.223406, -1.7760453, 0.55265582))
HUGE_ROOT, HUGE_SQUARE, SHRINK_FACTOR, GROW_FACTOR = (np.float32(x) for x in (2.0**60, 2.0**120, 2.0**-80, 2.0**80))


def approximate_cube_root(x, offset):
    """Device function: the cube root of 0 <= x < 2^24 within .05, plus an offset."""
    # Of an inverse root y, right within 4%, p = x y^3 is near 1, and x y^2 times p^(-2/3), a polynomial, the root.
    y = real(sub(INVERSE_ROOT_START, multiply_packed_high16(word(x), THIRD_OF_WORD)))
    near = x * (y * y)
    p = near * y
    factor = multiply_add(p, multiply_add(p, ROOT_COEFFICIENT_2, ROOT_COEFFICIENT_1), ROOT_COEFFICIENT_0)
    return multiply_add(near, factor, offset)


def make_biased_random_fraction(random):
    """Device function: 128 plus a number in (0, 1), an odd multiple of 2^-16, whose digits are the word's last bits."""
    # A chance is thus off by 2^-16 at most, and its sum with a code, of which 255 is the largest, is exact.
    return real(bit_or(bit_and(random, CHANCE_BITS_MASK), CHANCE_BIAS_WORD))


def make_random_fraction(random):
    """Device function: the number in (0, 1) alone."""
    return make_biased_random_fraction(random) - CHANCE_BIAS


# A code, the low byte of a word, rises at thresholds, one between each two cubes; the root of the j-th is at most .39
# above j + chance: the whole number nearest to a root less the chance is the code, or one less: one comparison tells.


def encode_signed(value, random):
    """Device function: the signed code of a value in units of its block's scale; -128 for NaN."""
    x = abs(value) * LARGEST_SIGNED_CUBE
    x = select(x < LARGEST_SIGNED_CUBE, x, LARGEST_SIGNED_CUBE)
    chance = make_random_fraction(random)
    raised = approximate_cube_root(x, -chance) + MAGIC
    j = raised - MAGIC
    square = j * j
    gap = multiply_add(square + j, THREE, UNIT)  # to the cube of the next whole number
    size = add(word(raised), select(chance * gap < multiply_add(square, -j, x), ONE_IN_LOW_BYTE, ZERO_WORD))
    size = add(size, select(value == value, ZERO_WORD, ONE_IN_LOW_BYTE))  # NaN's x is the largest, its size 128
    return select(word(value) >= SIGN_MASK_32, sub(ZERO_WORD, size), size)


def encode_root(value, root, random):
    """Device function: the unsigned code of a root in units of its block's scale; of a positive one never 0."""
    x = value * LARGEST_UNSIGNED_CUBE
    x = select(x < LARGEST_UNSIGNED_CUBE, x, LARGEST_UNSIGNED_CUBE)
    x = select(root == ZERO, ZERO, select(x > UNIT, x, UNIT))
    biased = make_biased_random_fraction(random)
    raised = approximate_cube_root(x, -biased) + (MAGIC + CHANCE_BIAS)
    t = (raised - (MAGIC + CHANCE_BIAS)) + biased  # the code and the chance
    return word(raised + select(t * t * t < x, UNIT, NEGATIVE_ZERO))


def encode_scale(top):
    """Device function: the bfloat16 code of the least scale not under a finite magnitude's word; 0 for 0."""
    code = shl(shr(add(top, BELOW_SCALE_STEP), SHIFT_21), SHIFT_5)
    code = select(code < LARGEST_SCALE_CODE, code, LARGEST_SCALE_CODE)
    code = select(code > LEAST_SCALE_CODE, code, LEAST_SCALE_CODE)
    return select(top > ZERO_WORD, code, ZERO_WORD)
