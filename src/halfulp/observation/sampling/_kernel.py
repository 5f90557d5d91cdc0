"""The compiled twin: one pass over each whole tensor for its extremes, and its sample copied and counted."""

# ruff: noqa: F821  load_word and load_magnitude are bound when the kernel is compiled
from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from ...kernels import compile_kernel
from ...kernels.scalar._operations import (
    add,
    bit_and,
    load16,
    load32,
    load64,
    prefetch,
    real,
    real64,
    shr,
    store32,
    store64,
    sub,
    word64,
)
from ...rounding._device_functions import bfloat16_word, choose, float16_word
from ...rounding._random_bits import WEYL, draw, stream_start
from ._block_pieces import FIELD, INFINITE, MAGNITUDE, NORMALS, ONE, ZERO, bump, in_blocks
from ._candidates import INFINITY
from ._sample_places import MOST, RUN, RUNS
from ._totals import AMAX, AMIN, FIXED, LAST_AMAX, LAST_FINITE, SQUARES, STEP_NONFINITE

# Columns of the table.
DATA, COUNT, KEY, SAMPLE, INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD, TAKEN, WIDE, FRESH, BROKEN = range(12)
COLUMNS = 12
ONES, HALF_MAGNITUDE = np.uint32(0xFFFFFFFF), np.uint32(0x7FFF)
CHUNK = 2048
# Bytes of a cache line, and elements of tensors that no longer lie in the caches, whose lines are asked for ahead.
LINE, LARGE = 64, 1 << 17
SIGNATURE = "int64(int64, int64, int64[:,::1], int64[:,::1], float64[:,::1])"


def look(first, last, table, thresholds, blocks):
    """Kernel: count the tensors of the rows [first, last), and write their samples.

    Returns how many elements are not finite in the last row's tensors of this step.
    """
    broken = 0
    for row in range(first, last):
        data, count = table[row, DATA], table[row, COUNT]
        sample, integers, reals = table[row, SAMPLE], table[row, INTEGERS], table[row, REALS_AT]
        if table[row, FRESH] != 0:
            begin_step(integers, reals)
            table[row, FRESH] = 0
        extremes(data, count, low_of(table[row, LARGEST_WORD]), low_of(table[row, INFINITE_WORD]), integers, reals)
        taken = gather(data, count, low_of(table[row, KEY]), high_of(table[row, KEY]), sample)
        table[row, TAKEN] = taken
        if table[row, WIDE] != 0:
            widen_sample(sample, taken, min(count, MOST), table[row, WIDE])
        broken = signed64(load64(integers, STEP_NONFINITE))
        table[row, BROKEN] = broken
        bump(integers, 4, taken)
        at = FIXED + 3 * thresholds.shape[0] + 4 * blocks.shape[0]
        zeros, finite = histogram(sample, taken, integers, at, reals)
        for k in range(thresholds.shape[0]):
            nonzero, normal, over = thresholds[k, 0], thresholds[k, 1], thresholds[k, 2]
            singles(sample, taken, nonzero, normal, over, zeros, finite, integers, FIXED + 3 * k)
        for k in range(blocks.shape[0]):
            in_blocks(sample, taken, blocks, k, integers, FIXED + 3 * thresholds.shape[0] + 4 * k)
    return broken


def copy_samples(first, last, table):
    """Kernel: write the samples of the rows [first, last) alone."""
    for row in range(first, last):
        count, sample = table[row, COUNT], table[row, SAMPLE]
        taken = gather(table[row, DATA], count, low_of(table[row, KEY]), high_of(table[row, KEY]), sample)
        table[row, TAKEN] = taken
        if table[row, WIDE] != 0:
            widen_sample(sample, taken, min(count, MOST), table[row, WIDE])


def low_of(value):
    """Piece: the low word of an integer of the table."""
    return np_uint32(value)


def high_of(value):
    """Piece: the high word of an integer of the table."""
    return np_uint32(value >> 32)


