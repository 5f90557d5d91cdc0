"""The compiled twin: one pass over each whole tensor for its extremes, and its sample copied and counted."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...kernels import Code, Number, choose, compile_code, gathered, larger, lesser, source_digest
from ...kernels._device_function import record_words
from ...rounding._device_functions import float16_word
from ...rounding._random_bits import WEYL, draw, recorded_start
from ._block_counts import BlockCounts
from ._candidates import INFINITY
from ._neighbours import FIELD, LANES, NORMALS, below, bump, sizes
from ._sample_places import MOST, RUN, RUNS
from ._totals import AMAX, AMIN, FIXED, LAST_AMAX, LAST_FINITE, SQUARES, STEP_NONFINITE

# Columns of the table.
DATA, COUNT, KEY, SAMPLE, BINS, INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD, TAKEN, WIDE, FRESH = range(12)
BROKEN, NONZERO = 12, 13
COLUMNS = 14
# Of the room for a sample: its elements, then counts of exponents, each in four places in turn.
EXPONENTS = 256
ROOM = MOST + 4 * EXPONENTS
CHUNK = 2048
# Bytes of a cache line, and elements of tensors that no longer lie in the caches, whose lines are asked for ahead.
LINE, LARGE = 64, 1 << 17
# The word of infinity, as memory has it.
INFINITE_WORDS = {torch.float32: INFINITY, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
KERNEL_DTYPES = tuple(INFINITE_WORDS)


@functools.cache
def look_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """A function (first row, last row, table, thresholds, formats, block numbers, block formats) for a dtype.

    It counts the tensors of the rows of an int64 table (rows, COLUMNS), and writes their samples; the other arguments
    are `Candidates.arguments`.
    """
    return _compiled("look", dtype, 7, lambda tensors, *values: tensors.look(*values))


@functools.cache
def copy_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """A function (first row, last row, table) that only copies samples of tensors of a dtype."""
    return _compiled("copy_samples", dtype, 3, lambda tensors, *values: tensors.copy(*values))


def _compiled(name: str, dtype: torch.dtype, arguments: int, write: Callable[..., None]) -> Callable[..., None]:
    name = f"{name}_{str(dtype).removeprefix('torch.')}"
    pieces = [(piece.trace.digest(), piece.results) for piece in (*_pieces(), recorded_start())]
    key = repr((name, pieces, source_digest(Path(__file__).parent)))
    return compile_code(name, key, arguments, lambda code, *values: write(_Tensors(code, dtype), *values))


@functools.cache
def _pieces() -> tuple[Any, Any]:
    return record_words(draw, "w32", "w32"), record_words(float16_word, "w32")


class _Tensors:
    """The code that looks at tensors of a dtype."""

    def __init__(self, code: Code, dtype: torch.dtype) -> None:
        self.code, self.dtype = code, dtype
        self.own = code.i32 if dtype == torch.float32 else code.i16
        self.bytes = dtype.itemsize

    def look(self, first, last, table, thresholds, singles, blocks, block_formats) -> None:
        """Write the kernel that counts."""
        code = self.code
        blocks_at = FIXED + 3 * singles
        with code.span(first, last) as number:
            row = code.memory(table + 8 * COLUMNS * number, code.i64)
            integers, reals = code.memory(row[INTEGERS], code.i64), code.memory(row[REALS_AT], code.f64)
            with code.when(row[FRESH] != 0):
                integers[STEP_NONFINITE] = 0
                reals[LAST_AMAX] = reals[SQUARES] = reals[LAST_FINITE] = 0.0
                row[FRESH] = 0
            self.extremes(row, integers, reals)
            taken = self.take(row)
            row[BROKEN] = integers[STEP_NONFINITE]
            bump(integers, 4, taken)
            sample, bins = row[SAMPLE], code.memory(row[BINS], code.i32)
            zeros, finite = self.exponents(sample, taken, bins, integers, blocks_at + 4 * block_formats, reals)
            with code.span(0, singles) as k:
                limits = code.memory(thresholds, code.i64, 3)
                gone, small, fit = (self.below_word(sample, taken, limits[k, j], bins) for j in range(3))
                bump(integers, FIXED + 3 * k, gone - zeros)
                bump(integers, FIXED + 1 + 3 * k, small - gone)
                bump(integers, FIXED + 2 + 3 * k, finite - fit)
            with code.span(0, block_formats) as k:
                for j, count in enumerate(BlockCounts(code, sample, taken, blocks, k).counts()):
                    bump(integers, blocks_at + 4 * k + j, count)

    def copy(self, first, last, table) -> None:
        """Write the kernel that only copies."""
        with self.code.span(first, last) as number:
            self.take(self.code.memory(table + 8 * COLUMNS * number, self.code.i64))

    # the whole tensor ------------------------------------------------------------------------------------------

    def extremes(self, row, integers, reals) -> None:
        """Count zeros, NaN and infinities, elements at the largest magnitude, and find extreme magnitudes."""
        code, data, count = self.code, row[DATA], row[COUNT]
        largest, infinite = row[LARGEST_WORD].to(self.own), row[INFINITE_WORD].to(self.own)
        zeros, nonfinite, at_largest = (code.variable(0) for _ in range(3))
        top, low = code.variable(0, self.own), code.variable(-1, self.own)
        with code.span(0, count, CHUNK) as start:
            end = lesser(start + CHUNK, count)
            with code.when(count >= LARGE):
                ahead = data + self.bytes * CHUNK
                with code.span(ahead + self.bytes * start, ahead + self.bytes * end, LINE) as line:
                    code.prefetch(line)
            found, high, least = self.extremes_of_chunk(data, start, end)
            high = code.variable(high)
            with code.when(high >= largest):
                broken, reached, finite = self.beyond_chunk(data, start, end, largest, infinite)
                nonfinite += broken.to(code.i64)
                at_largest += reached.to(code.i64)
                high.set(finite)
            zeros += found.to(code.i64)
            top.set(larger(high, top))
            low.set(lesser(least, low))
        for k, value in enumerate((count, zeros, nonfinite, at_largest)):
            bump(integers, k, value)
        bump(integers, STEP_NONFINITE, nonfinite)
        amax = self.word(top).real().to(code.f64)
        reals[AMAX], reals[LAST_AMAX] = larger(amax, reals[AMAX]), larger(amax, reals[LAST_AMAX])
        with code.when(low < infinite - 1):
            reals[AMIN] = lesser(self.word(low + 1).real().to(code.f64), reals[AMIN])

    def extremes_of_chunk(self, data, start, end) -> list[Number]:
        """Count zeros, and find the largest word of magnitudes; of the smallest nonzero one less than its word."""

        def turn(i, lanes: int) -> list:
            a = self.magnitudes(data, i, lanes)
            # Zero becomes the largest word of all.
            return [(a == 0).to(self.own), a, a - 1]

        begin = [self.code.number(value, self.own) for value in (0, 0, -1)]
        return gathered(start, end, self.lanes, begin, (operator.add, larger, lesser), turn)

    def beyond_chunk(self, data, start, end, largest, infinite) -> list[Number]:
        """Count NaN and infinities, and elements at the largest magnitude, and find the largest finite one."""

        def turn(i, lanes: int) -> list:
            a = self.magnitudes(data, i, lanes)
            return [(a >= infinite).to(self.own), (a == largest).to(self.own), choose(a < infinite, a, 0)]

        begin = [self.code.number(0, self.own) for _ in range(3)]
        return gathered(start, end, self.lanes, begin, (operator.add, operator.add, larger), turn)

    @property
    def lanes(self) -> int:
        """Elements of two vectors of 256 bits: sums do not wait for each other."""
        return 64 // self.bytes

    def magnitudes(self, data, i, lanes: int) -> Number:
        """Return magnitudes in the words of memory."""
        return self.code.memory(data, self.own).lanes(i, lanes) & (1 << (8 * self.bytes - 1)) - 1

    def word(self, bits: Number) -> Number:
        """Return words of memory as those of float32."""
        if self.dtype == torch.bfloat16:
            return bits.to(self.code.i32) << 16
        return self.code.run(_pieces()[1], bits.to(self.code.i32)) if self.dtype == torch.float16 else bits

    # the sample ------------------------------------------------------------------------------------------------

    def take(self, row) -> Number:
        """Write a row's sample, and return how many elements it has."""
        code, count = self.code, row[COUNT]
        taken = code.variable(0)
        with code.either(count <= MOST) as (whole, runs):
            with whole:
                self.move(row, 0, count, taken)
            with runs:
                every = (count + RUN - 1) // RUN
                words = row[KEY].to(code.i32), (row[KEY] >> 32).to(code.i32)
                start, own = code.run_all(recorded_start(), *words, code.number(0))
                counter = code.variable(start)
                with code.span(0, RUNS) as k:
                    random = code.run(_pieces()[0], counter, own).to(code.i64)
                    counter += int(WEYL)
                    start = ((((k << 32) | random) * every) >> 37) * RUN
                    self.move(row, start, lesser(count - start, RUN), taken)
        row[TAKEN] = taken
        with code.when(row[WIDE] != 0):
            self.widen(row, taken)
            row[NONZERO] = taken - below(row[SAMPLE], taken, code.number(1, code.i32))
        return taken

    def move(self, row, start, length, taken) -> None:
        """Append elements to the sample."""
        code = self.code
        data, sample = code.memory(row[DATA], self.own), code.memory(row[SAMPLE] + 4 * taken, code.i32)
        whole = length // LANES * LANES
        for lanes, low, high in ((LANES, 0, whole), (1, whole, length)):
            with code.span(low, high, lanes) as i:
                sample[i] = self.word(data.lanes(i + start, lanes))
        taken += length

    def widen(self, row, taken) -> None:
        """Write a sample as float64, with zeros where a short last run leaves some of its room free."""
        code = self.code
        sample, wide = code.memory(row[SAMPLE], code.f32), code.memory(row[WIDE], code.f64)
        whole = taken // LANES * LANES
        for lanes, low, high in ((LANES, 0, whole), (1, whole, taken)):
            with code.span(low, high, lanes) as i:
                wide[i] = sample.lanes(i, lanes).to(code.f64)
        with code.span(taken, lesser(row[COUNT], MOST)) as i:
            wide[i] = 0.0

    def exponents(self, sample, taken, bins, integers, at, reals) -> tuple[Number, Number]:
        """Count sampled nonzero finite elements by exponent, add their squares; return zeros and finite ones.

        Leaves in the bins how many elements have each exponent field, and behind them how many have a smaller one.
        """
        code = self.code
        self.sort_by_field(sample, taken, bins)
        some, zeros = bins[0].to(code.i64), code.variable(0)
        with code.when(some > 0):
            zeros.set(below(sample, taken, code.number(1, code.i32)))
        with code.when(some > zeros):
            self.count_subnormals(sample, taken, integers, at)
        before = code.variable(0, code.i32)
        with code.span(0, EXPONENTS) as field:
            here = bins[field]
            bins[EXPONENTS + field] = before
            before += here
            with code.when((here > 0) & (field > 0) & (field < EXPONENTS - 1)):
                bump(integers, at + field + 22, here.to(code.i64))
        finite = taken - bins[EXPONENTS - 1].to(code.i64)
        reals[SQUARES] += self.squares(sample, taken)
        reals[LAST_FINITE] += finite.to(code.f64)
        return zeros, finite

    def sort_by_field(self, sample, taken, bins) -> None:
        """Count elements by exponent field, four in turn in places of their own: no count waits for the last one."""
        code = self.code
        with code.span(0, 4 * EXPONENTS, LANES) as k:
            bins[k] = code.number(0, code.i32).spread(LANES)
        whole = taken // 4 * 4
        with code.span(0, whole, 4) as i:
            for part in range(4):
                bins[self.field(sample, i + part) + part * EXPONENTS] += 1
        with code.span(whole, taken) as i:
            bins[self.field(sample, i)] += 1
        with code.span(0, EXPONENTS, LANES) as k:
            places = [bins.lanes(k + j * EXPONENTS, LANES) for j in range(4)]
            bins[k] = places[0] + places[1] + (places[2] + places[3])

    def field(self, sample, i) -> Number:
        """Return an element's exponent field."""
        return (sizes(sample, i, 1) >> FIELD).to(self.code.i64)

    def count_subnormals(self, sample, taken, integers, at) -> None:
        """Count subnormal numbers of float32 by exponent."""
        with self.code.span(0, taken) as i:
            a = sizes(sample, i, 1)
            with self.code.when((a > 0) & (a < NORMALS)):
                bump(integers, at + (a.to(self.code.f32).bits() >> FIELD).to(self.code.i64) - 127, 1)

    def squares(self, sample, taken) -> Number:
        """Return the sum of the squares of finite elements."""
        code, whole = self.code, taken // LANES * LANES
        total = code.variable(0.0, code.f64)
        for lanes, low, high in ((LANES, 0, whole), (1, whole, taken)):
            with code.span(low, high, lanes) as i:
                a = sizes(sample, i, lanes)
                values = choose(a < INFINITY, a, 0).real().to(code.f64)
                total += (values * values).folded(operator.add)
        return total

    def below_word(self, sample, taken, threshold, bins) -> Number:
        """Count magnitudes below a word; only where some have its exponent are they looked at again."""
        code, field = self.code, threshold >> FIELD
        found = code.variable(bins[EXPONENTS + field].to(code.i64))
        with code.when(((threshold & (NORMALS - 1)) > 0) & (bins[field] > 0)):
            found.set(below(sample, taken, threshold.to(code.i32)))
        return found
