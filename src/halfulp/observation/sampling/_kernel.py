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
    squares16,
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
DATA, COUNT, KEY, SAMPLE, BINS, INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD, TAKEN, WIDE, FRESH = range(12)
BROKEN, NONZERO = 12, 13
COLUMNS = 14
# Of the room for a sample: its elements, then counts of exponents, each in four places in turn.
EXPONENTS = 256
ROOM = MOST + 4 * EXPONENTS
ONES, HALF_MAGNITUDE = np.uint32(0xFFFFFFFF), np.uint32(0x7FFF)
CHUNK = 2048
# Bytes of a cache line, and elements of tensors that no longer lie in the caches, whose lines are asked for ahead.
LINE, LARGE = 64, 1 << 17
SIGNATURE = "int64(int64, int64, int64, int64, int64, int64, int64)"


def look(first, last, table, thresholds, singles, blocks, block_formats):
    """Kernel: count the tensors of the rows [first, last) of a table of int64, and write their samples.

    Returns how many elements are not finite in the last row's tensors of this step.
    """
    broken = 0
    blocks_at = FIXED + 3 * singles
    for number_of_row in range(first, last):
        row = table + 8 * COLUMNS * number_of_row
        data, count, sample, bins = column(row, DATA), column(row, COUNT), column(row, SAMPLE), column(row, BINS)
        integers, reals = column(row, INTEGERS), column(row, REALS_AT)
        if column(row, FRESH) != 0:
            begin_step(integers, reals)
            store64(row, FRESH, widen64(0))
        extremes(data, count, low_of(column(row, LARGEST_WORD)), low_of(column(row, INFINITE_WORD)), integers, reals)
        taken = take(row)
        broken = signed64(load64(integers, STEP_NONFINITE))
        store64(row, BROKEN, widen64(broken))
        bump(integers, 4, taken)
        zeros, finite = exponents(sample, taken, bins, integers, blocks_at + 4 * block_formats, reals)
        for k in range(singles):
            in_format(sample, taken, thresholds, k, zeros, finite, bins, integers)
        for k in range(block_formats):
            in_blocks(sample, taken, blocks, k, integers, blocks_at + 4 * k)
    return broken


def copy_samples(first, last, table):
    """Kernel: write the samples of the rows [first, last) alone."""
    for number_of_row in range(first, last):
        take(table + 8 * COLUMNS * number_of_row)


def take(row):
    """Piece: write a row's sample, and return how many elements it has."""
    count, sample, key = column(row, COUNT), column(row, SAMPLE), column(row, KEY)
    taken = gather(column(row, DATA), count, low_of(key), high_of(key), sample)
    store64(row, TAKEN, widen64(taken))
    if column(row, WIDE) != 0:
        widen_sample(sample, taken, min(count, MOST), column(row, WIDE))
        store64(row, NONZERO, widen64(taken - int(below(sample, taken, ONE))))
    return taken


def column(row, k):
    """Piece: an integer of a row."""
    return signed64(load64(row, k))


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


def exponents(sample, taken, bins, integers, at, reals):
    """Piece: count sampled nonzero finite elements by exponent, add their squares, and return zeros and finite ones.

    Leaves in the bins how many elements have each exponent field, and behind them how many have a smaller one.
    """
    sort_by_field(sample, taken, bins)
    some = int(load32(bins, 0))
    zeros = int(below(sample, taken, ONE)) if some > 0 else 0
    if some > zeros:
        count_subnormals(sample, taken, integers, at)
    before = ZERO
    for field in range(EXPONENTS):
        here = load32(bins, field)
        store32(bins, EXPONENTS + field, before)
        before = add(before, here)
        if (here > ZERO) & (field > 0) & (field < EXPONENTS - 1):
            bump(integers, at + field + 22, int(here))
    finite = taken - int(load32(bins, EXPONENTS - 1))
    store64(reals, SQUARES, word64(real64(load64(reals, SQUARES)) + squares_of(sample, taken)))
    store64(reals, LAST_FINITE, word64(real64(load64(reals, LAST_FINITE)) + finite))
    return zeros, finite


def sort_by_field(sample, taken, bins):
    """Piece: count elements by exponent field, four in turn in places of their own: no count waits for the last one."""
    for k in range(4 * EXPONENTS):
        store32(bins, k, ZERO)
    whole = taken // 4 * 4
    for i in range(0, whole, 4):
        raise_count(bins, field_of(load32(sample, i)))
        raise_count(bins, EXPONENTS + field_of(load32(sample, i + 1)))
        raise_count(bins, 2 * EXPONENTS + field_of(load32(sample, i + 2)))
        raise_count(bins, 3 * EXPONENTS + field_of(load32(sample, i + 3)))
    for i in range(whole, taken):
        raise_count(bins, field_of(load32(sample, i)))
    for k in range(EXPONENTS):
        first = add(load32(bins, k), load32(bins, EXPONENTS + k))
        store32(bins, k, add(first, add(load32(bins, 2 * EXPONENTS + k), load32(bins, 3 * EXPONENTS + k))))


def field_of(w):
    """Piece: the exponent field of a float32's word."""
    return int(shr(bit_and(w, MAGNITUDE), FIELD))


def raise_count(bins, k):
    """Piece: add one to a word in memory."""
    store32(bins, k, add(load32(bins, k), ONE))


def count_subnormals(sample, taken, integers, at):
    """Piece: count subnormal numbers of float32 by exponent."""
    for i in range(taken):
        a = bit_and(load32(sample, i), MAGNITUDE)
        if (a > ZERO) & (a < NORMALS):
            k = 0
            while shr(a, ONE) > ZERO:
                a = shr(a, ONE)
                k += 1
            bump(integers, at + k, 1)


def squares_of(sample, taken):
    """Piece: the sum of the squares of finite elements."""
    squares = 0.0
    whole = taken // 16 * 16
    for i in range(0, whole, 16):
        squares += squares16(sample, i)
    for i in range(whole, taken):
        a = bit_and(load32(sample, i), MAGNITUDE)
        if a < INFINITE:
            squares += float64(real(a)) * float64(real(a))
    return squares


def in_format(sample, taken, thresholds, k, zeros, finite, bins, integers):
    """Piece: underflow, subnormal results and overflow of one format."""
    gone = below_word(sample, taken, low_of(column(thresholds, 3 * k)), bins)
    small = below_word(sample, taken, low_of(column(thresholds, 3 * k + 1)), bins)
    fit = below_word(sample, taken, low_of(column(thresholds, 3 * k + 2)), bins)
    bump(integers, FIXED + 3 * k, gone - zeros)
    bump(integers, FIXED + 3 * k + 1, small - gone)
    bump(integers, FIXED + 3 * k + 2, finite - fit)


def below_word(sample, taken, threshold, bins):
    """Piece: how many magnitudes lie below a word; only where some have its exponent are they looked at again."""
    field = int(shr(threshold, FIELD))
    if (bit_and(threshold, sub(NORMALS, ONE)) > ZERO) & (load32(bins, field) > ZERO):
        return int(below(sample, taken, threshold))
    return int(load32(bins, EXPONENTS + field))


def below(sample, taken, threshold):
    """Piece: the same by looking at all."""
    found = ZERO
    for i in range(taken):
        found = add(found, choose(bit_and(load32(sample, i), MAGNITUDE) < threshold, ONE, ZERO))
    return found


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
    return compile_kernel(copy_samples, "void(int64, int64, int64)", {"load_word": _PIECES[dtype][0], **_TYPES})
