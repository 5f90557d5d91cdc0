"""The compiled loop over tensors: extremes of each whole one, its sample copied, and what is counted of the sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...kernels import source_digest
from ...kernels._device_function import record_words
from ...kernels._table import Table
from ...kernels._trace import Piece
from ...kernels.vector._builder import VectorBuilder
from ...kernels.vector._instructions import Instructions
from ...kernels.vector._machine_function import Kernel, machine_function
from ...kernels.vector._table_loop import TableLoop
from ...rounding._random_bits import WEYL, draw, recorded_start
from ._device_functions import copy_table, whole_table
from ._sample_places import MOST, RUN, RUNS

# Words of a row: addresses of the tensor and of what is written, then float64 that the whole tensor's table finds.
DATA, COUNT, KEY, SAMPLE, WIDE, COUNTERS, SUMS, TAKEN, SMALLEST, ZEROS, LARGEST = range(11)
WORDS = 12


@functools.cache
def compile_copies(dtype: torch.dtype, is_wide: bool) -> Kernel:
    """Return the function (first and last row, address of int64 (rows, WORDS)) that only copies samples."""

    def write(vectors: VectorBuilder, first, last, rows) -> None:
        looks = _Looks(vectors.b, dtype, is_wide)
        with looks.loop(first, last, 1) as number:
            looks.copy(looks.row_at(rows, number))

    return machine_function("copy_samples", _key(dtype, is_wide, []), 3, write)


@functools.cache
def compile_looks(dtype: torch.dtype, is_wide: bool, tables: tuple[Table, ...]) -> Kernel:
    """Return the function (first and last row, addresses of int64 (rows, WORDS) and of the tables' constants).

    The sums of all tables are added to float64 numbers, one table's behind the other's. A table behind one that finds
    a maximum takes that, a float64, for its last two constants. Each takes `constant_bytes` of the constants.
    """

    def write(vectors: VectorBuilder, first, last, rows, constants) -> None:
        looks = _Looks(vectors.b, dtype, is_wide, tables)
        with looks.loop(first, last, 1) as number:
            looks.look(looks.row_at(rows, number), constants)

    return machine_function("look", _key(dtype, is_wide, [whole_table(dtype), *tables]), 4, write)


def _key(dtype: torch.dtype, is_wide: bool, tables: list[Table]) -> str:
    pieces = [(piece.trace.digest(), piece.results) for piece in (_drawing(), recorded_start())]
    keys = [table.key() for table in (copy_table(dtype, is_wide), *tables)]
    return repr((keys, pieces, source_digest(Path(__file__).parent)))


@functools.cache
def _drawing() -> Piece:
    return record_words(draw, "w32", "w32")


def constant_bytes(table: Table) -> int:
    """Return how many bytes a table's constants take, words of 32 bits."""
    return 8 * -(-table.constants // 2)


class _Looks(VectorBuilder):
    """Writes what happens to a tensor."""

    def __init__(self, builder, dtype: torch.dtype, is_wide: bool, tables: Sequence[Table] = ()) -> None:
        super().__init__(builder)
        self.size, self.is_wide = dtype.itemsize, is_wide
        self.copies = TableLoop(builder, copy_table(dtype, is_wide))
        self.whole = TableLoop(builder, whole_table(dtype)) if tables else None
        self.counts = [TableLoop(builder, table) for table in tables]

    def row_at(self, rows, number) -> Any:
        """Return a row's address."""
        return self.b.add(rows, self.b.mul(number, self.word(8 * WORDS)))

    def look(self, row, constants) -> None:
        """Find a tensor's extremes, copy its sample and count it."""
        b, zero = self.b, self.word(0)
        assert self.whole is not None
        self.whole.address = {0: self.load_word(row, DATA)}
        for k, found in enumerate(self.whole.chunk(zero, self.load_word(row, COUNT))):
            b.store(found, self.pointer(row, self.word(SMALLEST + k), self.f64), align=8)
        taken = self.copy(row)
        addresses = {0: self.load_word(row, SAMPLE), 1: self.load_word(row, COUNTERS)}
        sums, before, place, known = self.load_word(row, SUMS), 0, 0, None
        for loop in self.counts:
            loop.address = addresses
            loop.load_constants(b.add(constants, self.word(place)))
            place += constant_bytes(loop.table)
            if loop.table.start:  # of tables that round; what looks for maxima draws nothing
                loop.begin_stream(loop.table.start, zero, zero)
            if known is not None:
                halves = b.bitcast(known, self.i64), b.lshr(b.bitcast(known, self.i64), self.word(32))
                for k, half in enumerate(halves):
                    loop.give_constant(("constant", loop.table.constants - 2 + k), b.trunc(half, self.i32))
            found = loop.chunk(zero, taken)
            known = found[0] if loop.trace.sums[0][0] == "max" else None
            if known is not None:
                continue
            for total in found:
                at = self.pointer(sums, self.word(before), self.f64)
                b.store(b.fadd(b.load(at, align=8), total), at, align=8)
                before += 1

    def copy(self, row) -> Any:
        """Copy a tensor's sample, and return how many elements it has."""
        b, word = self.b, self.word
        data, count, key, sample = (self.load_word(row, k) for k in (DATA, COUNT, KEY, SAMPLE))
        wide = self.load_word(row, WIDE)
        is_all = b.icmp_signed("<=", count, word(MOST))
        runs = b.select(is_all, word(1), word(RUNS))
        every = b.lshr(b.add(count, word(RUN - 1)), word(RUN.bit_length() - 1))
        start, drawing = recorded_start(), _drawing()
        halves = b.trunc(key, self.i32), b.trunc(b.lshr(key, word(32)), self.i32)
        values = Instructions(b, start.trace, 1).run([*halves, word(0)])
        first, own = (values[number] for number in start.results)
        carried = [first, word(0)]
        with self.loop(word(0), runs, 1, carried) as k:
            drawn = Instructions(b, drawing.trace, 1).run([carried[0], own])[drawing.results[0]]
            chosen = b.mul(b.or_(b.shl(k, word(32)), b.zext(drawn, self.i64)), every)
            place = b.shl(b.lshr(chosen, word(37)), word(RUN.bit_length() - 1))
            place = b.select(is_all, word(0), place)
            length = b.select(is_all, count, self.lesser(b.sub(count, place), word(RUN)))
            before = b.mul(k, word(RUN))
            places = (data, place, self.size), (sample, before, 4), (wide, before, 8)
            self.copies.address = {
                column: b.add(at, b.mul(further, word(size))) for column, (at, further, size) in enumerate(places)
            }
            self.copies.chunk(word(0), length)
            carried[:] = b.add(carried[0], self.ir.Constant(self.i32, int(WEYL))), b.add(before, length)
        taken = carried[1]
        b.store(taken, self.pointer(row, word(TAKEN), self.i64), align=8)
        if self.is_wide:  # a short last run leaves some of its part free
            with self.loop(taken, self.lesser(count, word(MOST)), 1) as i:
                b.store(self.ir.Constant(self.f64, 0.0), self.pointer(wide, i, self.f64), align=8)
        return taken
