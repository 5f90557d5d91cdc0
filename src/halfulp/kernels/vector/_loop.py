"""A trace as machine code: one loop over elements, in LLVM's vector types, each instruction in its phase."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._device_function import STREAM
from .._trace import Trace
from ._builder import VectorBuilder, size_of
from ._instructions import Instructions, hidden_one
from ._machine_function import Kernel, machine_function
from ._processor import has_fused_vectors, vector_bits

# Cycles after which a result is there, where they are more than one.
_LATENCY = {"sqrt": 20, "div": 13, "add": 3, "sub": 3, "mul": 3, "word_mul": 3, "select": 2, "to_real": 3, "to_word": 3}
# Operations that are computed again behind a block's largest words, rather than kept: their operands are no larger.
_AGAIN = ("bits", "to_float64")
# Operations so slow that what needs them is computed one turn of the loop later.
_SLOW = ("sqrt",)


@dataclass(frozen=True)
class Phases:
    """The instructions of a trace by what they need of a block's largest words.

    Attributes:
        largest: those that find one.
        before: those that need none, and read elements, or are of constants and counters alone.
        uniform: those of largest words and constants, and what they are computed from.
        waiting: those of them that need a largest word, and those that find one.
        behind: all others.
        behind_and_free: those, and what constants and counters alone give, which is computed again.
        crossing: values from before that are needed behind.
    """

    largest: list[int]
    before: set[int]
    uniform: set[int]
    waiting: list[int]
    behind: set[int]
    behind_and_free: set[int]
    crossing: list[int]

    def of_blocks(self, trace: Trace) -> list[int]:
        """Return which instructions have one result per block that is kept: largest words, and what is used of them."""
        used = {operand for k in self.behind for operand in trace.lines[k][1]}
        used |= {line for array, line in trace.stores.items() if array[2]} | {number for _, number in trace.sums}
        return [k for k in self.waiting if k in self.largest or k in used]

    @classmethod
    def of(cls, trace: Trace) -> Phases:
        """Return the phases of a trace."""
        reads: set[int] = set()
        waits: set[int] = set()  # for the block's largest
        varies: set[int] = set()  # between the elements of a block
        for k, (name, operands, extra) in enumerate(trace.lines):
            if name == "block_largest":
                assert not waits & set(operands), "a block has one round of largest words"
                waits.add(k)
                continue
            if waits & set(operands):
                waits.add(k)
            elif name == "load" or reads & set(operands):
                reads.add(k)
            if name == "load" or (name == "input" and extra == STREAM[0]) or varies & set(operands):
                varies.add(k)
        everything = set(range(len(trace.lines)))
        largest = [k for k in sorted(waits) if trace.lines[k][0] == "block_largest"]
        uniform = waits - varies - set(largest)
        behind = waits - uniform - set(largest)
        needed, crossing = [operand for k in sorted(behind) for operand in trace.lines[k][1]], set()
        while needed:
            k = needed.pop()
            if k in reads and (trace.kinds[k] == "mask" or trace.lines[k][0] in _AGAIN):
                behind.add(k)
                needed += trace.lines[k][1]
            elif k in reads:
                crossing.add(k)
        free = everything - waits - reads
        both = {k for k in free & varies if trace.kinds[k] != "mask"} & with_operands(trace, behind)
        both &= with_operands(trace, [*crossing, *used_before(trace, waits)])
        # What is computed in both loops, such as a hash of the counter, is kept instead, but for what it is made from.
        crossing |= {k for k in both if k not in {n for other in both for n in trace.lines[other][1]}}
        return cls(
            largest=largest,
            before=everything - waits,
            uniform=with_operands(trace, uniform) - set(largest),
            waiting=sorted(uniform | set(largest)),
            behind=behind,
            behind_and_free=behind | free,
            crossing=sorted(crossing),
        )


@dataclass(frozen=True)
class Stages:
    """The instructions of a trace in stages: a turn of a loop computes each for other elements.

    A processor looks ahead by some hundred instructions: if all that waits for a root or a quotient follows it at once,
    there is little else to do meanwhile.

    Attributes:
        of: the stages' instructions; those of constants alone are in all.
        crossing: per stage but the last, which values of it or of earlier ones later ones need.
    """

    of: list[set[int]]
    crossing: list[list[int]]

    @classmethod
    def of_trace(cls, trace: Trace, several: bool) -> Stages:
        """Return the stages of a trace; each instruction is in the last in which it still comes in time.

        Args:
            trace: what is computed.
            several: whether there may be more than one stage.
        """
        lines = trace.lines
        varies: set[int] = set()
        for k, (name, operands, extra) in enumerate(lines):
            if name == "load" or (name == "input" and extra == STREAM[0]) or varies & set(operands):
                varies.add(k)
        before = [0] * len(lines)  # stages that are left behind an instruction
        until = [0] * len(lines)
        for k in reversed(range(len(lines))):
            if k not in varies:
                continue
            before[k] += several and lines[k][0] in _SLOW
            for operand in lines[k][1]:
                before[operand] = max(before[operand], before[k])
        count = 1 + max((before[k] for k in varies), default=0)
        stage = [count - 1 - left for left in before]
        for k in varies:
            for operand in lines[k][1]:
                until[operand] = max(until[operand], stage[k])
        for line in trace.stores.values():
            until[line] = count - 1
        free = set(range(len(lines))) - varies
        of = [{k for k in varies if stage[k] == number} | free for number in range(count)]
        crossing = [[k for k in sorted(varies) if stage[k] <= number < until[k]] for number in range(count - 1)]
        return cls(of, crossing)


def used_before(trace: Trace, waits: set[int]) -> list[int]:
    """Return the instructions stored, summed, or searched for the largest word before that word is known."""
    wanted = [*trace.stores.values(), *(number for _, number in trace.sums)]
    found = [k for k in wanted if k not in waits]
    return found + [k for name, operands, _ in trace.lines if name == "block_largest" for k in operands]


def in_turns(trace: Trace) -> list[int]:
    """Return the instructions in the order in which their operands can be there."""
    ready: list[int] = []
    for name, operands, _ in trace.lines:
        ready.append(max((ready[k] for k in operands), default=0) + _LATENCY.get(name, 1))
    return sorted(range(len(ready)), key=lambda k: (ready[k] - _LATENCY.get(trace.lines[k][0], 1), k))


def with_operands(trace: Trace, lines: Iterable[int]) -> set[int]:
    """Return instructions and all that they are computed from, up to a block's largest words."""
    found, left = set(), list(lines)
    while left:
        k = left.pop()
        if k not in found:
            found.add(k)
            left += [] if trace.lines[k][0] == "block_largest" else trace.lines[k][1]
    return found


