"""A trace as machine code: one loop over elements, in LLVM's vector types, each instruction in its phase."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._device_function import RANDOM_STREAM_INPUT_NAMES
from .._trace import Trace
from ._builder import VectorBuilder, get_element_bytes, get_lane_type
from ._instructions import InstructionWriter
from ._machine_function import Kernel, compile_machine_function
from ._processor import find_vector_bits

# Cycles after which a result is there, where they are more than one.
_LATENCY_CYCLES_BY_OPERATION = {"sqrt": 20, "div": 13, "select": 2}
_LATENCY_CYCLES_BY_OPERATION |= dict.fromkeys(("add", "sub", "mul", "word_mul", "to_real", "to_word"), 3)
# Operations that are computed again behind a block's largest words, rather than kept: their operands are no larger.
_OPERATIONS_RECOMPUTED_AFTER_LARGEST = ("bits", "to_float64")


class BlockPhases(NamedTuple):
    """The instructions of a trace by what they need of a block's largest words."""

    largest_lines: list[int]  # find one
    first_loop_lines: set[int]  # need none, are not postponed, and read elements or constants and counters alone
    uniform_lines: set[int]  # of largest words and constants, and what they are computed from
    lines_after_largest: set[int]  # all others
    second_loop_lines: set[int]  # those, and what constants and counters alone give, which is computed again
    carried_lines: list[int]  # values from before that are needed behind
    per_block_lines: set[int]  # need a largest word or find one, and have one result per block
    block_result_lines: list[int]  # those of them that are needed behind, and all largest words


def split_into_block_phases(trace: Trace) -> BlockPhases:
    """Return the phases of a trace of blocks."""
    lines, varies = trace.lines, _find_varying_instructions(trace)
    reads: set[int] = set()
    waits: set[int] = set()  # for the block's largest
    for k, (name, operands, _) in enumerate(lines):
        if name == "block_largest":
            assert not waits & set(operands), "a block has one round of largest words"
            waits.add(k)
        elif waits & set(operands):
            waits.add(k)
        elif name == "load" or reads & set(operands):
            reads.add(k)
    everything = set(range(len(lines)))
    largest = [k for k in sorted(waits) if lines[k][0] == "block_largest"]
    moved = _find_lines_to_postpone(trace, reads, largest)
    reads, waits = reads - moved, waits | moved
    uniform = waits - varies - set(largest)
    behind = waits - uniform - set(largest)
    needed, crossing = [operand for k in sorted(behind) for operand in lines[k][1]], set()
    while needed:
        k = needed.pop()
        if k in reads and (trace.kinds[k] == "mask" or lines[k][0] in _OPERATIONS_RECOMPUTED_AFTER_LARGEST):
            behind.add(k)
            needed += lines[k][1]
        elif k in reads:
            crossing.add(k)
    free, summed = everything - waits - reads, {number for _, number in trace.sums}
    both = {k for k in free & varies if trace.kinds[k] != "mask"} & find_dependencies(trace, behind)
    wanted = {*trace.stores.values(), *summed} - waits
    both &= find_dependencies(trace, [*crossing, *wanted, *(lines[k][1][0] for k in largest)])
    # What is computed in both loops, such as a hash of the counter, is kept instead, but for what it is made from.
    crossing |= {k for k in both if k not in {n for other in both for n in lines[other][1]}}
    used = {operand for k in behind for operand in lines[k][1]} | summed
    used |= {line for (_, _, per_block), line in trace.stores.items() if per_block}
    return BlockPhases(
        largest_lines=largest,
        first_loop_lines=everything - waits,
        uniform_lines=find_dependencies(trace, uniform) - set(largest),
        lines_after_largest=behind,
        second_loop_lines=behind | free,
        carried_lines=sorted(crossing),
        per_block_lines=uniform | set(largest),
        block_result_lines=sorted(uniform & used | set(largest)),
    )


