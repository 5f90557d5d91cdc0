"""The choice of a step's scales as device functions of float32 words: what `_scales` does, without a wait for numbers.

Scales are powers of two from 2^-126 to 2^127. Exponents are words too, 512 added, so that none is negative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...kernels._device_function import record_words
from ...kernels._trace import Piece
from ...kernels.scalar._operations import add, bit_and, select, shl, shr, sub, to_real, word
from ..states._scaled import Scaled
from ._scales import LARGEST_BINADE, WINDOWS, holds_the_rest

BIAS = 512
NONE, ONE, S23, MANTISSA, LEAST_NORMAL, HALF_OF_LEAST, WORD_OF_ONE = (
    np.uint32(n) for n in (0, 1, 23, 0x7FFFFF, 0x800000, 0x400000, 0x3F800000)
)
OF_NORMAL, OF_SUBNORMAL, OF_ONE = (np.uint32(BIAS + n) for n in (-127, -127 - 149, 0))
LOWEST, HIGHEST = np.uint32(BIAS - 126), np.uint32(BIAS + 126)


def normal(x: Any) -> Any:
    """Device function: the word of a positive number, or of it times 2^149 where it is subnormal."""
    return select(x < LEAST_NORMAL, word(to_real(x)), x)


def exponent(x: Any) -> Any:
    """Device function: floor(log2) of a positive number."""
    return add(shr(normal(x), S23), select(x < LEAST_NORMAL, OF_SUBNORMAL, OF_NORMAL))


def power(e: Any) -> Any:
    """Device function: the word of a power of two from 2^-127 to 2^127."""
    return select(e < LOWEST, HALF_OF_LEAST, shl(sub(e, OF_NORMAL), S23))


def inverse(scale: Any) -> Any:
    """Device function: the reciprocal of a scale."""
    return power(sub(np.uint32(2 * BIAS), exponent(scale)))


def lesser(a: Any, b: Any) -> Any:
    """Device function: the smaller of two words."""
    return select(a < b, a, b)


def larger(a: Any, b: Any) -> Any:
    """Device function: the larger of two words."""
    return select(a < b, b, a)


def ratio(present: Any, new: Any, stored: Any) -> Any:
    """Device function: the factor that brings a payload from one scale to another; 1 for a payload of zeros."""
    factor = larger(sub(add(exponent(present), OF_ONE), exponent(new)), LOWEST)
    return select(stored == NONE, WORD_OF_ONE, power(factor))


@functools.cache
def weight_scale_function(dtype: torch.dtype) -> Callable[[Any, Any, Any], Any]:
    """Return the device function (present scale, largest weight, largest payload) -> new scale of a payload's dtype."""
    lowest, highest, target = WINDOWS[dtype]
    first, last = np.uint32(BIAS + lowest), np.uint32(BIAS + highest)
    below, reach, wide = np.uint32(target), np.uint32(BIAS + LARGEST_BINADE), holds_the_rest(dtype)

    def new_scale(present: Any, largest: Any, stored: Any) -> Any:
        now, binade = exponent(present), exponent(largest)
        distance = sub(add(binade, OF_ONE), now)
        wanted = larger(lesser(sub(binade, below), HIGHEST), LOWEST)
        keeps = (largest == NONE) | ((distance >= first) & (distance <= last)) | (wanted == now)
        reached = larger(wanted, add(now, sub(larger(add(exponent(stored), ONE), OF_ONE), reach)))
        if wide:
            reached = lesser(reached, add(now, np.uint32(126)))
        reached = lesser(reached, HIGHEST)
        return select(keeps, present, power(select(stored == NONE, wanted, reached)))

    return new_scale


@functools.cache
def state_scale_function(codec: Scaled) -> Callable[[Any], Any]:
    """Return the device function from the largest magnitude of a state to its scale."""
    greatest = torch.finfo(codec.store.dtype).max
    fraction, above = math.frexp(greatest)
    digits, binade = np.float32(fraction).view(np.uint32) & MANTISSA, np.uint32(above - 1)

    def scale(largest: Any) -> Any:
        up = select(bit_and(normal(largest), MANTISSA) > digits, ONE, NONE)
        needed = sub(add(exponent(largest), up), binade)
        return select(largest == NONE, WORD_OF_ONE, power(larger(lesser(needed, HIGHEST), LOWEST)))

    return scale


def recorded(function: Callable[..., Any], words: int) -> Piece:
    """Return one of these device functions, recorded."""
    return record_words(function, *["w32"] * words)