LANES = 32  # neighbours that a broadcast operand repeats: the widest step of any kernel
_HEADER = 2  # words of the table before the operands: elements per row, elements in all
_WORDS = 3  # words per operand: address, elements from row to row, elements from neighbour to neighbour
_LONG = 3000  # instructions from which calls cost less than the compiler's time for writing all out


def compile_trace(
    name: str,
    trace: Trace,
    results: Sequence[int],
    stored: Sequence[torch.dtype],
    written: Sequence[torch.dtype],
    exact: bool = False,
) -> Kernel:
    """Return a function (first row, last row, table address) that runs a trace on rows of elements.

    Args:
        name: for the cache.
        trace: what to compute per element.
        results: the instructions whose values are written.
        stored: dtype in memory of each input (float16, bfloat16, float32, float64).
        written: dtype in memory of each result; the value must be one of it, or is rounded to nearest.
        exact: whether all results are numbers of their dtypes.

    The table is an int64 array: row length, element count, then for each input and each result address, row stride and
    neighbour stride (0 or 1). An input with neighbour stride 0 must hold LANES equal values from each row's address.
    """
    told = trace.digest(), tuple(results), tuple(stored), tuple(written), exact
    key = hashlib.sha256(repr(told).encode()).hexdigest()
    given = trace, tuple(results), tuple(stored), tuple(written), exact
    return compile_rows(name, key, lambda builder, *values: _Loop(builder, *given).build(*values))


def compile_rows(name: str, key: str, emit: Callable) -> Kernel:
    """Return a function (first row, last row, table address) of the instructions that emit(builder, *these) writes."""
    return machine_function(f"{name}_{key[:16]}", key, 3, lambda b, *values: emit(b.b, *values))


def native_lanes(dtype: torch.dtype) -> int:
    """Return the lanes of a vector register of the processor."""
    return vector_bits() // (64 if dtype == torch.float64 else 32)


class _Loop(VectorBuilder):
    """The loop over rows, vectors of neighbours, and remaining elements."""

    def __init__(self, builder, trace: Trace, results: tuple, stored: tuple, written: tuple, exact: bool) -> None:
        super().__init__(builder)
        self.exact = exact
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
            with self.loop(self.word(0), whole, self.lanes) as i:
                self.element([(base, b.mul(i, near)) for base, near in zip(bases, nears)])
            with b.if_then(b.icmp_signed("<", whole, count)):
                self.rest(bases, nears, whole, count)

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
            self.store(*place, dtype, values[number], self.exact)
