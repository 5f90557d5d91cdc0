"""A trace as machine code: one loop over elements, eight or sixteen at a time, in LLVM's vector types."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._trace import Trace
from ._builder import VectorBuilder, size_of
from ._instructions import Instructions, hidden_one
from ._machine_function import machine_function
from ._processor import has_fused_vectors, vector_bits

LANES = 16  # neighbours that a broadcast operand repeats: the widest vector of any kernel
_HEADER = 2  # words of the table before the operands: elements per row, elements in all
_WORDS = 3  # words per operand: address, elements from row to row, elements from neighbour to neighbour
_LONG = 3000  # instructions from which calls cost less than the compiler's time for writing all out


def compile_trace(
    name: str, trace: Trace, results: Sequence[int], stored: Sequence[torch.dtype], written: Sequence[torch.dtype]
) -> Callable:
    """A function (first row, last row, table address) that runs a trace on rows of elements.

    Args:
        name: for the cache.
        trace: what to compute per element.
        results: the instructions whose values are written.
        stored: dtype in memory of each input (float16, bfloat16, float32, float64).
        written: dtype in memory of each result; the value must be one of it, or is rounded to nearest.

    The table is an int64 array: row length, element count, then for each input and each result address, row stride and
    neighbour stride (0 or 1). An input with neighbour stride 0 must hold LANES equal values from each row's address.
    """
    key = hashlib.sha256(repr((trace.digest(), tuple(results), tuple(stored), tuple(written))).encode()).hexdigest()
    given = trace, tuple(results), tuple(stored), tuple(written)
    return compile_rows(name, key, lambda builder, *values: _Loop(builder, *given).build(*values))


def compile_rows(name: str, key: str, emit: Callable) -> Callable:
    """A function (first row, last row, table address) of the instructions that emit(builder, *these) writes."""
    return machine_function(f"{name}_{key[:16]}", key, 3, lambda b, *values: emit(b.b, *values))


def native_lanes(dtype: torch.dtype) -> int:
    """Lanes of a vector register of the processor."""
    return vector_bits() // (64 if dtype == torch.float64 else 32)


class _Loop(VectorBuilder):
    """The loop over rows, vectors of neighbours, and remaining elements."""

    def __init__(self, builder, trace: Trace, results: tuple, stored: tuple, written: tuple) -> None:
        super().__init__(builder)
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
            whole = b.mul(b.sdiv(count, lanes), lanes)
            with self.loop(self.word(0), whole, self.lanes) as i:
                self.element([(base, b.mul(i, near)) for base, (_, _, near) in zip(bases, operands)])
            with b.if_then(b.icmp_signed("<", whole, count)):
                self.rest(bases, [near for _, _, near in operands], whole, count)

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
