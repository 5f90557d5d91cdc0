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
from ._codec import TensorCodec, find_block_amax_word

CODEC_VERSION = 2


@dataclass(frozen=True)
class BlockCodec(TensorCodec):
    """The base of codes in blocks, each under a scale; of second moments where `is_second_moment`."""

    tensor_count: ClassVar[int] = 2
    random_word_for_nearest: ClassVar[int] = 0x8000
    random_bits: ClassVar[int] = 16

    block_length: int
    is_second_moment: bool

    @property
    def scale_block_length(self) -> int:
        """The number of elements in a block."""
        return self.block_length


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
        codes = torch.uint8 if self.is_second_moment else torch.int8
        scales = compute_scale_shape(shape, self.block_length)
        return {f"{name}_codes": (shape, codes), f"{name}_scale": (scales, torch.bfloat16)}

    def load_before_squaring(self, arrays: Sequence[Any], i: Any, block_index: Any) -> Any:
        """Device function: the float32 of element i before squaring; code -128 of a first moment is NaN."""
        codes, scales = arrays
        code, scale = load8(codes, i), real(shl(load16(scales, block_index), SHIFT_16))
        if self.is_second_moment:
            k = to_real(code)
            return k * k * k * INVERSE_UNSIGNED_CUBE * scale
        k = to_real(shl(code, SHIFT_24))  # times 2^24, as the sign is then the word's
        return select(k == LEAST_SHIFTED_CODE, NAN, k * k * k * INVERSE_SHIFTED_CUBE * scale)

    def store_before_squaring(self, arrays: Sequence[Any], i: Any, block_index: Any, root: Any, random: Any) -> None:
        """Device function: store element i, given before squaring, and the scale of its block."""
        codes, scales = arrays
        scale = encode_block_scale(find_block_amax_word(root))
        store16(scales, block_index, scale)
        inner = real(shl(scale, SHIFT_16))
        share = root * select(inner > ZERO, divide(UNIT, inner), UNIT)  # 1 for a block of zeros
        code = (
            encode_second_moment(share, root, random) if self.is_second_moment else encode_first_moment(share, random)
        )
        store8(codes, i, code)

    def load_element(self, arrays: Sequence[Any], i: Any, block_index: Any, tensor_scale: Any) -> Any:
        root = self.load_before_squaring(arrays, i, block_index)
        return root * root if self.is_second_moment else root

    def store_element(
        self, arrays: Sequence[Any], i: Any, block_index: Any, value: Any, inverse: Any, random: Any
    ) -> None:
        self.store_before_squaring(arrays, i, block_index, sqrt(value) if self.is_second_moment else value, random)


