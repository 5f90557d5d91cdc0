"""Pieces of the kernel that count a sample in a block format."""

# ruff: noqa: F821  names of types are bound when the kernel is compiled
from __future__ import annotations

import numpy as np

from ...kernels.scalar._operations import (
    add,
    bit_and,
    divide,
    load32,
    load64,
    real,
    real64,
    shr,
    store64,
    word64,
)
from ...rounding._device_functions import choose
from ._candidates import (
    BLOCK,
    FIRST,
    GREATEST,
    HAS_TENSOR_SCALE,
    INFINITY,
    LARGEST,
    NONZERO,
    NORMAL,
    POWERS,
    RAISES,
    SCALE_BITS,
    SCALE_EMIN,
    SCALE_MAX,
    SCALE_TINY,
    SECOND,
    SMALLEST,
)

ZERO, ONE = np.uint32(0), np.uint32(1)
MAGNITUDE, INFINITE, NORMALS, FIELD = np.uint32(0x7FFFFFFF), np.uint32(INFINITY), np.uint32(0x800000), np.uint32(23)
HALF_EVEN = 6755399441055744.0  # added and taken off, rounds a float64 below 2^51 to an integer, ties to even


def bump(integers, k, by):
    """Piece: add to an int64 in memory."""
    store64(integers, k, widen64(signed64(load64(integers, k)) + by))


def in_blocks(sample, taken, blocks, k, integers, at):
    """Piece: the same of one block format, of the blocks whose elements are all finite."""
    size = int(blocks[k, BLOCK])
    unit, tensor = blocks[k, LARGEST], 1.0
    if blocks[k, HAS_TENSOR_SCALE] > 0:
        tensor = tensor_scale_of(sample, taken, size, blocks[k, LARGEST], blocks[k, SCALE_MAX])
        unit = float64(float32(float32(tensor) * float32(blocks[k, LARGEST])))
    z, n = blocks[k, NONZERO], blocks[k, NORMAL]
    counted = zeros = subnormal = hidden = 0
    start = 0
    while start < taken:
        end = min(start + size, taken)
        top = block_top(sample, start, end)
        if top < INFINITE:
            if blocks[k, POWERS] > 0:
                inverse = power_of_two(-exponent_of_scale(top, blocks, k))
                under, small = times_power(sample, start, end, inverse, z, n)
                shown = float64(real(top)) * inverse >= z
            else:
                scale = float32(rounded_scale(float64(divide(real(top), float32(unit))), blocks, k))
                scale = scale * float32(tensor)
                under, small = over_scale(sample, start, end, scale, float32(z), float32(n))
                shown = divide(real(top), scale) >= float32(z)
            counted += end - start
            zeros += int(under)
            subnormal += int(small)
            if shown:
                hidden += int(under)
        start = end
    bump(integers, at, counted)
    bump(integers, at + 1, zeros)
    bump(integers, at + 2, subnormal)
    bump(integers, at + 3, hidden)


def times_power(sample, start, end, inverse, nonzero, normal):
    """Piece: payloads below two thresholds in a block, under a power of two."""
    under, small = ZERO, ZERO
    for i in range(start, end):
        p = float64(real(bit_and(load32(sample, i), MAGNITUDE))) * inverse
        under = add(under, choose((p > 0.0) & (p < nonzero), ONE, ZERO))
        small = add(small, choose((p >= nonzero) & (p < normal), ONE, ZERO))
    return under, small


def over_scale(sample, start, end, scale, nonzero, normal):
    """Piece: the same under any scale, by quotients rounded to float32."""
    under, small = ZERO, ZERO
    for i in range(start, end):
        a = bit_and(load32(sample, i), MAGNITUDE)
        p = divide(real(a), scale)
        under = add(under, choose((a > ZERO) & (p < nonzero), ONE, ZERO))
        small = add(small, choose((p >= nonzero) & (p < normal), ONE, ZERO))
    return under, small


def block_top(sample, start, end):
    """Piece: the largest magnitude of a block as a word, among which NaN is the largest."""
    top = ZERO
    for i in range(start, end):
        a = bit_and(load32(sample, i), MAGNITUDE)
        top = choose(a > top, a, top)
    return top


def tensor_scale_of(sample, taken, size, element_max, scale_max):
    """Piece: float32's amax / (largest element x largest scale) over finite blocks, at least 2^-126."""
    best = ZERO
    start = 0
    while start < taken:
        end = min(start + size, taken)
        top = block_top(sample, start, end)
        if (top < INFINITE) & (top > best):
            best = top
        start = end
    scale = float64(divide(real(best), float32(element_max * scale_max)))
    return max(scale, SMALLEST_NORMAL)


def exponent_of_scale(top, blocks, k):
    """Piece: the exponent of a block's power-of-two scale: e - first + (f >= second) for amax = 2^e (1 + f)."""
    lowest, highest = int(blocks[k, SMALLEST]), int(blocks[k, GREATEST])
    if top == ZERO:
        return lowest
    a, e = top, int(shr(top, FIELD)) - 127
    if top < NORMALS:
        e = -126
        while a < NORMALS:
            a = add(a, a)
            e -= 1
    f = int(bit_and(a, np_uint32(0x7FFFFF)))
    e = e - int(blocks[k, FIRST]) + (1 if f >= int(blocks[k, SECOND]) else 0)
    return min(max(e, lowest), highest)


def power_of_two(e):
    """Piece: 2^e in float64, for a normal result."""
    return real64(widen64((e + 1023) << 52))


def rounded_scale(q, blocks, k):
    """Piece: a positive quotient rounded to the scales' format, within its range."""
    e = int((signed64(word64(q)) >> 52) & 0x7FF) - 1023
    step = max(e, int(blocks[k, SCALE_EMIN])) - int(blocks[k, SCALE_BITS])
    units = q * power_of_two(-step)
    whole = (units + HALF_EVEN) - HALF_EVEN
    if (blocks[k, RAISES] > 0) & (whole < units):
        whole += 1.0
    elif (blocks[k, RAISES] > 0) & (whole - 1.0 >= units):
        whole -= 1.0
    return min(max(whole * power_of_two(step), blocks[k, SCALE_TINY]), blocks[k, SCALE_MAX])
