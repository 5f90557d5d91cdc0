"""The loop of a recorded device function over arrays in a table of pointers, a chunk of neighbours at a time.

Two vectors are computed at once. Where an array has elements of 8 or 16 bits, one holds its even elements and the other
its odd ones: two neighbours are one word, of which a shift gives one and a mask the other, without the shuffles by
which narrow vectors are widened and packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from .._device_function import CHUNK_FIELD_COUNT, RANDOM_STREAM_INPUT_NAMES, PointerTableFunction
from .._trace import COUNTER_COPIES
from ._builder import VectorBuilder, get_lane_type
from ._instructions import InstructionWriter
from ._loop import LoopStages, find_dependencies, schedule_instructions, split_into_block_phases, split_into_loop_stages
from ._machine_function import Kernel, compile_machine_function
from ._processor import find_vector_bits

_MOST_INTERLEAVED_BLOCK_ELEMENTS = 512  # of small blocks whose computations alternate
_LEAST_ARRAYS_TO_PREFETCH = 3
_PREFETCH_DISTANCE_BYTES, _FAR_PREFETCH_DISTANCE_BYTES, _CACHE_LINE_BYTES = 1024, 8192, 64


class ArrayKey(NamedTuple):
    """An array that a kernel reads or writes, as loads and stores of its trace name it."""

    address_line: int  # the instruction of its address
    bits: int  # of an element
    per_block: bool  # whether there is one element for each block, not one for each element


def compile_pointer_table_kernel(name: str, table: PointerTableFunction) -> Kernel:
    """Return the function (first and last chunk, addresses of chunks, pointers, rows, constants, keys, sums).

    The arrays are int64 (chunks, 4), int64 (rows, columns), int64 (rows,): the row of a row's constants, then numbers
    (rows of constants, constants), uint64 (rows,): keys, and float64 (chunks, `table.sum_column_count`).
    """
    return compile_machine_function(
        name,
        table.make_cache_key(),
        8,
        lambda b, *values: PointerTableLoop(b.b, table).write_kernel(*values),
        optimized=not table.skips_compiler_optimization,
    )


def compile_single_row_kernel(name: str, table: PointerTableFunction) -> Kernel:
    """Return `compile_pointer_table_kernel`'s function of a single row, without sums.

    It takes first and last chunk, the addresses of chunks and constants, 0, the key, and the row's pointers.
    """

    def write(b: VectorBuilder, first, last, chunks, constants, *_) -> None:
        row, key, pointers = (b.b.add(b.arguments_address, b.int64(8 * k)) for k in (4, 5, 6))
        PointerTableLoop(b.b, table).write_kernel(first, last, chunks, pointers, row, constants, key, b.int64(0))

    return compile_machine_function(name, f"row {table.make_cache_key()}", 6 + table.column_count, write)


class PointerTableLoop(VectorBuilder):
    """Writes the loop of a kernel over a table of pointers."""

    def __init__(self, builder, table: PointerTableFunction) -> None:
        super().__init__(builder)
        self.table, self.trace = table, table.trace
        assert not (table.block_size and self.trace.counter_additions), (
            "a block's elements are in no order in which they could add up"
        )
        self.lanes = find_vector_bits() // 32
        while table.block_size and 2 * self.lanes > max(table.block_size, 8):
            self.lanes //= 2
        self.width = 2 * self.lanes
        self.padded_block_size = -(-(table.block_size or 0) // self.width) * self.width
        self.copies_blocks = table.has_partial_blocks or self.padded_block_size != table.block_size
        self.blocks_at_once = (
            1
            if self.copies_blocks
            else max(1, min(find_vector_bits() // 32, _MOST_INTERLEAVED_BLOCK_ELEMENTS // self.padded_block_size))
        )
        self.phases = split_into_block_phases(self.trace)
        has_stages = not (table.block_size or self.trace.sums or self.trace.counter_additions)
        self.stages = split_into_loop_stages(self.trace) if has_stages else None
        lines = self.trace.lines
        self.constant_inputs = [
            (x[2], kind) for x, kind in zip(lines, self.trace.kinds) if x[0] == "input" and x[2][0] == "constant"
        ]
        self.column_by_line = {k: extra for k, (name, _, extra) in enumerate(lines) if name == "address"}
        self.loads = [ArrayKey(operands[0], *extra) for name, operands, extra in lines if name == "load"]
        self.stores = {ArrayKey(*key): number for key, number in self.trace.stores.items()}
        self.arrays = list(dict.fromkeys([*self.loads, *self.stores]))
        assert not self.copies_blocks or all(array.bits > 4 for array in self.arrays), (
            "half bytes are read in whole blocks"
        )
        self.splits_even_and_odd = any(array.bits < 32 for array in self.arrays if not array.per_block)
        self.instruction_order = schedule_instructions(self.trace)
        self.scalar_inputs: dict[Any, Any] = {}
        self.vector_inputs: dict[Any, Any] = {}
        self.address_by_column: dict[int, Any] = {}  # of the array in each column that is read or written
        # What elements are copied to, and what the loops over a block hand on.
        room = self.padded_block_size * self.blocks_at_once if table.block_size else self.width
        copied = self.arrays if not table.block_size or self.copies_blocks else []
        self.padded_copies = {array: self.allocate_stack(self.ir.IntType(array.bits), room) for array in copied}
        crossing = self.phases.carried_lines if table.block_size else []
        self.carried_buffers = [
            self.allocate_stack(get_lane_type(self.get_vector_type_of_line(line)), room) for line in crossing
        ]
        self.block_result_buffers = {
            line: self.allocate_stack(get_lane_type(self.get_memory_type_of_instruction(line)), self.blocks_at_once)
            for line in self.phases.block_result_lines
        }
        # A row per block, where as many blocks are computed at once as a vector has lanes.
        in_rows = self.phases.largest_lines if table.block_size and self.blocks_at_once == self.lanes else []
        self.lane_maxima = {line: self.allocate_stack(self.i32, self.blocks_at_once * self.lanes) for line in in_rows}

    def write_kernel(self, first, last, chunks, pointers, rows, constants, keys, sums) -> None:
        """Write the loop over chunks."""
        b, table = self.b, self.table
        with self.loop(first, last, 1) as c:
            at = b.mul(c, self.int64(CHUNK_FIELD_COUNT))
            row, begin, count, index = (self.load_word_at(chunks, at, k) for k in range(CHUNK_FIELD_COUNT))
            pointer = b.mul(row, self.int64(table.column_count))
            used = {self.column_by_line[address] for address, *_ in [*self.arrays, *self.trace.counter_additions]}
            self.address_by_column = {column: self.load_word_at(pointers, pointer, column) for column in sorted(used)}
            if self.constant_inputs:
                size = int(self.constant_inputs[0][1][1:]) // 8
                own = b.mul(self.load_word_at(rows, row, 0), self.int64(table.constant_count * size))
                for name, kind in self.constant_inputs:
                    place = self.pointer(b.add(constants, own), self.int64(name[1]), self.make_type_of_kind(kind, 1))
                    self.set_scalar_input(name, b.load(place))
            if table.random_stream_function:
                # The counter of the chunk's first element, and the stream's own word if it has one.
                key, start = self.load_word_at(keys, row, 0), table.random_stream_function
                halves = b.trunc(key, self.i32), b.trunc(b.lshr(key, self.int64(32)), self.i32)
                values = InstructionWriter(b, start.trace, 1).write_instructions([*halves, index])
                self.first_random_counter, *own_words = (values[number] for number in start.results)
                for name, value in zip(RANDOM_STREAM_INPUT_NAMES[1:], own_words):
                    self.set_scalar_input(name, value)
            kinds = self.trace.kinds
            wide = [how == "sum" or (how == "max" and kinds[number] == "f64") for how, number in self.trace.sums]
            vectors = [self.make_vector_type(self.f64 if is_wide else self.i32, self.lanes) for is_wide in wide]
            totals = [self.ir.Constant(kind, None) for kind in vectors for _ in range(2)]
            (self.write_block_loop if table.block_size else self.write_vector_loop)(begin, count, totals)
            reduced = [self.reduce_total_lanes(how, totals[2 * k :][:2]) for k, (how, _) in enumerate(self.trace.sums)]
            for k, total in enumerate(reduced):
                place = self.pointer(sums, b.add(b.mul(c, self.int64(table.sum_column_count)), self.int64(k)), self.f64)
                b.store(total, place)
        if table.uses_nontemporal_stores:
            b.fence("seq_cst")  # such stores are in no order with others

    def set_scalar_input(self, name: tuple, value) -> None:
        """Take a scalar for an input."""
        self.scalar_inputs[name], self.vector_inputs[name] = value, self.splat(value, self.lanes)

    def load_word_at(self, table, first, k: int):
        """Load word k behind the first of a table of 64-bit integers."""
        return self.b.load(self.pointer(table, self.b.add(first, self.int64(k)), self.i64))

    def list_element_offsets_of_lanes(self) -> list[list[int]]:
        """Return which neighbours the lanes of the two vectors are."""
        every = list(range(self.width))
        return [every[::2], every[1::2]] if self.splits_even_and_odd else [every[: self.lanes], every[self.lanes :]]

    # whole vectors, and what remains ---------------------------------------------------------------------------

    def write_vector_loop(self, begin, count, totals: list) -> None:
        """Write the loop over a chunk's whole vectors, then once more over a padded copy of what remains."""
        b, width = self.b, self.int64(self.width)
        whole = b.mul(b.sdiv(count, width), width)
        rest = b.sub(count, whole)
        zero, one = self.int64(0), self.int64(1)
        held = {array: b.ptrtoint(self.padded_copies[array], self.i64) for array in self.arrays}
        bases = {
            array: b.add(
                self.address_by_column[self.column_by_line[array.address_line]],
                b.mul(begin, self.int64(array.bits // 8)),
            )
            for array in self.arrays
        }
        ends = {array: b.add(base, self.count_bytes(whole, array.bits)) for array, base in bases.items()}
        if self.trace.sums or self.trace.counter_additions:
            # Only of what remains it is asked which lanes are elements.
            with self.loop(zero, whole, self.width, totals) as i:
                self.write_body_for_vector_pair(bases, i, i, totals, None)
            with self.loop(zero, rest, self.width, totals) as i:
                self.copy_with_padding(ends, rest)
                self.write_body_for_vector_pair(held, i, whole, totals, rest)
                self.write_copies_back(ends, rest)
            return
        first = b.select(b.icmp_signed(">", whole, zero), zero, one)
        last = b.select(b.icmp_signed(">", rest, zero), self.int64(2), one)
        with self.loop(first, last, 1) as phase:
            is_rest = b.icmp_signed("==", phase, one)
            with b.if_then(is_rest):
                self.copy_with_padding(ends, rest)
            used = {array: b.select(is_rest, held[array], bases[array]) for array in self.arrays}
            limit, before = b.select(is_rest, rest, whole), b.select(is_rest, whole, zero)
            if self.stages:
                self.write_pipelined_loop(self.stages, limit, before, used)
            else:
                with self.loop(zero, limit, self.width) as i:
                    self.write_body_for_vector_pair(used, i, b.add(before, i), [], None)
            with b.if_then(is_rest):
                self.write_copies_back(ends, rest)

    def write_body_for_vector_pair(self, bases: dict, i, place, totals: list, limit) -> None:
        """Write what happens to two vectors from i on, at a place in the chunk; lanes beyond the limit are padding."""
        loaded = {array: self.load_vector_pair(bases[array], i, array.bits) for array in dict.fromkeys(self.loads)}
        self.prefetch_arrays(bases, i)
        values = self.compute_vectors(loaded, place)
        self.store_results(values, self.stores, bases, i)
        self.write_counter_additions(values, limit)
        self.add_to_totals(values, i, totals, limit, range(len(self.trace.lines)))

    def write_pipelined_loop(self, stages: LoopStages, limit, before, bases: dict) -> None:
        """Write the loop over whole vectors in two stages: a turn stores what the turn before has begun."""
        # The first turn only begins; the last begins again what is there.
        b, zero, width, carried_lines = self.b, self.int64(0), self.int64(self.width), stages.carried_lines
        last = b.sub(limit, width)
        last = b.select(b.icmp_signed(">", last, zero), last, zero)
        carried = [self.ir.Constant(self.get_vector_type_of_line(k), None) for k in carried_lines for _ in range(2)]
        with self.loop(zero, b.add(limit, width), self.width, carried) as i:
            held = [dict(zip(carried_lines, carried[half::2])) for half in range(2)]
            with b.if_then(b.icmp_signed(">=", i, width)):
                at = b.sub(i, width)
                values = self.compute_stage(stages.late_lines, at, before, bases, held)
                self.store_results(values, self.stores, bases, at)
            self.prefetch_arrays(bases, i)
            values = self.compute_stage(stages.early_lines, self.select_lesser(i, last), before, bases, [{}, {}])
            carried[:] = [values[half][k] for k in carried_lines for half in range(2)]

    def compute_stage(self, lines: set[int], i, before, bases: dict, known: list[dict]) -> list[list]:
        """Return the values of two vectors in one stage, those known from the stage before too."""
        loaded = {array: self.load_vector_pair(bases[array], i, array.bits) for array in self.list_loaded_arrays(lines)}
        return self.compute_vectors(loaded, self.b.add(before, i), known, lines | known[0].keys())

    def prefetch_arrays(self, bases: dict, i, ahead: int | None = None) -> None:
        """Ask for the cache lines `ahead` bytes behind element i, by default those that are needed some turns later.

        Processors do that by themselves for a few arrays, and only within a page: 2,048 elements of 16 bits.
        """
        arrays = [array for array in dict.fromkeys(self.loads) if not array.per_block]
        is_far = self.table.exceeds_caches
        if ahead is None and len(arrays) < _LEAST_ARRAYS_TO_PREFETCH and not is_far:
            return
        ahead = (_FAR_PREFETCH_DISTANCE_BYTES if is_far else _PREFETCH_DISTANCE_BYTES) if ahead is None else ahead
        for array in arrays:
            first = self.b.add(bases[array], self.count_bytes(i, array.bits))
            for line in range(ahead, ahead + self.width * array.bits // 8, _CACHE_LINE_BYTES):
                # Far ones come into the second level, whose queue of pending lines is longer.
                self.prefetch_line(self.b.add(first, self.int64(line)), 2 if is_far else 3)

    def write_copies_back(self, bases: dict, count) -> None:
        """Write what the copies hold where it belongs."""
        b = self.b
        with self.loop(self.int64(0), count, 1) as j:
            for array in self.stores:
                value = b.load(b.gep(self.padded_copies[array], [j]))
                b.store(value, self.pointer(bases[array], j, self.ir.IntType(array.bits)))

    # blocks ----------------------------------------------------------------------------------------------------

    def write_block_loop(self, begin, count, totals: list) -> None:
        """Write the loop over blocks: up to their largest words, then what needs those or a quotient, of kept values.

        Several small blocks take turns at each half, so that one need not wait for the other's result. Where blocks are
        no whole vectors, or the last one may be incomplete, each is computed in copies with zeros behind its elements.
        """
        b, block = self.b, self.int64(self.table.block_size or 0)
        whole = b.sdiv(b.add(count, b.sub(block, self.int64(1))), block)
        with self.loop(self.int64(0), whole, self.blocks_at_once, totals) as number:
            if self.copies_blocks:
                start = b.mul(number, block)
                size = self.select_lesser(block, b.sub(count, start))
                bases = self.compute_block_addresses(begin, number)
                in_copy = b.icmp_signed("<", size, self.int64(self.padded_block_size))
                with b.if_then(in_copy):
                    self.copy_with_padding(bases, size)
                held = {array: b.ptrtoint(self.padded_copies[array], self.i64) for array in self.arrays}
                used = {array: b.select(in_copy, held[array], bases[array]) for array in self.arrays}
                self.write_block_group(lambda _: used, b.sdiv(start, block), self.int64(1), size, totals)
                with b.if_then(in_copy):
                    self.write_copies_back(bases, size)
            else:
                several = self.select_lesser(self.int64(self.blocks_at_once), b.sub(whole, number))
                self.write_block_group(
                    lambda k: self.compute_block_addresses(begin, b.add(number, k)), number, several, block, totals
                )

    def compute_block_addresses(self, begin, number) -> dict:
        """Return where a block's elements lie in each array."""
        b, block = self.b, self.int64(self.table.block_size or 0)
        bases = {}
        for array in self.arrays:
            address, bits, per_block = array
            place = b.add(b.sdiv(begin, block), number) if per_block else b.add(begin, b.mul(number, block))
            bases[array] = b.add(self.address_by_column[self.column_by_line[address]], self.count_bytes(place, bits))
        return bases

    def copy_with_padding(self, bases: dict, size) -> None:
        """Copy some elements, and zeros behind them up to a whole vector."""
        b = self.b
        for array in dict.fromkeys(self.loads):
            kind, align = self.ir.IntType(array.bits), array.bits // 8
            vectors = b.sub(self.round_up_to_vectors(size), self.int64(self.width))
            vector = self.make_vector_type(kind, self.width)
            with self.loop(self.int64(0), vectors, self.width) as j:
                value = b.load(self.pointer(bases[array], j, vector), align=align)
                b.store(value, b.bitcast(b.gep(self.padded_copies[array], [j]), vector.as_pointer()), align=align)
                # The next block may lie behind this one.
                ahead = b.add(bases[array], self.count_bytes(b.add(size, j), array.bits))
                for line in range(0, self.width * align, _CACHE_LINE_BYTES):
                    self.prefetch_line(b.add(ahead, self.int64(line)))
            last = b.bitcast(b.gep(self.padded_copies[array], [vectors]), vector.as_pointer())
            b.store(self.ir.Constant(vector, None), last, align=align)
            with self.loop(vectors, size, 1) as j:
                b.store(b.load(self.pointer(bases[array], j, kind)), b.gep(self.padded_copies[array], [j]))

    def round_up_to_vectors(self, size):
        """Return how far the loops over a block go: over whole vectors."""
        if not self.copies_blocks:
            return self.int64(self.padded_block_size)
        width = self.int64(self.width)
        return self.b.mul(self.b.udiv(self.b.add(size, self.int64(self.width - 1)), width), width)

    def write_block_group(self, at: Callable, first, several, size, totals: list) -> None:
        """Write the loops over some blocks, `several` from the chunk's block `first` on; `at` says where one lies."""
        b, phases = self.b, self.phases
        with self.loop(self.int64(0), several, 1, totals) as k:
            largest = self.write_loop_finding_largest(at(k), first, k, size, totals)
            for line, words in zip(phases.largest_lines, largest):
                if self.lane_maxima:
                    row = b.gep(self.lane_maxima[line], [b.mul(k, self.int64(self.lanes))])
                    b.store(words, b.bitcast(row, words.type.as_pointer()), align=4)
                else:
                    b.store(self.reduce_lanes("umax", words), b.gep(self.block_result_buffers[line], [k]))
        self.compute_block_results()
        late = phases.lines_after_largest | phases.per_block_lines
        late_loads = self.list_loaded_arrays(phases.lines_after_largest)
        behind = {
            array: n for array, n in self.stores.items() if not array.per_block and n in phases.lines_after_largest
        }
        at_once = 2 if self.blocks_at_once > 1 and not late & {number for _, number in self.trace.sums} else 1
        with self.loop(self.int64(0), several, at_once, totals) as k:
            # Of an odd number the last block is written twice.
            some = [self.select_lesser(b.add(k, self.int64(n)), b.sub(several, self.int64(1))) for n in range(at_once)]
            bases = [at(number) for number in some]
            results = [self.load_block_results(number, base) for number, base in zip(some, bases)]
            with self.loop(self.int64(0), self.round_up_to_vectors(size), self.width, totals) as i:
                if self.blocks_at_once == 1 and not self.copies_blocks:  # meanwhile the memory would be idle
                    self.prefetch_arrays(bases[0], b.add(i, self.int64(self.padded_block_size)), 0)
                turns: list[tuple] = []
                for number, base, of_block in zip(some, bases, results):
                    held = b.add(b.mul(number, self.int64(self.padded_block_size)), i)
                    known = [of_block | self.load_carried_values(held, half) for half in range(2)]
                    loaded = {array: self.load_vector_pair(base[array], i, array.bits) for array in late_loads}
                    turns.append((loaded, b.add(self.find_block_start(first, number), i), known))
                values = self.compute_interleaved_pairs(turns, phases.second_loop_lines)
                for base, pair in zip(bases, values):
                    self.store_results(pair, behind, base, i)
                self.add_to_totals(values[0], i, totals, size, late)

    def list_loaded_arrays(self, among: Collection[int]) -> list[ArrayKey]:
        """Return the arrays that some instructions read."""
        loads = [self.trace.lines[k] for k in sorted(among) if self.trace.lines[k][0] == "load"]
        return list(dict.fromkeys(ArrayKey(operands[0], *extra) for _, operands, extra in loads))

    def load_carried_values(self, i, half: int) -> dict:
        """Load what the first loop kept of one of two vectors from element i on."""
        lines = zip(self.phases.carried_lines, self.carried_buffers)
        return {
            k: self.b.load(self.make_buffer_pointer(x, i, half, self.get_vector_type_of_line(k)), align=4)
            for k, x in lines
        }

    def write_loop_finding_largest(self, bases: dict, first, k, size, totals: list) -> list:
        """Write the loop over a block, number k behind the block `first`, up to its largest words; return those."""
        b, phases = self.b, self.phases
        start, room = self.find_block_start(first, k), b.mul(k, self.int64(self.padded_block_size))
        shared = self.load_per_block_inputs(bases)
        own = [array for array in self.list_loaded_arrays(phases.first_loop_lines) if not array.per_block]
        stores = {
            array: n for array, n in self.stores.items() if not array.per_block and n not in phases.lines_after_largest
        }
        kept = len(totals)
        carried = totals + [self.ir.Constant(self.get_vector_type_of_line(line), None) for line in phases.largest_lines]
        with self.loop(self.int64(0), self.round_up_to_vectors(size), self.width, carried) as i:
            loaded = shared | {array: self.load_vector_pair(bases[array], i, array.bits) for array in own}
            turn = loaded, b.add(start, i)
            if not self.copies_blocks:
                self.prefetch_arrays(bases, i)

            def write_remaining(known) -> list:
                values = self.compute_vectors(*turn, known, phases.first_loop_lines)
                self.store_results(values, stores, bases, i)
                sums = carried[:kept]
                self.add_to_totals(values, i, sums, size, phases.first_loop_lines)
                for line, buffer in zip(phases.carried_lines, self.carried_buffers):
                    for half in range(2):
                        value = values[half][line]
                        b.store(value, self.make_buffer_pointer(buffer, b.add(room, i), half, value.type), align=4)
                largest = list(carried[kept:])
                for n, line in enumerate(phases.largest_lines):
                    for computed in values:
                        largest[n] = self.accumulate_total("max", largest[n], computed[self.trace.lines[line][1][0]])
                return sums + largest

            carried[:] = self.write_with_rare_case_branch(turn, write_remaining)
        totals[:] = carried[:kept]
        return carried[kept:]

    def write_with_rare_case_branch(self, turn: tuple[dict, Any], write_remaining: Callable) -> list:
        """Write the rest of two vectors' instructions twice: as they are, and for vectors where rare masks are false.

        `write_remaining` takes what is known of each vector and returns the values that the loop carries.
        """
        b, rare = self.b, sorted(self.trace.rare_masks & self.phases.first_loop_lines)
        if not rare:
            return write_remaining(None)
        needed = find_dependencies(self.trace, rare)
        values = self.compute_vectors(*turn, None, needed)
        bits = self.ir.IntType(self.lanes)
        found = functools.reduce(b.or_, [b.bitcast(half[k], bits) for half in values for k in rare])
        known = [{k: half[k] for k in needed} for half in values]
        never = {k: self.ir.Constant(values[0][k].type, None) for k in rare}
        ways = []
        with b.if_else(b.icmp_unsigned("!=", found, self.ir.Constant(bits, 0)), likely=False) as cases:
            for case, masked in zip(cases, ({}, never)):
                with case:
                    ways.append((write_remaining([half | masked for half in known]), b.block))
        merged = []
        for pair in zip(*[results for results, _ in ways]):
            phi = b.phi(pair[0].type)
            for value, (_, block) in zip(pair, ways):
                phi.add_incoming(value, block)
            merged.append(phi)
        return merged

    def compute_block_results(self) -> None:
        """Compute what needs largest words and constants alone, for all blocks at once."""
        b, phases, writer = self.b, self.phases, InstructionWriter(self.b, self.trace, self.blocks_at_once)
        for line in self.lane_maxima:
            b.store(self.find_largest_of_rows(self.lane_maxima[line]), self.make_block_result_pointer(line), align=4)
        known = {line: b.load(self.make_block_result_pointer(line), align=4) for line in phases.largest_lines}
        given = {name: self.splat(scalar, self.blocks_at_once) for name, scalar in self.scalar_inputs.items()}
        computed = writer.write_instructions(given, known, phases.uniform_lines)
        for line in set(self.block_result_buffers) - set(phases.largest_lines):
            is_mask = self.trace.kinds[line] == "mask"
            value = b.zext(computed[line], writer.word_type) if is_mask else computed[line]
            b.store(value, self.make_block_result_pointer(line), align=4)

    def find_largest_of_rows(self, buffer):
        """Return the largest words of as many rows as a row has words.

        Two rows become one of twice as many parts, each the lane by lane larger of a part's halves.
        """
        b, lanes, kind = self.b, self.lanes, self.make_vector_type(self.i32, self.lanes).as_pointer()
        rows = [b.load(b.bitcast(b.gep(buffer, [self.int64(k * lanes)]), kind), align=4) for k in range(0, lanes)]
        part = lanes
        while part > 1:
            halves = [[n for n in range(2 * lanes) if n % part // (part // 2) == half] for half in range(2)]
            joined = [
                [b.shuffle_vector(*pair, self.make_shuffle_mask(half)) for half in halves]
                for pair in zip(rows[::2], rows[1::2])
            ]
            rows, part = [self.accumulate_total("max", *both) for both in joined], part // 2
        return rows[0]

    def load_block_results(self, k, bases: dict) -> dict:
        """Load what was computed from a block's largest words, spread over all lanes; store its outputs."""
        b = self.b
        results = {line: b.load(b.gep(buffer, [k])) for line, buffer in self.block_result_buffers.items()}
        for array, line in self.stores.items():
            if array.per_block:
                word, kind = results[line], self.ir.IntType(array.bits)
                word = word if array.bits == 32 else b.trunc(word, kind)
                b.store(word, self.pointer(bases[array], self.int64(0), kind))
        for line in results:
            if self.trace.kinds[line] == "mask":
                results[line] = b.trunc(results[line], self.ir.IntType(1))
        return {line: self.splat(result, self.lanes) for line, result in results.items()}

    def find_block_start(self, first, k):
        """Return the place in the chunk of the first element of the block k behind the block `first`."""
        return self.b.mul(self.b.add(first, k), self.int64(self.table.block_size or 0))

    def load_per_block_inputs(self, bases: dict) -> dict:
        """Load a block's entries of arrays with one element per block, spread over all lanes."""
        b, shared = self.b, {}
        for array in self.loads:
            if array.per_block:
                word = b.load(self.pointer(bases[array], self.int64(0), self.ir.IntType(array.bits)))
                word = word if array.bits == 32 else b.zext(word, self.i32)
                shared[array] = [self.splat(word, self.lanes)] * 2
        return shared

    def make_block_result_pointer(self, line: int):
        """Return a pointer to an instruction's results for all blocks that are computed together."""
        kind = self.make_vector_type(get_lane_type(self.get_memory_type_of_instruction(line)), self.blocks_at_once)
        return self.b.bitcast(self.block_result_buffers[line], kind.as_pointer())

    def get_memory_type_of_instruction(self, line: int):
        """Return the type of an instruction's vectors in memory: of masks words."""
        return (
            self.make_vector_type(self.i32, self.lanes)
            if self.trace.kinds[line] == "mask"
            else self.get_vector_type_of_line(line)
        )

    def get_vector_type_of_line(self, line: int):
        """Return the type of an instruction's vectors."""
        return self.make_type_of_kind(self.trace.kinds[line], self.lanes)

    def make_buffer_pointer(self, buffer, i, half: int, kind):
        """Return a pointer to one of two vectors of a type that a buffer holds from element i on."""
        at = self.b.gep(buffer, [self.b.add(i, self.int64(half * self.lanes))])
        return self.b.bitcast(at, kind.as_pointer())

    # vectors of elements ---------------------------------------------------------------------------------------

    def compute_vectors(
        self, loaded: dict, position, known: list[dict] | None = None, only: Collection[int] | None = None
    ) -> list[list]:
        """Return the values of one pair of vectors, as `compute_interleaved_pairs`."""
        return self.compute_interleaved_pairs([(loaded, position, known)], only)[0]

    def compute_interleaved_pairs(self, turns: Sequence[tuple], only: Collection[int] | None) -> list[list[list]]:
        """Return the values of pairs of vectors, of which instructions (all, or `only` some) are written in turns.

        The processor then has several chains of operations to work on, of each of which every step waits for the last.
        `turns` has per pair what was loaded, the first element's place in the chunk, and values known of each vector.
        """
        b, step, running = self.b, self.table.random_counter_step, []
        found: list[list[list]] = [[[None] * len(self.trace.lines) for _ in range(2)] for _ in turns]
        for pair, (loaded, position, known) in zip(found, turns):
            for half, values in enumerate(pair):
                given = dict(self.vector_inputs)
                for (address_line, *kind), both in loaded.items():
                    given[address_line, tuple(kind)] = both[half]
                if self.table.random_stream_function:
                    moved = b.mul(b.trunc(position, self.i32), self.ir.Constant(self.i32, step))
                    first = self.splat(b.add(self.first_random_counter, moved), self.lanes)
                    steps = [step * place & 0xFFFFFFFF for place in self.list_element_offsets_of_lanes()[half]]
                    given[RANDOM_STREAM_INPUT_NAMES[0]] = b.add(first, self.ir.Constant(first.type, steps))
                writer = InstructionWriter(b, self.trace, self.lanes)
                running.append(
                    writer.write_in_order(values, given, known and known[half], only, self.instruction_order)
                )
        for _ in zip(*running, strict=True):
            pass
        return found

    def store_results(self, values: list, stores: dict, bases: dict, i) -> None:
        """Write what two vectors store."""
        for array, number in stores.items():
            self.store_vector_pair(bases[array], i, array.bits, [computed[number] for computed in values])

    def add_to_totals(self, values: list, i, totals: list, limit, among: Collection[int]) -> None:
        """Add the lanes of two vectors to the totals, for sums of the instructions in `among`."""
        b, masks = self.b, []
        if (
            self.trace.sums and limit is not None and (self.copies_blocks or not self.table.block_size)
        ):  # some lanes are padding
            left = self.splat(b.trunc(b.sub(limit, i), self.i32), self.lanes)
            lanes = [self.ir.Constant(left.type, numbers) for numbers in self.list_element_offsets_of_lanes()]
            masks = [b.icmp_signed("<", positions, left) for positions in lanes]
        for place, (how, number) in enumerate(self.trace.sums):
            for half in range(2 if number in among else 0):
                # Counts are exact in any order: those of both vectors take one register.
                value, at = values[half][number], 2 * place + (half if how != "count" else 0)
                if masks:
                    value = b.select(masks[half], value, self.ir.Constant(value.type, None))
                totals[at] = self.accumulate_total(how, totals[at], value)

    def write_counter_additions(self, values: list, limit) -> None:
        """Add the words of two vectors to counters in memory, one after the other: several may have one place.

        They go through memory, from where lanes are loaded faster than they are taken out of wide vectors.
        """
        b = self.b
        for address, place, word, copy_stride in self.trace.counter_additions:
            to = self.b.inttoptr(self.address_by_column[self.column_by_line[address]], self.i64.as_pointer())
            constant = self.trace.lines[word][2][0] if self.trace.lines[word][0] == "word" else None
            held = []
            for k in (place,) if constant is not None else (place, word):
                kind = values[0][k].type
                held.append(self.allocate_stack(get_lane_type(kind), self.width))
                for half in range(2):
                    b.store(values[half][k], self.make_buffer_pointer(held[-1], self.int64(0), half, kind), align=4)

            def add_to_counter(at, copy: int, to=to, held=held, constant=constant, copy_stride=copy_stride) -> None:
                loaded = [b.load(b.gep(memory, [at])) for memory in held]
                number, *words = (x if x.type == self.i64 else b.zext(x, self.i64) for x in loaded)
                counter = b.gep(to, [b.add(number, self.int64(copy_stride * copy))])
                more = self.int64(constant) if constant is not None else words[0]
                b.store(b.add(b.load(counter), more), counter)

            if limit is None:
                for k in range(self.width):
                    add_to_counter(self.int64(k), k % COUNTER_COPIES)
            else:
                with self.loop(self.int64(0), limit, 1) as k:
                    at = k
                    if self.splits_even_and_odd:
                        one = self.int64(1)
                        at = b.add(b.mul(b.and_(k, one), self.int64(self.lanes)), b.lshr(k, one))
                    add_to_counter(at, 0)

    def load_vector_pair(self, base, i, bits: int) -> list:
        """Load elements of two vectors as words of 32 bits, or of 64 where they have so many."""
        b, lanes = self.b, self.lanes
        words = self.make_vector_type(self.i32, lanes)
        if not self.splits_even_and_odd:
            kind = self.make_vector_type(self.ir.IntType(bits), lanes)
            pointers = (self.make_vector_pointer(base, i, bits, first, kind) for first in (0, lanes))
            return [b.load(pointer, align=bits // 8) for pointer in pointers]
        if bits >= 32:
            kind = self.make_vector_type(self.ir.IntType(bits), self.width)
            both = b.load(self.make_vector_pointer(base, i, bits, 0, kind), align=bits // 8)
            return [
                b.shuffle_vector(both, both, self.make_shuffle_mask(half))
                for half in self.list_element_offsets_of_lanes()
            ]
        pairs = self.make_vector_type(self.ir.IntType(2 * bits), lanes)
        both = b.load(self.make_vector_pointer(base, i, bits, 0, pairs), align=max(1, bits // 8))
        both = both if bits == 16 else b.zext(both, words)
        shift = self.constant(words, bits)
        return [b.and_(both, self.constant(words, (1 << bits) - 1)), b.lshr(both, shift)]

    def store_vector_pair(self, base, i, bits: int, values: list) -> None:
        """Write two vectors' words, of which the low bits count."""
        b, lanes = self.b, self.lanes
        if not self.splits_even_and_odd:
            for half, value in enumerate(values):
                self.store_vector(value, self.make_vector_pointer(base, i, bits, half * lanes, value.type), bits)
            return
        even, odd = values
        if bits >= 32:
            order = [k // 2 + lanes * (k % 2) for k in range(self.width)]
            both = b.shuffle_vector(even, odd, self.make_shuffle_mask(order))
        else:
            mask, shift = self.constant(even.type, (1 << bits) - 1), self.constant(even.type, bits)
            both = b.or_(b.and_(even, mask), b.shl(odd, shift))
            both = both if bits == 16 else b.trunc(both, self.make_vector_type(self.ir.IntType(2 * bits), lanes))
        self.store_vector(both, self.make_vector_pointer(base, i, bits, 0, both.type), bits)

    def store_vector(self, value, place, bits: int) -> None:
        """Store a vector of elements of so many bits, past the caches if the table streams."""
        if not self.table.uses_nontemporal_stores:
            self.b.store(value, place, align=max(1, bits // 8))
            return
        stored = self.b.store(value, place, align=find_vector_bits() // 8)
        stored.set_metadata("nontemporal", self.b.module.add_metadata([self.ir.Constant(self.i32, 1)]))

    def make_vector_pointer(self, base, i, bits: int, further: int, kind):
        """Return a pointer to the element `further` behind index i, of a type."""
        address = self.b.add(base, self.count_bytes(self.b.add(i, self.int64(further)), bits))
        return self.b.inttoptr(address, kind.as_pointer())

    def count_bytes(self, count, bits: int):
        """Return the bytes of so many elements; of half bytes an even number."""
        return self.b.lshr(count, self.int64(1)) if bits == 4 else self.b.mul(count, self.int64(bits // 8))

    # sums ------------------------------------------------------------------------------------------------------

    def accumulate_total(self, how: str, total, value):
        """Combine a sum, count or maximum with one more value."""
        if how == "sum":
            return self.b.fadd(total, value)
        if how == "count":
            return self.b.sub(total, self.b.sext(value, total.type))
        if get_lane_type(total.type) == self.f64:
            return self.b.select(self.b.fcmp_ordered(">", value, total), value, total)
        return self.b.select(self.b.icmp_unsigned(">", value, total), value, total)

    def reduce_lanes(self, how: str, words):
        """Reduce the lanes of a vector of words by an LLVM reduction."""
        name = f"llvm.vector.reduce.{how}.v{self.lanes}i{words.type.element.width}"
        kind = self.ir.FunctionType(words.type.element, [words.type])
        return self.b.call(self.b.module.declare_intrinsic(name, fnty=kind), [words])

    def reduce_total_lanes(self, how: str, vectors: list):
        """Reduce the lanes of two vectors to one float64; words of a maximum are the bits of float32."""
        if how == "count":
            return self.b.uitofp(self.reduce_lanes("add", self.b.add(*vectors)), self.f64)
        is_word = get_lane_type(vectors[0].type) == self.i32
        if how == "max" and is_word:
            largest = self.reduce_lanes("umax", self.accumulate_total("max", *vectors))
            return self.b.fpext(self.b.bitcast(largest, self.f32), self.f64)
        lanes = [self.extract_lane(vector, k) for vector in vectors for k in range(self.lanes)]
        return functools.reduce(functools.partial(self.accumulate_total, how), lanes)
