"""4-bit states in blocks (Li, Chen and Zhu, arXiv 2309.01507): two codes per byte, beside a float32 scale per block.

First moments have the paper's signed dynamic exponent map: behind the sign, e zeros and a one are the power 10^-e, and
the f bits behind the one count the midpoints of 2^f equal parts of [0.1, 1]. Its sixteen numbers are 0, 1 and

    +- 0.0055    +- 0.0325  +- 0.0775    +- 0.2125  +- 0.4375  +- 0.6625  +- 0.8875.

Second moments have its linear map without zero, (k + 1) / 16: a zero would divide by eps alone. Both are torchao's
(`torchao.optim.AdamW4bit`), which divides by the largest magnitude and rounds to the nearest code. The map has no -1:
the largest number of a block, if it is negative, is there 0.8875 of itself after each step, so that of a steady
gradient g the momentum m = 0.8875 (0.9 m + 0.1 g) settles at 44% of g. Here the scale is the least under which all
numbers fit between -0.8875 and 1. The paper normalizes second moments of matrices by rows and columns ("rank-1"), which
needs sums over all ranks of a sharded tensor and is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...kernels._operations import (
    add,
    bit_and,
    divide,
    load4,
    load32,
    real,
    select,
    store4,
    store32,
    sub,
    to_real,
    to_word,
    word,
)
from ...kernels._trace import block_largest
from .._storage import CANONICAL_NAN, EXPONENT_MASK, MAGNITUDE_MASK
from ._int8_blocks import BlockCodec, compute_scale_shape, make_random_fraction


class Int4Blocks(BlockCodec):
    """4-bit codes in blocks: value = scale x map(code), of first moments signed, of second ones above zero.

    The scale is the least that the block's finite numbers fit under, to the last digit: while a block only decays,
    every code stays. Codes are rounded stochastically, so that a moment is right on average; but a second moment below
    1/16 of the block's largest is raised to it. Infinities are kept out of the scale and stored as the largest code.
    There is no code for NaN: the scale is NaN, and the whole block with it.
    """

    def describe_tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        codes, scales = compute_scale_shape(shape, 2), compute_scale_shape(shape, self.block_length)
        return {f"{name}_packed": (codes, torch.uint8), f"{name}_scale": (scales, torch.float32)}

    def make_trace_inputs(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor | float]:
        """Return a tensor that has an element where codes are half a byte."""
        codes = tensors[0]
        return {"elements": codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]))}

    def load_element(self, arrays: Sequence[Any], i: Any, block_index: Any, tensor_scale: Any) -> Any:
        codes, scales = arrays
        code = load4(codes, i)
        number = to_real(add(code, ONE)) * SIXTEENTH if self.is_second_moment else decode_first_moment(code)
        return number * real(load32(scales, block_index))

    def store_element(
        self, arrays: Sequence[Any], i: Any, block_index: Any, value: Any, inverse: Any, random: Any
    ) -> None:
        codes, scales = arrays
        # The least scale under which a number fits into the signed map.
        needed = value if self.is_second_moment else select(value < ZERO, value * INVERSE_LARGEST_NEGATIVE, value)
        largest = block_largest(find_finite_magnitude_or_nan_word(needed))
        largest = select(largest < LEAST_NORMAL_WORD, ZERO_WORD, largest)  # smaller ones have no inverse
        store32(scales, block_index, largest)
        scale = real(largest)
        share = value * select(scale > ZERO, divide(UNIT, scale), UNIT)
        encode = encode_second_moment if self.is_second_moment else encode_first_moment
        store4(codes, i, encode(share, make_random_fraction(random)))


ZERO, UNIT, SIXTEEN, SIXTEENTH = (np.float32(x) for x in (0.0, 1.0, 16.0, 0.0625))
ZERO_WORD, ONE, TWO, FOUR, SEVEN, EIGHT = (np.uint32(n) for n in (0, 1, 2, 4, 7, 8))
LEAST_NORMAL_WORD = np.uint32(0x00800000)
# Positive numbers of the signed map: 10^-e times the midpoints, then 1, which has the code of a negative zero.
SIGNED_MAGNITUDES = tuple(np.float32(x) for x in (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875))
LARGEST_NEGATIVE_MAGNITUDE, INVERSE_LARGEST_NEGATIVE = SIGNED_MAGNITUDES[-1], np.float32(1 / 0.8875)


def find_finite_magnitude_or_nan_word(x):
    """Device function: the word of |x|, 0 for infinities; of NaN the largest, so that a block knows of one."""
    magnitude = bit_and(word(x), MAGNITUDE_MASK)
    finite = select(magnitude < EXPONENT_MASK, magnitude, ZERO_WORD)
    return select(magnitude > EXPONENT_MASK, CANONICAL_NAN, finite)


def decode_first_moment(code):
    """Device function: the number of a code of the signed map."""
    by_first, by_second = bit_and(code, ONE) > ZERO_WORD, bit_and(code, TWO) > ZERO_WORD
    pairs = [select(by_first, high, low) for low, high in zip((ZERO, *SIGNED_MAGNITUDES[1::2]), SIGNED_MAGNITUDES[::2])]
    small, large = select(by_second, pairs[1], pairs[0]), select(by_second, pairs[3], pairs[2])
    magnitude = select(bit_and(code, FOUR) > ZERO_WORD, large, small)
    return select(code == EIGHT, UNIT, select(code > SEVEN, -magnitude, magnitude))


def encode_first_moment(share, chance):
    """Device function: the code of one of the two numbers of the signed map around a share of the scale."""
    is_positive, x = share > ZERO, abs(share)
    x = select(is_positive | (x < LARGEST_NEGATIVE_MAGNITUDE), x, LARGEST_NEGATIVE_MAGNITUDE)
    size, low, gap = ZERO_WORD, ZERO, SIGNED_MAGNITUDES[0]
    for number, (magnitude, above) in enumerate(zip(SIGNED_MAGNITUDES, (*SIGNED_MAGNITUDES[1:], UNIT)), 1):
        is_reached = x >= magnitude
        size = select(is_reached, np.uint32(number), size)
        low, gap = select(is_reached, magnitude, low), select(is_reached, above - magnitude, gap)
    size = add(size, select(chance * gap < x - low, ONE, ZERO_WORD))
    return select(is_positive | (size == ZERO_WORD), size, add(size, EIGHT))


def encode_second_moment(share, chance):
    """Device function: the code of one of the two numbers of the linear map around a share of the scale."""
    x = share * SIXTEEN
    x = select(x < SIXTEEN, x, SIXTEEN)
    count = to_word(select(x > ZERO, x, ZERO) + chance)
    return sub(select(count > ONE, count, ONE), ONE)
