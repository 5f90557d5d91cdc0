"""Reductions of matrices along rows as machine code: blocks of rows in registers, then an accumulator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .._trace import Trace, Traced, record_function
from ._builder import VectorBuilder, count_lanes, get_element_bytes
from ._instructions import InstructionWriter
from ._loop import count_native_lanes
from ._machine_function import Kernel, compile_machine_function

# Lanes that the rows of a matrix with fewer columns are dealt to, whatever the processor's vectors.
LANES_OF_NARROW_MATRIX = 32
BLOCK_ROWS = 16  # rows that a step takes up one after another before they are joined to what came before


class ReductionSteps(NamedTuple):
    """The device functions of a reduction, on float64 values."""

    add_row: Callable  # a block's state and a row's components -> the state from there on
    add_block: Callable  # the accumulators and a block's state -> the accumulators from there on
    merge_lanes: Callable  # the accumulators of two lanes -> those of both together
    finish: Callable  # the final accumulators, and a number of the table -> the result's components
    accumulator_count: int  # how many accumulators there are, and values in a state
    initial_value: float  # the first of both before the first row; the others are zero

    def record_steps(self, component_count: int) -> tuple[tuple[Trace, list[int]], ...]:
        """Return the instructions of the four functions on rows of some components, and their results."""
        width = self.accumulator_count
        pieces = (
            (self.add_row, width + component_count),
            (self.add_block, 2 * width),
            (self.merge_lanes, 2 * width),
            (self.finish, width + 1),
        )
        found = (record_function(piece, torch.float64, count) for piece, count in pieces)
        return tuple(
            (trace, [x.number if isinstance(x, Traced) else trace.emit("add", (x, 0.0)).number for x in values])
            for trace, values in found
        )


def compile_reduction(
    name: str,
    steps: ReductionSteps,
    input_dtypes: Sequence[torch.dtype],
    output_dtypes: Sequence[torch.dtype],
    layout: str,
) -> Kernel:
    """Return a function (first segment, last segment, table address) that reduces segments of rows of matrices.

    Their `layout` is "line" (one column), "narrow" (fewer than LANES_OF_NARROW_MATRIX) or "wide" (at least as many);
    `input_dtypes` are the dtypes in memory of a row's components, `output_dtypes` those of the result's.

    The table is an int64 array: rows and columns of a matrix, rows of a segment, segments of a matrix, rows that lie
    side by side in the lanes of a narrow matrix (at most LANES_OF_NARROW_MATRIX / columns, of a line as many as there
    are lanes), elements in all, the number for `finish`; then the addresses of the matrices' components, which lie one
    after another without gaps, and of the results', one row for each segment.
    """
    pieces = steps.record_steps(len(input_dtypes))
    told = [(trace.digest(), numbers) for trace, numbers in pieces]
    key = hashlib.sha256(
        repr((told, steps.initial_value, tuple(input_dtypes), tuple(output_dtypes), layout)).encode()
    ).hexdigest()
    loop = {"line": _ColumnLoop, "narrow": _NarrowMatrixLoop, "wide": _WideMatrixLoop}[layout]
    given = pieces, steps.initial_value, tuple(input_dtypes), tuple(output_dtypes)
    name = f"{name}_{key[:16]}"
    return compile_machine_function(name, key, 3, lambda b, *values: loop(b.b, *given).write_kernel(*values))


class _ReductionLoop(VectorBuilder):
    """The base of the reduction loops."""

    def __init__(self, builder, pieces: tuple, start: float, input_dtypes: tuple, output_dtypes: tuple) -> None:
        super().__init__(builder)
        self.add_row, self.add_block, self.merge_function, self.finish = pieces
        self.input_dtypes, self.output_dtypes = input_dtypes, output_dtypes
        self.initial_state = [start] + [0.0] * (len(self.add_block[1]) - 1)

    def write_kernel(self, first, last, table) -> None:
        b = self.b
        words = [self.load_word(table, k) for k in range(7 + len(self.input_dtypes) + len(self.output_dtypes))]
        self.rows, self.columns, per_segment, segments, self.several, self.total, number, *addresses = words
        self.number = b.sitofp(number, self.f64)
        self.sources, self.targets = addresses[: len(self.input_dtypes)], addresses[len(self.input_dtypes) :]
        self.prepare_shared_values()
        with self.loop(first, last, 1) as segment:
            matrix = b.sdiv(segment, segments)
            top = b.mul(b.sub(segment, b.mul(matrix, segments)), per_segment)
            start = b.mul(b.add(b.mul(matrix, self.rows), top), self.columns)
            rows = self.select_lesser(b.sub(self.rows, top), per_segment)
            self.reduce_segment(start, rows, b.mul(segment, self.columns))

    def prepare_shared_values(self) -> None:
        """Set up values that are used by all segments."""

    def reduce_segment(self, start, rows, out) -> None:
        """The rows from element `start` on into the row of results at element `out`."""
        raise NotImplementedError

    def inline_function(self, piece: tuple, values: list) -> list:
        """Return the results of a device function."""
        computed = InstructionWriter(self.b, piece[0], count_lanes(values[0].type)).write_instructions(values)
        return [computed[number] for number in piece[1]]

    def reduce_vectors(self, lanes: int, turns, load: Callable) -> list:
        """Reduce the vectors load(0) ... load(turns - 1)."""
        begin = [self.constant(self.make_vector_type(self.f64, lanes), value) for value in self.initial_state]
        held = list(begin)
        with self.loop(self.int64(0), turns, BLOCK_ROWS, held) as first:
            state = list(begin)
            last = self.select_lesser(self.b.add(first, self.int64(BLOCK_ROWS)), turns)
            with self.loop(first, last, 1, state) as turn:
                state[:] = self.inline_function(self.add_row, [*state, *load(turn)])
            held[:] = self.inline_function(self.add_block, [*held, *state])
        return held

    def store_results(self, held: list, at) -> None:
        """Close and store from element `at` on."""
        values = self.inline_function(self.finish, [*held, self.splat(self.number, count_lanes(held[0].type))])
        for target, dtype, value in zip(self.targets, self.output_dtypes, values):
            self.store_reals(target, at, dtype, value)


class _WideMatrixLoop(_ReductionLoop):
    """The loop for wide matrices: vectors of columns, the last of which overlap the ones before."""

    def reduce_segment(self, start, rows, out) -> None:
        b = self.b
        # Four native vectors at once hide the latency of the chain of sums.
        lanes = 4 * count_native_lanes(torch.float64)
        kind = self.make_vector_type(self.f64, lanes)
        with self.loop(self.int64(0), self.columns, lanes) as i:
            i = self.select_lesser(i, b.sub(self.columns, self.int64(lanes)))
            top = b.add(start, i)

            def load(row) -> list:
                at = b.add(top, b.mul(row, self.columns))
                return [
                    self.load_reals(source, at, dtype, kind) for source, dtype in zip(self.sources, self.input_dtypes)
                ]

            self.store_results(self.reduce_vectors(lanes, rows, load), b.add(out, i))


class _NarrowMatrixLoop(_ReductionLoop):
    """The loop for narrow matrices: several rows in a vector; at the end a column's lanes are merged by halves."""

    def prepare_shared_values(self) -> None:
        b = self.b
        self.width = b.mul(self.several, self.columns)
        self.row_type = self.make_vector_type(self.f64, LANES_OF_NARROW_MATRIX)
        self.copies = [
            self.allocate_stack(neutral.type, LANES_OF_NARROW_MATRIX) for neutral in self.list_neutral_elements()
        ]
        # Twice as many, since a vector is read from any lane on.
        self.scratch = [self.allocate_stack(self.f64, 2 * LANES_OF_NARROW_MATRIX) for _ in self.initial_state]
        leading = b.ctlz(b.sub(self.several, self.int64(1)), self.ir.Constant(self.ir.IntType(1), 0))
        self.levels = b.sub(self.int64(64), leading)

    def reduce_segment(self, start, rows, out) -> None:
        b = self.b
        count = b.mul(rows, self.columns)
        turns = b.sdiv(b.add(count, b.sub(self.width, self.int64(1))), self.width)

        def load(turn) -> list:
            return self.load_vector(start, count, b.mul(turn, self.width))

        self.merge_lanes_and_store(self.reduce_vectors(LANES_OF_NARROW_MATRIX, turns, load), out)

    def merge_lanes_and_store(self, held: list, out) -> None:
        """Merge the lanes of each column, and write the results."""
        b = self.b
        self.write_lanes_to_scratch(self.merge_lanes(held))
        with self.loop(self.int64(0), self.columns, 1) as column:
            self.store_results([b.load(b.gep(part, [column])) for part in self.scratch], b.add(out, column))

    def load_vector(self, start, count, offset) -> list:
        """Load the components of `width` elements from an offset, by a copy where memory or segment ends before."""
        b = self.b
        at, left = b.add(start, offset), b.sub(count, offset)
        whole = b.icmp_signed("<=", self.width, left)
        readable = b.icmp_signed("<=", b.add(at, self.int64(LANES_OF_NARROW_MATRIX)), self.total)
        direct = b.and_(whole, readable)
        with b.if_then(b.not_(direct), likely=False), b.if_else(readable) as (near, far):
            for case, copy_some in ((near, self.copy_vector), (far, self.copy_elements)):
                with case:
                    copy_some(at, self.select_lesser(self.width, left))
        found = []
        for source, copy, dtype in zip(self.sources, self.copies, self.input_dtypes):
            base = b.add(source, b.mul(at, self.int64(get_element_bytes(dtype))))
            base = b.select(direct, base, b.ptrtoint(copy, self.i64))
            found.append(self.load_reals(base, self.int64(0), dtype, self.row_type))
        return found

    def copy_vector(self, at, count) -> None:
        """Copy `count` elements of a vector; the other lanes get the neutral element."""
        b, wanted = self.b, self.mask_lanes_below(count)
        for source, copy, neutral, dtype in zip(
            self.sources, self.copies, self.list_neutral_elements(), self.input_dtypes
        ):
            base = b.add(source, b.mul(at, self.int64(get_element_bytes(dtype))))
            elements = self.load_bits(base, self.int64(0), dtype, LANES_OF_NARROW_MATRIX)
            value = b.select(wanted, elements, self.constant(elements.type, neutral.constant))
            b.store(value, b.bitcast(copy, value.type.as_pointer()), align=get_element_bytes(dtype))

    def copy_elements(self, at, count) -> None:
        """Copy elements one by one where a vector would end beyond memory."""
        b = self.b
        for source, copy, neutral in zip(self.sources, self.copies, self.list_neutral_elements()):
            elements = self.pointer(source, at, neutral.type)
            with self.loop(self.int64(0), self.int64(LANES_OF_NARROW_MATRIX), 1) as k:
                b.store(neutral, b.gep(copy, [k]))
            with self.loop(self.int64(0), count, 1) as k:
                b.store(b.load(b.gep(elements, [k])), b.gep(copy, [k]))

    def list_neutral_elements(self) -> list:
        """Return the neutral element's components, as words in memory."""
        found = []
        for k, dtype in enumerate(self.input_dtypes):
            value = torch.tensor(0.0 if k else self.initial_state[0], dtype=dtype, device="cpu")
            bits = value.view(getattr(torch, f"int{8 * get_element_bytes(dtype)}")).item()
            found.append(self.ir.Constant(self.get_memory_type(dtype), bits))
        return found

    def mask_lanes_below(self, count):
        """Return a mask of the lanes below a number."""
        lanes = self.ir.Constant(
            self.ir.VectorType(self.i64, LANES_OF_NARROW_MATRIX), list(range(LANES_OF_NARROW_MATRIX))
        )
        return self.b.icmp_signed("<", lanes, self.splat(count, LANES_OF_NARROW_MATRIX))

    def merge_lanes(self, held: list) -> list:
        """Merge the rows in the lanes into one row: the second half into the first, and so on."""
        b, values = self.b, [self.several, *held]
        with self.loop(self.int64(0), self.levels, 1, values):
            rows, *held = values
            half = b.lshr(b.add(rows, self.int64(1)), self.int64(1))
            self.write_lanes_to_scratch(held)
            base = [b.ptrtoint(b.gep(part, [b.mul(half, self.columns)]), self.i64) for part in self.scratch]
            other = [self.load_reals(address, self.int64(0), torch.float64, self.row_type) for address in base]
            mask = self.mask_lanes_below(b.mul(b.sub(rows, half), self.columns))
            pairs = self.inline_function(self.merge_function, [*held, *other])
            values[:] = [half, *(b.select(mask, new, old) for new, old in zip(pairs, held))]
        return values[1:]

    def write_lanes_to_scratch(self, held: list) -> None:
        """Write lanes to memory."""
        for part, value in zip(self.scratch, held):
            self.store_reals(self.b.ptrtoint(part, self.i64), self.int64(0), torch.float64, value)


class _ColumnLoop(_NarrowMatrixLoop):
    """The loop for one column: the halves are merged in registers."""

    def merge_lanes_and_store(self, held: list, out) -> None:
        half = LANES_OF_NARROW_MATRIX
        while half > 1:
            half //= 2
            low, high = ([self.extract_lanes(value, first, half) for value in held] for first in (0, half))
            held = self.inline_function(self.merge_function, [*low, *high])
        self.store_results(held, out)