def _find_lines_to_postpone(trace: Trace, reads: set[int], largest: list[int]) -> set[int]:
    """Return what waits for a quotient, and what that alone needs, where a block's largest words do not need it.

    Beside the roots it would fill the processor's queue of waiting instructions; behind the largest words is less to
    wait for. What rare masks choose stays, as their vectors are computed apart.
    """
    lines, chosen, moved = trace.lines, set(trace.rare_masks), set[int]()
    early = find_dependencies(trace, [lines[k][1][0] for k in largest])
    for k, (name, operands, _) in enumerate(lines):
        if chosen & set(operands):
            chosen.add(k)
        if k in reads - early and (name == "div" or moved & set(operands)):
            moved.add(k)
    needed = chosen | early | set(trace.find_output_instructions())
    stored = [array for array, k in trace.stores.items() if k not in moved]
    for k, (name, operands, extra) in reversed([*enumerate(lines)]):
        is_kept = k in needed or (name == "load" and (extra[1] or (*operands, *extra) in stored))
        if k in reads and not is_kept:
            moved.add(k)
        if k not in moved:
            needed |= set(operands)
    return moved


class LoopStages(NamedTuple):
    """The instructions of a trace in two stages: a turn of a loop computes each for other elements.

    A processor looks ahead by some hundred instructions: if all that waits for a root follows it at once, there is
    little else to do meanwhile.
    """

    early_lines: set[int]  # the roots and what they are computed from
    late_lines: set[int]  # all others, and those of constants alone, which are in both
    carried_lines: list[int]  # the early ones that late ones need, and what is stored of them


def split_into_loop_stages(trace: Trace) -> LoopStages | None:
    """Return the stages of a trace; None where it has no root of anything that varies between elements."""
    everything, varies = set(range(len(trace.lines))), _find_varying_instructions(trace)
    early = find_dependencies(trace, [k for k in varies if trace.lines[k][0] == "sqrt"])
    late = everything - (early & varies)
    used = {operand for k in late for operand in trace.lines[k][1]} | set(trace.stores.values())
    if not early & varies:
        return None
    return LoopStages(early | (everything - varies), late, sorted(early & varies & used))


def _find_varying_instructions(trace: Trace) -> set[int]:
    """Return the instructions whose values differ between the elements of a block."""
    varies: set[int] = set()
    for k, (name, operands, extra) in enumerate(trace.lines):
        is_source = name == "load" or (name == "input" and extra == RANDOM_STREAM_INPUT_NAMES[0])
        if name != "block_largest" and (is_source or varies & set(operands)):
            varies.add(k)
    return varies


def schedule_instructions(trace: Trace) -> list[int]:
    """Return the instructions in the order in which their operands can be there."""
    ready: list[int] = []
    for name, operands, _ in trace.lines:
        ready.append(max((ready[k] for k in operands), default=0) + _LATENCY_CYCLES_BY_OPERATION.get(name, 1))
    return sorted(
        range(len(ready)), key=lambda k: (ready[k] - _LATENCY_CYCLES_BY_OPERATION.get(trace.lines[k][0], 1), k)
    )


def find_dependencies(trace: Trace, lines: Iterable[int]) -> set[int]:
    """Return instructions and all that they are computed from, up to a block's largest words."""
    found, left = set(), list(lines)
    while left:
        k = left.pop()
        if k not in found:
            found.add(k)
            left += [] if trace.lines[k][0] == "block_largest" else trace.lines[k][1]
    return found


BROADCAST_COPIES = 32  # neighbours that a broadcast operand repeats: the widest step of any kernel
_TABLE_HEADER_WORDS = 2  # words of the table before the operands: elements per row, elements in all
_WORDS_PER_OPERAND = 3  # words per operand: address, elements from row to row, elements from neighbour to neighbour
_LEAST_INSTRUCTIONS_FOR_CALLS = 3000  # from which on calls cost less than the compiler's time for writing all out


class FastPathTrace(NamedTuple):
    """A short trace for arrays of bfloat16 or float16, which has the same results except where it doubts them."""

    trace: Trace
    results: tuple[int, ...]  # instructions whose values are numbers of the outputs' dtypes, one for each
    doubt_mask_line: int  # the instruction of the mask of elements that the other trace computes