def compute_scale_shape(shape: torch.Size, block_length: int) -> torch.Size:
    """Return the shape of scales, in blocks along the last dimension where they divide it, else along dimension 0."""
    if len(shape) > 0 and shape[-1] % block_length == 0:
        return torch.Size([*shape[:-1], shape[-1] // block_length])
    row = prod(shape[1:])
    if len(shape) > 1 and row % block_length == 0:
        return torch.Size([shape[0], row // block_length])
    return torch.Size([-(-prod(shape) // block_length)])


NAN = np.float32("nan")
SHIFT_5, SHIFT_16, SHIFT_21, SHIFT_24 = (np.uint32(n) for n in (5, 16, 21, 24))
SIGN_MASK_32, ZERO_WORD, RANDOM_FRACTION_MASK = (np.uint32(n) for n in (0x80000000, 0, 0xFFFE))
# 128 and 2^-16, the last place of its binade, as a word.
FRACTION_BIAS, FRACTION_BIAS_WORD = np.float32(128), np.uint32(0x43000001)
ZERO, NEGATIVE_ZERO, UNIT, THREE = (np.float32(x) for x in (0.0, -0.0, 1.0, 3.0))
# Its last place is 1: a number added to it is rounded to nearest, and is the low byte of the sum's word.
ROUNDING_ADDEND = np.float32(1.5 * 2.0**23)
# LLVM adds it under a mask, and makes a 1 of the mask itself, which takes longer.
ONE_IN_LOW_BYTE = np.uint32(0x101)
LEAST_SHIFTED_CODE, INVERSE_SHIFTED_CUBE = np.float32(-(2.0**31)), np.float32(1 / 127**3) * np.float32(2.0**-72)
LARGEST_SIGNED_CUBE, LARGEST_UNSIGNED_CUBE = np.float32(127.0**3), np.float32(255.0**3)
INVERSE_UNSIGNED_CUBE = np.float32(1 / 255**3)
# Scales have three significant bits: finer ones move as their block decays, and all its codes are rounded again.
SCALE_ROUND_UP_ADDEND, LEAST_SCALE_CODE, LARGEST_SCALE_CODE = (
    np.uint32((1 << 21) - 1),
    np.uint32(0x0080),
    np.uint32(0x7F60),
)
INVERSE_CUBE_ROOT_START, ONE_THIRD_WORD = np.uint32(0x54A1B000), np.uint32(0x55555555)
CUBE_ROOT_FIT_0, CUBE_ROOT_FIT_1, CUBE_ROOT_FIT_2 = (np.float32(x) for x in (2.223406, -1.7760453, 0.55265582))
RESCALED_ROOT, RESCALED_SQUARE, DOWNSCALE_FACTOR, UPSCALE_FACTOR = (
    np.float32(x) for x in (2.0**60, 2.0**120, 2.0**-80, 2.0**80)
)


def approximate_cube_root_plus_offset(x, offset):
    """Device function: the cube root of 0 <= x < 2^24 within .05, plus an offset."""
    # Of an inverse root y, right within 4%, p = x y^3 is near 1, and x y^2 times p^(-2/3), a polynomial, the root.
    y = real(sub(INVERSE_CUBE_ROOT_START, multiply_packed_high16(word(x), ONE_THIRD_WORD)))
    near = x * (y * y)
    p = near * y
    factor = multiply_add(p, multiply_add(p, CUBE_ROOT_FIT_2, CUBE_ROOT_FIT_1), CUBE_ROOT_FIT_0)
    return multiply_add(near, factor, offset)


def make_biased_random_fraction(random):
    """Device function: 128 plus a number in (0, 1), an odd multiple of 2^-16, whose digits are the word's last bits."""
    # A chance is thus off by 2^-16 at most, and its sum with a code, of which 255 is the largest, is exact.
    return real(bit_or(bit_and(random, RANDOM_FRACTION_MASK), FRACTION_BIAS_WORD))


def make_random_fraction(random):
    """Device function: the number in (0, 1) alone."""
    return make_biased_random_fraction(random) - FRACTION_BIAS


# A code, the low byte of a word, rises at thresholds, one between each two cubes; the root of the j-th is at most .39
# above j + chance: the whole number nearest to a root less the chance is the code, or one less: one comparison tells.


def encode_first_moment(share_of_scale, random):
    """Device function: the signed code of a value in units of its block's scale; -128 for NaN."""
    x = abs(share_of_scale) * LARGEST_SIGNED_CUBE
    x = select(x < LARGEST_SIGNED_CUBE, x, LARGEST_SIGNED_CUBE)
    chance = make_random_fraction(random)
    raised = approximate_cube_root_plus_offset(x, -chance) + ROUNDING_ADDEND
    j = raised - ROUNDING_ADDEND
    square = j * j
    gap = multiply_add(square + j, THREE, UNIT)  # to the cube of the next whole number
    size = add(word(raised), select(chance * gap < multiply_add(square, -j, x), ONE_IN_LOW_BYTE, ZERO_WORD))
    size = add(size, select(share_of_scale == share_of_scale, ZERO_WORD, ONE_IN_LOW_BYTE))  # NaN gets 128
    return select(word(share_of_scale) >= SIGN_MASK_32, sub(ZERO_WORD, size), size)


def encode_second_moment(share_of_scale, root, random):
    """Device function: the unsigned code of a root in units of its block's scale; of a positive one never 0."""
    x = share_of_scale * LARGEST_UNSIGNED_CUBE
    x = select(x < LARGEST_UNSIGNED_CUBE, x, LARGEST_UNSIGNED_CUBE)
    x = select(root == ZERO, ZERO, select(x > UNIT, x, UNIT))
    biased = make_biased_random_fraction(random)
    raised = approximate_cube_root_plus_offset(x, -biased) + (ROUNDING_ADDEND + FRACTION_BIAS)
    t = (raised - (ROUNDING_ADDEND + FRACTION_BIAS)) + biased  # the code and the chance
    return word(raised + select(t * t * t < x, UNIT, NEGATIVE_ZERO))


def encode_block_scale(amax_word):
    """Device function: the bfloat16 code of the least scale not under a finite magnitude's word; 0 for 0."""
    code = shl(shr(add(amax_word, SCALE_ROUND_UP_ADDEND), SHIFT_21), SHIFT_5)
    code = select(code < LARGEST_SCALE_CODE, code, LARGEST_SCALE_CODE)
    code = select(code > LEAST_SCALE_CODE, code, LEAST_SCALE_CODE)
    return select(amax_word > ZERO_WORD, code, ZERO_WORD)
