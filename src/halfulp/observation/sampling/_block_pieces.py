"""Pieces of the kernel that count a sample in a block format."""

# ruff: noqa: F821  names of types are bound when the kernel is compiled
from __future__ import annotations

import numpy as np

from ...kernels.scalar._operations import (
    add,
    amax16x32,
    bit_and,
    divide,
    load32,
    load64,
    real,
    real64,
    shr,
    store64,
    under16,
    under_quotients16,
    word,
    word64,
)
from ...rounding._device_functions import choose
from ._candidates import (
    BLOCK,
    BLOCK_NUMBERS,
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
HALF, SIXTEEN, UPPER = np.uint32(0xFFFF), np.uint32(16), np.uint32(1 << 16)
HALF_EVEN = 6755399441055744.0  # added and taken off, rounds a float64 below 2^51 to an integer, ties to even


def bump(integers, k, by):
    """Piece: add to an int64 in memory."""
    store64(integers, k, widen64(signed64(load64(integers, k)) + by))


def number(blocks, k, column):
    """Piece: a number of the k-th block format."""
    return real64(load64(blocks, BLOCK_NUMBERS * k + column))


def in_blocks(sample, taken, blocks, k, integers, at):
    """Piece: the same of one block format, of the blocks whose elements are all finite."""
    if number(blocks, k, POWERS) > 0:
        counted, zeros, subnormal, hidden = under_powers(sample, taken, blocks, k)
    else:
        counted, zeros, subnormal, hidden = under_scales(sample, taken, blocks, k)
    bump(integers, at, counted)
    bump(integers, at + 1, zeros)
    bump(integers, at + 2, subnormal)
    bump(integers, at + 3, hidden)


def under_powers(sample, taken, blocks, k):
    """Piece: elements of finite blocks, those that become zero or subnormal, and zeros in blocks whose largest stays.

    Under a power of two the thresholds are as exact as the payloads, and one word tells whether an element is below.
    """
    size, z, n = int(number(blocks, k, BLOCK)), number(blocks, k, NONZERO), number(blocks, k, NORMAL)
    shift, second = int(number(blocks, k, FIRST)), int(number(blocks, k, SECOND))
    lowest, highest = int(number(blocks, k, SMALLEST)), int(number(blocks, k, GREATEST))
    counted = zeros = subnormal = hidden = start = 0
    while start < taken:
        end = min(start + size, taken)
        top = block_top(sample, start, end)
        if top < INFINITE:
            power = power_of_two(exponent_of_scale(top, shift, second, lowest, highest))
            nonzero, normal = word_from(z * power), word_from(n * power)
            found = under_words(sample, start, end, nonzero, normal)
            under = int(bit_and(found, HALF))
            counted += end - start
            zeros += under
            subnormal += int(shr(found, SIXTEEN))
            hidden += under if top >= nonzero else 0
        start = end
    return counted, zeros, subnormal, hidden


def under_scales(sample, taken, blocks, k):
    """Piece: the same under any scale, by quotients rounded to float32."""
    size, z, n = int(number(blocks, k, BLOCK)), float32(number(blocks, k, NONZERO)), float32(number(blocks, k, NORMAL))
    bits, lowest = int(number(blocks, k, SCALE_BITS)), int(number(blocks, k, SCALE_EMIN))
    tiny, largest, raises = number(blocks, k, SCALE_TINY), number(blocks, k, SCALE_MAX), number(blocks, k, RAISES) > 0
    unit, tensor = number(blocks, k, LARGEST), 1.0
    if number(blocks, k, HAS_TENSOR_SCALE) > 0:
        tensor = tensor_scale_of(sample, taken, size, unit, largest)
        unit = float64(float32(float32(tensor) * float32(unit)))
    counted = zeros = subnormal = hidden = start = 0
    while start < taken:
        end = min(start + size, taken)
        top = block_top(sample, start, end)
        if top < INFINITE:
            quotient = float64(divide(real(top), float32(unit)))
            scale = float32(rounded_scale(quotient, bits, lowest, tiny, largest, raises))
            scale = scale * float32(tensor)
            found = over_scale(sample, start, end, scale, z, n)
            under = int(bit_and(found, HALF))
            counted += end - start
            zeros += under
            subnormal += int(shr(found, SIXTEEN))
            hidden += under if divide(real(top), scale) >= z else 0
        start = end
    return counted, zeros, subnormal, hidden


def word_from(x):
    """Piece: the word of the smallest float32 that is at least a positive float64; above all, infinity's."""
    near = float32(x)
    return add(word(near), choose(float64(near) < x, ONE, ZERO))


def under_words(sample, start, end, nonzero, normal):
    """Piece: nonzero magnitudes of a block below one word, and times 2^16 those from there to below another one."""
    found = ZERO
    whole = start + (end - start) // 16 * 16
    for i in range(start, whole, 16):
        found = add(found, under16(sample, i, nonzero, normal))
    for i in range(whole, end):
        a = bit_and(load32(sample, i), MAGNITUDE)
        found = add(found, choose((a > ZERO) & (a < nonzero), ONE, ZERO))
        found = add(found, choose((a >= nonzero) & (a < normal), UPPER, ZERO))
    return found


def over_scale(sample, start, end, scale, nonzero, normal):
    """Piece: the same of quotients by a scale, rounded to float32."""
    found = ZERO
    whole = start + (end - start) // 16 * 16
    for i in range(start, whole, 16):
        found = add(found, under_quotients16(sample, i, scale, nonzero, normal))
    for i in range(whole, end):
        a = bit_and(load32(sample, i), MAGNITUDE)
        p = divide(real(a), scale)
        found = add(found, choose((a > ZERO) & (p < nonzero), ONE, ZERO))
        found = add(found, choose((p >= nonzero) & (p < normal), UPPER, ZERO))
    return found


def block_top(sample, start, end):
    """Piece: the largest magnitude of a block as a word, among which NaN is the largest."""
    top = ZERO
    whole = start + (end - start) // 16 * 16
    for i in range(start, whole, 16):
        a = amax16x32(sample, i)
        top = choose(a > top, a, top)
    for i in range(whole, end):
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


def exponent_of_scale(top, shift, second, lowest, highest):
    """Piece: the exponent of a block's power-of-two scale: e - shift + (f >= second) for amax = 2^e (1 + f)."""
    if top == ZERO:
        return lowest
    a, e = top, int(shr(top, FIELD)) - 127
    if top < NORMALS:
        e = -126
        while a < NORMALS:
            a = add(a, a)
            e -= 1
    f = int(bit_and(a, np_uint32(0x7FFFFF)))
    e = e - shift + (1 if f >= second else 0)
    return min(max(e, lowest), highest)


def power_of_two(e):
    """Piece: 2^e in float64, for a normal result."""
    return real64(widen64((e + 1023) << 52))


def rounded_scale(q, bits, lowest, tiny, largest, raises):
    """Piece: a positive quotient rounded to the scales' format, within its range."""
    e = int((signed64(word64(q)) >> 52) & 0x7FF) - 1023
    step = max(e, lowest) - bits
    units = q * power_of_two(-step)
    whole = (units + HALF_EVEN) - HALF_EVEN
    if raises:
        if whole < units:
            whole += 1.0
        elif whole - 1.0 >= units:
            whole -= 1.0
    return min(max(whole * power_of_two(step), tiny), largest)