def compile_trace(
    name: str,
    trace: Trace,
    results: Sequence[int],
    input_dtypes: Sequence[torch.dtype],
    output_dtypes: Sequence[torch.dtype],
    fast_path: FastPathTrace | None = None,
    exact: bool = False,
) -> Kernel:
    """Return a function (first row, last row, table address) that runs a trace on rows of elements.

    The table is an int64 array: row length, element count, then for each input and each result address, row stride and
    neighbour stride (0 or 1). An input with neighbour stride 0 must hold BROADCAST_COPIES equal values from each row's
    address. `results` are the instructions whose values are written, rounded to nearest in the `output_dtypes` unless
    they are `exact`; `fast_path` computes most elements in less time, where all dtypes have 16 bits.
    """
    short = fast_path and (fast_path.trace.digest(), fast_path.results, fast_path.doubt_mask_line)
    told = trace.digest(), tuple(results), tuple(input_dtypes), tuple(output_dtypes), exact, *([short] if short else [])
    key = hashlib.sha256(repr(told).encode()).hexdigest()
    given = trace, tuple(results), tuple(input_dtypes), tuple(output_dtypes), fast_path, exact
    name = f"{name}_{key[:16]}"
    return compile_machine_function(name, key, 3, lambda b, *values: _RowLoop(b.b, *given).write_kernel(*values))


def count_native_lanes(dtype: torch.dtype) -> int:
    """Return the lanes of a vector register of the processor."""
    return find_vector_bits() // (64 if dtype == torch.float64 else 32)