def begin_step(integers, reals):
    """Piece: forget what only the last sampled step counts."""
    store64(integers, STEP_NONFINITE, widen64(0))
    store64(reals, LAST_AMAX, word64(0.0))
    store64(reals, SQUARES, word64(0.0))
    store64(reals, LAST_FINITE, word64(0.0))


def widen_sample(sample, taken, room, wide):
    """Piece: a sample as float64, with zeros where a short last run leaves some of its room free."""
    for i in range(taken):
        store64(wide, i, word64(float64(real(load32(sample, i)))))
    for i in range(taken, room):
        store64(wide, i, word64(0.0))


def extremes(data, count, largest, infinite, integers, reals):
    """Piece: zeros, NaN and infinities, elements at the largest magnitude, and extreme magnitudes of a tensor."""
    zeros = nonfinite = at_largest = 0
    top, low = ZERO, ONES
    for start in range(0, count, CHUNK):
        end = min(start + CHUNK, count)
        if count >= LARGE:
            for line in range(ahead(data, start), ahead(data, end), LINE):
                prefetch(line)
        z, high, least = extremes_of_chunk(data, start, end)
        if high >= largest:
            n, m, high = beyond_chunk(data, start, end, largest, infinite)
            nonfinite += int(n)
            at_largest += int(m)
        zeros += int(z)
        top, low = choose(high > top, high, top), choose(least < low, least, low)
    bump(integers, 0, count)
    bump(integers, 1, zeros)
    bump(integers, 2, nonfinite)
    bump(integers, 3, at_largest)
    bump(integers, 5, nonfinite)
    amax = float64(real(value_word(top)))
    if amax > real64(load64(reals, AMAX)):
        store64(reals, AMAX, word64(amax))
    if amax > real64(load64(reals, LAST_AMAX)):
        store64(reals, LAST_AMAX, word64(amax))
    if low < sub(infinite, ONE):
        amin = float64(real(value_word(add(low, ONE))))
        if amin < real64(load64(reals, AMIN)):
            store64(reals, AMIN, word64(amin))


def extremes_of_chunk(data, start, end):
    """Piece: zeros, and the largest word of magnitudes; of the smallest nonzero one less than its word."""
    zeros, top, low = ZERO, ZERO, ONES
    for i in range(start, end):
        a = load_magnitude(data, i)
        zeros = add(zeros, choose(a == ZERO, ONE, ZERO))
        top = choose(a > top, a, top)
        nonzero = sub(a, ONE)  # zero becomes the largest word of all
        low = choose(nonzero < low, nonzero, low)
    return zeros, top, low


def beyond_chunk(data, start, end, largest, infinite):
    """Piece: NaN and infinities, elements at the largest magnitude, and the largest finite one."""
    nonfinite, at_largest, top = ZERO, ZERO, ZERO
    for i in range(start, end):
        a = load_magnitude(data, i)
        nonfinite = add(nonfinite, choose(a >= infinite, ONE, ZERO))
        at_largest = add(at_largest, choose(a == largest, ONE, ZERO))
        finite = choose(a < infinite, a, ZERO)
        top = choose(finite > top, finite, top)
    return nonfinite, at_largest, top


def gather(data, count, key_low, key_high, sample):
    """Piece: copy the sampled elements as float32, and return how many they are."""
    if count <= MOST:
        for i in range(count):
            store32(sample, i, load_word(data, i))
        return count
    runs = (count + RUN - 1) // RUN
    taken = 0
    counter = stream_start(key_low, key_high, 0)
    for k in range(RUNS):
        u = draw(counter)
        counter = add(counter, WEYL)
        start = ((((k << 32) | int(u)) * runs) >> 37) * RUN
        length = min(RUN, count - start)
        for i in range(length):
            store32(sample, taken + i, load_word(data, start + i))
        taken += length
    return taken


