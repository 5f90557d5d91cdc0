"""Wanted changes beside those that took place, counted over many tensors in LLVM's vector types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels import VectorBuilder, compile_rows, lanes_of, source_digest, vector_bits

# Words of the table: addresses of float64 and, of what is written, float32 values, two flags, and more addresses.
BEFORE, AFTER, WANTED, ROUNDED, AS_VALUES, DECREASES, ENDS, COUNTS, SUMS = range(9)
WORDS = 9
INFINITY = float("inf")


@functools.cache
def change_kernel(writes: bool) -> Callable[[int, int, int], None]:
    """A function (first tensor, last tensor, table address) that counts changes of float64 values.

    Of each tensor, whose elements lie between two neighbours of the int64 at ENDS: two int64 at COUNTS (wanted changes,
    and those of them that left the bits as they were), and two float64 at SUMS (the squares of what was wanted, and the
    products with what took place). A change counts where both are finite and the wanted one is not zero, and with
    DECREASES below zero. With AS_VALUES the values at WANTED are not changes, but what was wanted instead of BEFORE.

    Args:
        writes: whether the wanted changes are written to ROUNDED as float32.
    """
    name = f"changes_{'written' if writes else 'counted'}"
    key = f"{name} {source_digest(Path(__file__).parent)}"
    return compile_rows(name, key, lambda builder, *values: _Changes(builder, writes).build(*values))


class _Changes(VectorBuilder):
    """Tensors, then vectors of neighbours, then what is left one by one."""

    def __init__(self, builder, writes: bool) -> None:
        super().__init__(builder)
        self.writes = writes
        # Two vectors side by side: their sums and all values of a turn fit the registers.
        self.lanes = 2 * vector_bits() // 64

    def build(self, first, last, table) -> None:
        b, word = self.b, self.word
        self.places = [self.load_word(table, k) for k in (BEFORE, AFTER, WANTED, ROUNDED)]
        ends, counts, sums = (self.load_word(table, k) for k in (ENDS, COUNTS, SUMS))
        self.as_values, decreases = (
            b.icmp_signed("!=", self.load_word(table, k), word(0)) for k in (AS_VALUES, DECREASES)
        )
        self.limit = b.select(decreases, self.constant(self.f64, 0.0), self.constant(self.f64, INFINITY))
        with self.loop(first, last, 1) as tensor:
            start = b.load(self.pointer(ends, tensor, self.i64), align=8)
            end = b.load(self.pointer(ends, b.add(tensor, word(1)), self.i64), align=8)
            length = b.sub(end, start)
            whole = b.add(start, b.sub(length, b.srem(length, word(self.lanes))))
            many = self.over(start, whole, self.lanes)
            few = self.over(whole, end, 1)
            merges = (b.add, b.fadd, b.fadd)
            both, *found = [merge(self.folded(merge, x), y) for merge, x, y in zip(merges, many, few)]
            found[:0] = b.and_(both, word(2**32 - 1)), b.lshr(both, word(32))
            for k, value in enumerate(found):
                place = b.add(b.mul(tensor, word(2)), word(k % 2))
                b.store(value, self.pointer(counts if k < 2 else sums, place, value.type), align=8)

    def over(self, low, high, lanes: int) -> list:
        """Both counts in one word, and sums of elements [low, high), for each lane."""
        values = [self.constant(self.shape(kind, lanes), 0) for kind in (self.i64, self.f64, self.f64)]
        with self.loop(low, high, lanes, values) as i:
            values[:] = self.element(i, lanes, values)
        return values

    def element(self, i, lanes: int, sums: list) -> list:
        """The sums with some neighbours added."""
        b, kind = self.b, self.shape(self.f64, lanes)
        before, after, wanted = (self.load(place, i, torch.float64, kind) for place in self.places[:3])
        zero, infinity = self.constant(kind, 0.0), self.constant(kind, INFINITY)
        wanted = b.fsub(wanted, b.select(self.spread(self.as_values, lanes), before, zero))
        if self.writes:
            self.store(self.places[3], i, torch.float32, wanted)
        change = b.fsub(after, before)
        counted = b.fcmp_ordered("!=", wanted, zero)
        for condition in (
            b.fcmp_ordered("<", wanted, self.spread(self.limit, lanes)),
            b.fcmp_ordered(">", wanted, b.fneg(infinity)),
            b.fcmp_ordered("<", self.intrinsic("fabs", change), infinity),
        ):
            counted = b.and_(counted, condition)
        words = self.shape(self.i64, lanes)
        same = b.icmp_signed("==", b.bitcast(before, words), b.bitcast(after, words))
        asked, took = b.select(counted, wanted, zero), b.select(counted, change, zero)
        one, both, none = (self.constant(words, value) for value in (1, 2**32 + 1, 0))
        counts = b.select(counted, b.select(same, both, one), none)
        return [
            b.add(sums[0], counts),
            b.fadd(sums[1], b.fmul(asked, asked)),
            b.fadd(sums[2], b.fmul(asked, took)),
        ]

    def folded(self, merge: Callable, vector):
        """All lanes merged, halves at a time."""
        while half := lanes_of(vector.type) // 2:
            vector = merge(self.part(vector, 0, half), self.part(vector, half, half))
        return self.lane(vector, 0)
