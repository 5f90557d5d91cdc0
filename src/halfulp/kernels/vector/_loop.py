"""A trace as machine code: one loop over elements, eight or sixteen at a time, in LLVM's vector types."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._trace import Trace
from ._builder import VectorBuilder, size_of
from ._instructions import Instructions, hidden_one
from ._machine_function import machine_function
from ._processor import has_fused_vectors, vector_bits

LANES = 32  # neighbours that a broadcast operand repeats: the widest step of any kernel
_HEADER = 2  # words of the table before the operands: elements per row, elements in all
_WORDS = 3  # words per operand: address, elements from row to row, elements from neighbour to neighbour
_LONG = 3000  # instructions from which calls cost less than the compiler's time for writing all out


@dataclass(frozen=True)
class Quick:
    """A trace of float32 for arrays of bfloat16, which has the same results except where it doubts them.

    Attributes:
        trace: what to compute per element.
        results: instructions whose values are bfloat16's numbers, one per output.
        doubt: the instruction of the mask of elements that the other trace computes.
    """

    trace: Trace
    results: tuple[int, ...]
    doubt: int


def compile_trace(
    name: str,
    trace: Trace,
    results: Sequence[int],
    stored: Sequence[torch.dtype],
    written: Sequence[torch.dtype],
    quick: Quick | None = None,
) -> Callable:
    """A function (first row, last row, table address) that runs a trace on rows of elements.

    Args:
        name: for the cache.
        trace: what to compute per element.
        results: the instructions whose values are written.
        stored: dtype in memory of each input (float16, bfloat16, float32, float64).
        written: dtype in memory of each result; the value must be one of it, or is rounded to nearest.
        quick: what computes most elements, of bfloat16 alone, in less time.

    The table is an int64 array: row length, element count, then for each input and each result address, row stride and
    neighbour stride (0 or 1). An input with neighbour stride 0 must hold LANES equal values from each row's address.
    """
    short = quick and (quick.trace.digest(), quick.results, quick.doubt)
    told = trace.digest(), tuple(results), tuple(stored), tuple(written), *([short] if short else [])
    key = hashlib.sha256(repr(told).encode()).hexdigest()
    given = trace, tuple(results), tuple(stored), tuple(written), quick
    return compile_rows(name, key, lambda builder, *values: _Loop(builder, *given).build(*values))


def compile_rows(name: str, key: str, emit: Callable) -> Callable:
    """A function (first row, last row, table address) of the instructions that emit(builder, *these) writes."""
    return machine_function(f"{name}_{key[:16]}", key, 3, lambda b, *values: emit(b.b, *values))


def native_lanes(dtype: torch.dtype) -> int:
    """Lanes of a vector register of the processor."""
    return vector_bits() // (64 if dtype == torch.float64 else 32)


class _Loop(VectorBuilder):
    """The loop over rows, vectors of neighbours, and remaining elements."""

    def __init__(
        self, builder, trace: Trace, results: tuple, stored: tuple, written: tuple, quick: Quick | None
    ) -> None:
        super().__init__(builder)
        self.quick = quick
        self.trace, self.results, self.stored, self.written = trace, results, stored, written
        self.lanes = native_lanes(trace.dtype)
        self.real = self.shape(self.f64 if trace.dtype == torch.float64 else self.f32, self.lanes)
        self.calls = trace.size() > _LONG

    def build(self, first, last, table) -> None:
        b, lanes = self.b, self.word(self.lanes)
        self.one = hidden_one(b, self.real) if has_fused_vectors(vector_bits()) else None
        per_row, total = self.load_word(table, 0), self.load_word(table, 1)
        operands = []
        for k in range(len(self.stored) + len(self.written)):
            operands.append(tuple(self.load_word(table, _HEADER + _WORDS * k + j) for j in range(_WORDS)))
        with self.loop(first, last, 1) as row:
            start = b.mul(row, per_row)
            count = self.lesser(b.sub(total, start), per_row)
            bases = [
                b.add(address, b.mul(b.mul(row, step), self.word(size_of(dtype))))
                for (address, step, _), dtype in zip(operands, self.stored + self.written)
            ]
            whole, nears = b.mul(b.sdiv(count, lanes), lanes), [near for _, _, near in operands]
            if self.quick is None:
                self.elements(bases, nears, self.word(0), whole)
            else:
                done = self.quick_elements(self.quick, bases, nears, count)
                self.elements(bases, nears, done, whole)
            with b.if_then(b.icmp_signed("<", whole, count)):
                self.rest(bases, nears, whole, count)

    def elements(self, bases: list, nears: list, low, high) -> None:
        """Write the loop over whole vectors of elements [low, high)."""
        with self.loop(low, high, self.lanes) as i:
            self.element([(base, self.b.mul(i, near)) for base, near in zip(bases, nears)])

    def quick_elements(self, quick: Quick, bases: list, nears: list, count) -> Any:
        """Write the loop over pairs of vectors of bfloat16, and return where it ends.

        Two neighbours are one word: a shift gives the even one as float32, a mask the odd one. Vectors with an element
        in doubt are computed by the other trace, before anything is stored, as outputs may be inputs too.
        """
        b, lanes = self.b, native_lanes(quick.trace.dtype)
        words, real = self.shape(self.i32, lanes), self.shape(self.f32, lanes)
        shift, high = self.constant(words, 16), self.constant(words, 0xFFFF0000)
        width = self.word(2 * lanes)
        done = b.mul(b.sdiv(count, width), width)
        one = hidden_one(b, real) if has_fused_vectors(vector_bits()) else None
        with self.loop(self.word(0), done, 2 * lanes) as i:
            places = [
                self.pointer(base, b.mul(i, near), self.shape(self.i16, 2 * lanes)) for base, near in zip(bases, nears)
            ]
            pairs = [b.load(b.bitcast(place, words.as_pointer()), align=2) for place in places[: len(self.stored)]]
            halves = []
            for even in (True, False):
                inputs = [b.bitcast(b.shl(pair, shift) if even else b.and_(pair, high), real) for pair in pairs]
                halves.append(Instructions(b, quick.trace, lanes, one).run(inputs))
            doubt = b.bitcast(b.or_(*(half[quick.doubt] for half in halves)), self.ir.IntType(lanes))
            with b.if_else(b.icmp_unsigned("!=", doubt, self.ir.Constant(doubt.type, 0)), likely=False) as (slow, fast):
                with slow:
                    self.elements(bases, nears, i, b.add(i, width))
                with fast:
                    for number, place in zip(quick.results, places[len(self.stored) :]):
                        even, odd = (b.bitcast(half[number], words) for half in halves)
                        both = b.or_(b.lshr(even, shift), odd)
                        b.store(both, b.bitcast(place, words.as_pointer()), align=2)
        return done

    def rest(self, bases: list, nears: list, whole, count) -> None:
        """Process a row's last elements, fewer than a vector, in a padded copy."""
        b, last, lanes = self.b, self.b.sub(count, self.word(1)), self.lanes
        kinds = [self.memory_type(dtype) for dtype in self.stored + self.written]
        copies = [self.allocate(kind, lanes) for kind in kinds]
        inputs = list(zip(kinds, copies, bases, nears))[: len(self.stored)]
        outputs = list(zip(kinds, copies, bases))[len(self.stored) :]
        with self.loop(self.word(0), self.word(lanes), 1) as j:
            i = b.add(whole, j)
            i = b.select(b.icmp_signed("<", i, count), i, last)
            for kind, copy, base, near in inputs:
                b.store(b.load(self.pointer(base, b.mul(i, near), kind)), b.gep(copy, [j]))
        self.element([(b.ptrtoint(copy, self.i64), self.word(0)) for copy in copies])
        with self.loop(whole, count, 1) as i:
            for kind, copy, base in outputs:
                b.store(b.load(b.gep(copy, [b.sub(i, whole)])), self.pointer(base, i, kind))

    def element(self, places: list[tuple[Any, Any]]) -> None:
        """Write all instructions for a vector of neighbours."""
        inputs = [self.load(*place, dtype, self.real) for place, dtype in zip(places, self.stored)]
        values = Instructions(self.b, self.trace, self.lanes, self.one, self.calls).run(inputs)
        for number, place, dtype in zip(self.results, places[len(self.stored) :], self.written):
            self.store(*place, dtype, values[number])