def histogram(sample, taken, integers, at, reals):
    """Piece: count sampled nonzero finite elements by exponent, add their squares, and return zeros and finite ones."""
    squares, finite, zeros = 0.0, 0, 0
    for i in range(taken):
        w = load32(sample, i)
        a = bit_and(w, MAGNITUDE)
        if a < INFINITE:
            x = float64(real(a))
            squares += x * x
            finite += 1
            if a >= NORMALS:
                bump(integers, at + int(shr(a, FIELD)) + 22, 1)
            elif a > ZERO:
                k = 0
                while shr(a, ONE) > ZERO:
                    a = shr(a, ONE)
                    k += 1
                bump(integers, at + k, 1)
            else:
                zeros += 1
    store64(reals, SQUARES, word64(real64(load64(reals, SQUARES)) + squares))
    store64(reals, LAST_FINITE, word64(real64(load64(reals, LAST_FINITE)) + finite))
    return zeros, finite


def singles(sample, taken, nonzero, normal, over, zeros, finite, integers, at):
    """Piece: underflow, subnormal results and overflow of one format."""
    gone, small, large = below(sample, taken, np_uint32(nonzero), np_uint32(normal), np_uint32(over))
    bump(integers, at, int(gone) - zeros)
    bump(integers, at + 1, int(small) - int(gone))
    bump(integers, at + 2, int(large) - (taken - finite))


def below(sample, taken, nonzero, normal, over):
    """Piece: how many magnitudes lie below two thresholds, and from a third one on, zeros and infinities included."""
    gone, small, large = ZERO, ZERO, ZERO
    for i in range(taken):
        a = bit_and(load32(sample, i), MAGNITUDE)
        gone = add(gone, choose(a < nonzero, ONE, ZERO))
        small = add(small, choose(a < normal, ONE, ZERO))
        large = add(large, choose(a >= over, ONE, ZERO))
    return gone, small, large


def word_of_float32(data, i):
    """Piece: a float32's word."""
    return load32(data, i)


def word_of_bfloat16(data, i):
    """Piece: a bfloat16 as a float32's word."""
    return bfloat16_word(load16(data, i))


def word_of_float16(data, i):
    """Piece: a float16 as a float32's word."""
    return float16_word(load16(data, i))


def ahead32(data, i):
    """Piece: the address of the float32 a chunk after element i."""
    return data + 4 * (i + CHUNK)


def ahead16(data, i):
    """Piece: the same of 16 bits."""
    return data + 2 * (i + CHUNK)


def magnitude32(data, i):
    """Piece: a magnitude in the words of memory."""
    return bit_and(load32(data, i), MAGNITUDE)


def magnitude16(data, i):
    """Piece: the same of 16 bits."""
    return bit_and(load16(data, i), HALF_MAGNITUDE)


def itself(w):
    """Piece: a float32's word is one."""
    return w


_PIECES = {
    torch.float32: (word_of_float32, magnitude32, itself, ahead32),
    torch.bfloat16: (word_of_bfloat16, magnitude16, bfloat16_word, ahead16),
    torch.float16: (word_of_float16, magnitude16, float16_word, ahead16),
}
KERNEL_DTYPES = tuple(_PIECES)
# The word of infinity, as memory has it.
INFINITE_WORDS = {torch.float32: INFINITY, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_TYPES: dict[str, object] = {"np_uint32": np.uint32, "widen64": np.uint64, "signed64": np.int64, "float64": np.float64}
_TYPES |= {"float32": np.float32, "SMALLEST_NORMAL": 2.0**-126}


@functools.cache
def look_kernel(dtype: torch.dtype) -> Callable:
    """Return the kernel for tensors of a dtype."""
    pieces = dict(zip(("load_word", "load_magnitude", "value_word", "ahead"), _PIECES[dtype]))
    return compile_kernel(look, SIGNATURE, {**pieces, **_TYPES})


@functools.cache
def copy_kernel(dtype: torch.dtype) -> Callable:
    """Return the kernel that only copies samples of tensors of a dtype."""
    return compile_kernel(copy_samples, "void(int64, int64, int64[:,::1])", {"load_word": _PIECES[dtype][0], **_TYPES})