class _RowLoop(VectorBuilder):
    """The loop over rows, vectors of neighbours, and remaining elements."""

    def __init__(self, builder, trace: Trace, results, input_dtypes, output_dtypes, fast_path, exact: bool) -> None:
        super().__init__(builder)
        self.fast_path, self.exact = fast_path, exact
        self.trace, self.results, self.input_dtypes, self.output_dtypes = trace, results, input_dtypes, output_dtypes
        self.lanes = count_native_lanes(trace.dtype)
        self.real_type = self.make_vector_type(self.f64 if trace.dtype == torch.float64 else self.f32, self.lanes)
        self.calls_functions = trace.count_instructions() > _LEAST_INSTRUCTIONS_FOR_CALLS

    def write_kernel(self, first, last, table) -> None:
        b, lanes = self.b, self.int64(self.lanes)
        per_row, total = self.load_word(table, 0), self.load_word(table, 1)
        operands = []
        for k in range(len(self.input_dtypes) + len(self.output_dtypes)):
            first_word = _TABLE_HEADER_WORDS + _WORDS_PER_OPERAND * k
            operands.append(tuple(self.load_word(table, first_word + j) for j in range(_WORDS_PER_OPERAND)))
        with self.loop(first, last, 1) as row:
            start = b.mul(row, per_row)
            count = self.select_lesser(b.sub(total, start), per_row)
            bases = [
                b.add(address, b.mul(b.mul(row, step), self.int64(get_element_bytes(dtype))))
                for (address, step, _), dtype in zip(operands, self.input_dtypes + self.output_dtypes)
            ]
            whole, neighbour_strides = b.mul(b.sdiv(count, lanes), lanes), [near for _, _, near in operands]
            if self.fast_path is None:
                self.write_whole_vectors(bases, neighbour_strides, self.int64(0), whole)
            else:
                done = self.write_fast_path_vectors(self.fast_path, bases, neighbour_strides, count)
                self.write_whole_vectors(bases, neighbour_strides, done, whole)
            with b.if_then(b.icmp_signed("<", whole, count)):
                self.write_last_elements(bases, neighbour_strides, whole, count)

    def write_whole_vectors(self, bases: list, neighbour_strides: list, low, high) -> None:
        """Write the loop over whole vectors of elements [low, high)."""
        with self.loop(low, high, self.lanes) as i:
            self.write_vector([(base, self.b.mul(i, near)) for base, near in zip(bases, neighbour_strides)])

    def write_fast_path_vectors(self, fast_path: FastPathTrace, bases: list, neighbour_strides: list, count) -> Any:
        """Write the loop over pairs of vectors, whose neighbours are words of two, and return where it ends.

        Vectors with an element in doubt are computed by the other trace, before anything is stored, as outputs may be
        inputs too.
        """
        b, lanes = self.b, count_native_lanes(fast_path.trace.dtype)
        words, width = self.make_vector_type(self.i32, lanes), self.int64(2 * lanes)
        done = b.mul(b.sdiv(count, width), width)
        real = self.make_vector_type(self.f64 if fast_path.trace.dtype == torch.float64 else self.f32, lanes)
        with self.loop(self.int64(0), done, 2 * lanes) as i:
            kind = self.make_vector_type(self.i16, 2 * lanes)
            places = [
                b.bitcast(self.pointer(base, b.mul(i, near), kind), words.as_pointer())
                for base, near in zip(bases, neighbour_strides)
            ]
            pairs = [
                self.unpack_16bit_pairs(b.load(at, align=2), dtype, real)
                for at, dtype in zip(places, self.input_dtypes)
            ]
            halves = [
                InstructionWriter(b, fast_path.trace, lanes).write_instructions(list(half)) for half in zip(*pairs)
            ]
            doubt = b.bitcast(b.or_(*(half[fast_path.doubt_mask_line] for half in halves)), self.ir.IntType(lanes))
            with b.if_else(b.icmp_unsigned("!=", doubt, self.ir.Constant(doubt.type, 0)), likely=False) as (slow, fast):
                with slow:
                    self.write_whole_vectors(bases, neighbour_strides, i, b.add(i, width))
                with fast:
                    for number, at, dtype in zip(
                        fast_path.results, places[len(self.input_dtypes) :], self.output_dtypes
                    ):
                        b.store(self.pack_16bit_pairs([half[number] for half in halves], dtype), at, align=2)
        return done

    def unpack_16bit_pairs(self, pair, dtype: torch.dtype, real) -> list:
        """Return the two neighbours in words as reals: a shift gives an even bfloat16 as float32, a mask an odd one."""
        b, shift, short = self.b, self.constant(pair.type, 16), self.make_type_like(pair, self.i16)
        if dtype == torch.float16:
            return [
                self.convert_to_reals(b.trunc(x, short), dtype, get_lane_type(real))
                for x in (pair, b.lshr(pair, shift))
            ]
        even, odd = b.shl(pair, shift), b.and_(pair, self.constant(pair.type, 0xFFFF0000))
        return [self.convert_to_reals(x, torch.float32, get_lane_type(real)) for x in (even, odd)]

    def pack_16bit_pairs(self, values: list, dtype: torch.dtype):
        """Return two neighbours, which are numbers of a dtype, as words."""
        b, single = self.b, self.make_type_like(values[0], self.f32)
        words, shift = (
            self.make_type_like(values[0], self.i32),
            self.constant(self.make_type_like(values[0], self.i32), 16),
        )
        even, odd = values if values[0].type == single else [b.fptrunc(value, single) for value in values]
        if dtype == torch.float16:
            even, odd = (b.zext(self.convert_to_float16_bits(value), words) for value in (even, odd))
            return b.or_(even, b.shl(odd, shift))
        return b.or_(b.lshr(b.bitcast(even, words), shift), b.bitcast(odd, words))

    def write_last_elements(self, bases: list, neighbour_strides: list, whole, count) -> None:
        """Process a row's last elements, fewer than a vector, in a padded copy."""
        b, last, lanes = self.b, self.b.sub(count, self.int64(1)), self.lanes
        kinds = [self.get_memory_type(dtype) for dtype in self.input_dtypes + self.output_dtypes]
        copies = [self.allocate_stack(kind, lanes) for kind in kinds]
        inputs = list(zip(kinds, copies, bases, neighbour_strides))[: len(self.input_dtypes)]
        outputs = list(zip(kinds, copies, bases))[len(self.input_dtypes) :]
        with self.loop(self.int64(0), self.int64(lanes), 1) as j:
            i = b.add(whole, j)
            i = b.select(b.icmp_signed("<", i, count), i, last)
            for kind, copy, base, near in inputs:
                b.store(b.load(self.pointer(base, b.mul(i, near), kind)), b.gep(copy, [j]))
        self.write_vector([(b.ptrtoint(copy, self.i64), self.int64(0)) for copy in copies])
        with self.loop(whole, count, 1) as i:
            for kind, copy, base in outputs:
                b.store(b.load(b.gep(copy, [b.sub(i, whole)])), self.pointer(base, i, kind))

    def write_vector(self, places: list[tuple[Any, Any]]) -> None:
        """Write all instructions for a vector of neighbours."""
        inputs = [self.load_reals(*place, dtype, self.real_type) for place, dtype in zip(places, self.input_dtypes)]
        values = InstructionWriter(self.b, self.trace, self.lanes, self.calls_functions).write_instructions(inputs)
        for number, place, dtype in zip(self.results, places[len(self.input_dtypes) :], self.output_dtypes):
            self.store_reals(*place, dtype, values[number], self.exact)
