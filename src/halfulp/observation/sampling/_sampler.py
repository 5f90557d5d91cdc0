"""The sampler: extremes of whole tensors, and counts of a sample, by compiled kernels where they run.

A look at a tensor is a row of memory with the calls of some tables of pointers, one after another, and their arguments:
what finds the extremes of all of it, draws the places, copies the sample, counts it in the formats of single elements,
then in each block format, and adds what was counted to the totals.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, address_of, check_bits, run_chunks, select_engine, undisturbed
from ...kernels._subnormals import flushes
from ...kernels._table import CHUNK, Table
from ...kernels._trace import COPIES
from ...kernels.vector._machine_function import Kernel, compile_calls
from ...kernels.vector._table_loop import compile_table
from ...rounding import Nearest, quantize
from ...rounding._target import WORD32
from ...rounding.blocks._quantize import scales_of_blocks
from ...rounding.blocks._table import Kind, largest_table, layout_of, words_of
from .._record import FormatCounts, TensorRecord
from . import _device_functions as d
from ._candidates import DEFAULT_FORMATS, Candidates, target_of, thresholds
from ._sample_places import MOST, RUN, RUNS, sample_size, sampled_places

SINGLE_COLUMNS, BLOCK_COLUMNS = 3, 4
# Exponents of the smallest subnormals, and how many exponents there are to the largest numbers.
NARROW, WIDE = (-149, 277), (-1074, 2098)
OF_STEP = 2


class Totals:
    """Counts of a tensor role; `finish` makes the record of them.

    Attributes:
        record: with what is no count: role, name, kind, dtype, order, steps.
        step: the last sampled step in which the tensor was seen; -1 before.
        elements, zeros, nonfinite, largest: of whole tensors: all, zeros, infinities and NaN, those at the dtype's
            largest magnitude.
        amax, amin: largest and smallest nonzero finite magnitude.
        step_nonfinite, last_amax: of the last sampled step.
        sampled: elements of samples.
        squares, finite: of the last sampled step: the sum of squares of finite sampled elements, and how many they are.
        singles: int64 (formats of single elements, 3): underflow, subnormal, overflow.
        blocks: int64 (block formats, 4): elements, underflow, subnormal, hidden.
        histogram: int64: sampled nonzero finite elements by exponent.
        sums, counters: what kernels have counted and `take` moves to these; None where none has. The first OF_STEP sums
            are of the last sampled step.
        lowest: the exponent of the histogram's first bin.
    """

    __slots__ = (
        "amax",
        "amin",
        "blocks",
        "counters",
        "elements",
        "finite",
        "histogram",
        "largest",
        "last_amax",
        "lowest",
        "nonfinite",
        "record",
        "sampled",
        "singles",
        "squares",
        "step",
        "step_nonfinite",
        "sums",
        "take",
        "zeros",
    )

    def __init__(self, record: TensorRecord, candidates: Candidates, wide: bool = False) -> None:
        self.record: TensorRecord = record
        self.step: int = -1
        self.elements: int = 0
        self.zeros: int = 0
        self.nonfinite: int = 0
        self.largest: int = 0
        self.amax: float = 0.0
        self.amin: float = math.inf
        self.step_nonfinite: int = 0
        self.last_amax: float = 0.0
        self.sampled: int = 0
        self.squares: float = 0.0
        self.finite: float = 0.0
        self.lowest: int
        self.lowest, bins = WIDE if wide else NARROW
        self.singles: np.ndarray = np.zeros((len(candidates.single), SINGLE_COLUMNS), np.int64)
        self.blocks: np.ndarray = np.zeros((len(candidates.blocks), BLOCK_COLUMNS), np.int64)
        self.histogram: np.ndarray = np.zeros(bins, np.int64)
        self.sums: np.ndarray | None = None
        self.counters: np.ndarray | None = None
        self.take: Callable[[Totals], None] = lambda _: None

    def open(self, step: int) -> None:
        """Start a step at a tensor's first appearance in it: count it, reset the sums of the last sampled step."""
        if self.step != step:
            self.step = step
            self.record.steps += 1
            self.step_nonfinite, self.last_amax, self.squares, self.finite = 0, 0.0, 0.0, 0.0
            if self.sums is not None:
                self.sums[:OF_STEP] = 0.0

    def add_extremes(self, elements: int, zeros: int, nonfinite: int, largest: int, amax: float, amin: float) -> None:
        """Add the counts and extremes of a whole tensor."""
        self.elements += elements
        self.zeros += zeros
        if nonfinite:
            self.nonfinite += nonfinite
            self.step_nonfinite += nonfinite
        self.largest += largest
        self.last_amax, self.amax = max(self.last_amax, amax), max(self.amax, amax)
        if amin < self.amin:
            self.amin = amin

    def all_zero(self) -> bool:
        """Return whether tensors were seen, and had no element but zeros."""
        return 0 < self.elements == self.zeros

    def finish(self, candidates: Candidates) -> TensorRecord:
        """Return the record with all that was counted so far."""
        self.take(self)
        record = self.record
        record.elements, record.zeros, record.nonfinite = self.elements, self.zeros, self.nonfinite
        record.largest, record.sampled = self.largest, self.sampled
        record.amax, record.amin, record.last_amax = self.amax, self.amin, self.last_amax
        record.rms = math.sqrt(self.squares / self.finite) if self.finite else 0.0
        record.formats, record.block_hidden = {}, {}
        for single, (under, subnormal, over) in zip(candidates.single, self.singles.tolist()):
            record.formats[single.name] = FormatCounts(record.sampled, under, subnormal, over)
        for block, (elements, under, subnormal, hidden) in zip(candidates.blocks, self.blocks.tolist()):
            record.formats[block.name] = FormatCounts(elements, under, subnormal, 0)
            record.block_hidden[block.name] = hidden
        record.histogram = {self.lowest + k: count for k, count in enumerate(self.histogram.tolist()) if count}
        return record


class Counting:
    """The kernels' way to count samples in the candidates' formats.

    Attributes:
        tables: that run one after another on a sample; one that finds a maximum hands it to the next.
        constants: uint32, of all tables, those of each up to a multiple of 8 bytes, its `ends`.
        others: the block formats that have no table: their scales are no words of 32 bits.
        room: for a sample in float32.
    """

    def __init__(self, candidates: Candidates) -> None:
        tables: list[Table] = [d.counts_table(len(candidates.single))]
        constants: list[np.ndarray] = [candidates.thresholds.reshape(-1)]
        self.others: list[int] = []
        for k, (format, target) in enumerate(zip(candidates.blocks, candidates.targets)):
            if layout_of(torch.float32, target) is not WORD32:
                self.others.append(k)
                continue
            kind = Kind.of(torch.float32, target, WORD32)
            words = words_of(target, WORD32, 1.0, target.element.max)
            if target.tensor_scale:
                tables.append(largest_table(torch.float32, kind))
                constants.append(words)
            tables.append(d.blocks_table(kind._replace(under_amax=target.tensor_scale)))
            constants.append(np.concatenate([thresholds(format.element)[:2], words, [0, 0]]))
        self.tables: tuple[Table, ...] = tuple(tables)
        parts = [np.pad(part, (len(part) % 2, 0)) for part in constants]
        self.constants: np.ndarray = np.concatenate(parts).astype(np.uint32)
        self.ends: list[int] = [4 * end for end in np.cumsum([len(part) for part in parts]).tolist()]
        self.candidates: Candidates = candidates
        self.room: np.ndarray = np.empty(MOST, np.float32)
        self._programs: dict[tuple[torch.dtype, bool], Program] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "room": None, "_programs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, room=np.empty(MOST, np.float32))

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        # All but the room and the programs is read alone.
        memo[id(self)] = made = copy.copy(self)
        return made

    def program(self, dtype: torch.dtype, is_wide: bool) -> Program:
        """Return the program for tensors of a dtype, made once."""
        made = self._programs.get((dtype, is_wide))
        if made is None:
            made = self._programs[dtype, is_wide] = Program(dtype, is_wide, self)
        return made

    def open(self, totals: Totals) -> None:
        """Make room for what kernels count, unless there is some."""
        if totals.counters is None:
            totals.sums = np.zeros(self.sums)
            totals.counters, totals.take = np.zeros((COPIES, d.BINS + 1), np.int64), self.take

    @property
    def sums(self) -> int:
        """The number of sums that the kernels find of a sample."""
        candidates = self.candidates
        return d.SINGLES + 3 * len(candidates.single) + BLOCK_COLUMNS * (len(candidates.blocks) - len(self.others))

    def take(self, totals: Totals) -> None:
        """Move what kernels have counted to the counts."""
        sums, counters, first = totals.sums, totals.counters, -149 - totals.lowest
        assert sums is not None
        assert counters is not None
        totals.squares += float(sums[d.SQUARES])
        totals.finite += float(sums[d.FINITE_OF_STEP])
        sums[d.SQUARES] = 0.0  # which may be beyond integers
        singles, counts = totals.singles, sums.astype(np.int64)
        end = d.SINGLES + 3 * len(singles)
        gone, small, fit = (counts[d.SINGLES + k : end : 3] for k in range(3))
        singles += np.stack([gone - counts[d.ZERO], small - gone, counts[d.FINITE] - fit], 1)
        parts = iter(counts[end:].reshape(-1, BLOCK_COLUMNS))
        for k in range(len(totals.blocks)):
            if k not in self.others:
                totals.blocks[k] += next(parts)
        totals.histogram[first : first + d.BINS] += counters.sum(0)[: d.BINS]
        sums.fill(0)
        counters.fill(0)


_ARGUMENTS = 9  # of the kernel of a table
_GIVEN = (*d.GIVEN, "counters", "whole", "begin", "elements", "index", "totals")
_FOUND = ("taken", "unused", "smallest", "zeros", "largest")
_TAKEN = CHUNK * RUNS + 2  # among words of "chunks"
_DATA, _KEY, _TAKEN_OF_ROW = 1, 3, 1 + len(_GIVEN)
_FIRST_REAL = _TAKEN_OF_ROW + 2
ROW = np.dtype([("program", np.int64), *((k, np.int64) for k in (*_GIVEN, *_FOUND[:2])), ("extremes", np.float64, 3)])


@functools.cache
def compiled(table: Table) -> Kernel:
    """Return the kernel of a table, compiled once in a process."""
    return compile_table("look", table)


class Program:
    """The kernel calls that sample a tensor of a dtype: memory, calls one after another, and their arguments.

    Args:
        is_wide: whether the sample is written as float64 too.
        counting: None where the sample is only copied.

    Attributes:
        layout: of the memory.
        kernel: what runs it for the rows of a table of `ROW`.
        given: its arguments behind the first three.
        lock: held while it runs, as rows of one dtype share its memory.
    """

    def __init__(self, dtype: torch.dtype, is_wide: bool, counting: Counting | None) -> None:
        sums = 0 if counting is None else counting.sums
        constants = np.empty(0, np.uint32) if counting is None else counting.constants
        calls = 2 if counting is None else 4 + len(counting.tables)
        words, reals = np.int64, np.float64
        self.layout: np.dtype = np.dtype(
            [
                *((name, words) for name in _GIVEN),
                ("to_add", words),
                ("drawn", words, CHUNK),
                ("places", words, 2),
                ("pointers", words, (RUNS + 1, CHUNK)),
                ("chunks", words, (RUNS + 1, CHUNK)),
                ("extremes", reals, 3),
                ("zero", words),
                ("added", words, CHUNK),
                ("calls", words, (calls, 2)),
                ("arguments", words, (calls, _ARGUMENTS)),
                ("sums", reals, sums),
                ("constants", np.uint32, len(constants)),
            ]
        )
        self._template, self._relative = np.zeros((2, 1), self.layout)
        self._made: int = 0
        self._template["drawn"][:, 2], self._template["added"][:, 2] = CHUNK * (RUNS + 1), sums
        self._template["constants"] = constants
        for field, word, to in (("places", 0, "chunks"), ("places", 1, "pointers"), ("to_add", 0, "sums")):
            self._template[field].reshape(-1)[word], self._relative[field].reshape(-1)[word] = self._at(to), 1
        self._call(d.places_table(dtype.itemsize), self._at("drawn"), "places", self._at("data"))
        self._call(d.copy_table(dtype, is_wide), self._at("chunks"), "pointers")
        if counting is not None:
            self._call(d.whole_table(dtype), self._at("whole"), "data", sums=self._at("extremes"))
            self._count(counting)
            self._call(d.add_table(), self._at("added"), "totals")
        self.given: tuple[int, int, int] = (self._at("chunks", _TAKEN), self._at("calls"), calls)
        self.lock: threading.Lock = threading.Lock()
        self.kernel: Kernel = compile_calls(len(_GIVEN), len(_FOUND))
        self._memory: tuple[np.ndarray, list[int]] = self.places(1)

    def places(self, count: int) -> tuple[np.ndarray, list[int]]:
        """Return so many copies of the memory, for as many threads, and their addresses."""
        memory = np.repeat(self._template, count)
        at = address_of(memory) + self.layout.itemsize * np.arange(count)
        memory.view(np.int64).reshape(count, -1)[:] += self._relative.view(np.int64) * at[:, None]
        return memory, at.tolist()

    @property
    def place(self) -> int:
        """The address of the program's own memory."""
        return self._memory[1][0]

    def _count(self, counting: Counting) -> None:
        sample, sums, constants = self._at("chunks", CHUNK * RUNS), self._at("sums"), self._at("constants")
        for k, table in enumerate(counting.tables):
            first, into = constants + counting.ends[k] - 4 * table.constants, sums
            if table.trace.sums[0][0] == "max":
                # The last constants of the table behind it are that, a float64.
                into = constants + counting.ends[k + 1] - 8
            else:
                sums += 8 * len(table.trace.sums)
            self._call(table, sample, "sample", first, into)

    def _at(self, field: str, word: int = 0) -> int:
        """Return where a word of the memory is, from its beginning."""
        offset: int = self.layout.fields[field][1]  # type: ignore[index]
        return offset + 8 * word

    def _call(
        self, table: Table, chunk: int, pointers: str, constants: int | None = None, sums: int | None = None
    ) -> None:
        """Add the call of a table: for one chunk, or for those of all runs."""
        zero, chunks = self._at("zero"), RUNS if pointers == "pointers" else 1
        constants, sums = (zero if place is None else place for place in (constants, sums))
        k, self._made = self._made, self._made + 1
        self._template["arguments"][0, k] = (0, chunks, chunk, self._at(pointers), zero, constants, zero, sums, 0)
        self._relative["arguments"][0, k] = (0, 0, 1, 1, 1, 1, 1, 1, 0)
        self._template["calls"][0, k] = compiled(table).address, self._at("arguments", _ARGUMENTS * k)
        self._relative["calls"][0, k] = 0, 1


@functools.cache
def _copying(dtype: torch.dtype, is_wide: bool) -> Program:
    return Program(dtype, is_wide, None)


class Rows:
    """Some tensors of a dtype that are looked at in one call.

    Args:
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.
        is_wide: whether samples are written as float64 too.

    Attributes:
        wide: float64, to which they are written.
        counts: elements of the tensors.
        taken: elements of their samples.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        count: int,
        counting: Counting,
        totals: Sequence[tuple[Totals, torch.dtype]] = (),
        is_wide: bool = False,
    ) -> None:
        self._given = dtype, count, counting, totals, is_wide
        self._program = program = counting.program(dtype, is_wide) if totals else _copying(dtype, is_wide)
        self.wide: torch.Tensor | None = None
        self.counts: list[int] = [-1] * count
        self.taken: list[int] = []
        self._rows: np.ndarray = np.zeros(count, ROW)
        self._at: int = address_of(self._rows)
        self._totals: list[Totals] = [one for one, _ in totals]
        self._largest: list[float] = [largest_of(storage) for _, storage in totals]
        self._smallest: list[float] = [0.0] * count
        # Of float16 the kernels' numbers are smaller: its fraction stands where that of float32 does.
        self._factor: float = 2.0**112 if dtype == torch.float16 else 1.0
        self._data, self._keys, self._taken, self._extremes = (
            self._rows[name] for name in ("data", "key", "taken", "extremes")
        )
        self._elements: np.ndarray = self._rows["elements"]
        self._rooms: tuple[np.ndarray, ...] = ()
        self._rows["program"], self._rows["sample"] = program.place, address_of(counting.room)
        words: Any = self._rows
        self._words: memoryview = memoryview(words.view(np.int64))
        self._reals: memoryview = memoryview(words.view(np.float64))
        self._one: bytes = program.kernel.pack(0, 1, self._at, *program.given)
        for row, one in zip(self._rows, self._totals):
            counting.open(one)
            assert one.sums is not None
            assert one.counters is not None
            row["counters"], row["totals"] = address_of(one.counters), address_of(one.sums)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        # Rows hold addresses: a copy has rows, and memory, of its own.
        memo[id(self)] = made = Rows(*copy.deepcopy(self._given, memo))
        return made

    def widen(self, packed: torch.Tensor, ends: np.ndarray) -> None:
        """Write the samples to float64 too, from the ends of parts that hold as many as are sampled at most."""
        self.wide, self._ends = packed, ends
        self._rows["wide"] = address(packed) + 8 * ends[:-1]

    def point(
        self, data: int | Sequence[int] | np.ndarray, counts: list[int], keys: int | Sequence[int] | np.ndarray
    ) -> None:
        """Say where the tensors lie, how many elements they have, and the keys of their places."""
        self._data[:], self._keys[:] = data, keys
        if counts != self.counts:
            self.counts = counts
            found = self._elements[:] = np.array(counts, np.int64)
            is_all = found <= MOST
            self._rows["runs"] = np.where(is_all, 1, -(-found // RUN))
            self._rows["rest"] = np.where(is_all, found, (found - 1) % RUN + 1)
            self._rows["before"] = np.where(is_all, 0, MOST - RUN)
            self._is_short: bool = bool(np.any(~is_all & (found % RUN > 0)))

    def copy(self, samples: Sequence[int] | None = None) -> None:
        """Run the program: copy samples, to some addresses if they are given."""
        if samples is not None:
            self._rows["sample"] = samples
        if not self._rooms and len(self._rows) > 1 and torch.get_num_threads() > 1:
            self._separate()
        program = self._program
        with program.lock:  # kernels run without the interpreter's lock
            run_chunks(program.kernel, self._elements, self._at, *program.given)
        self.taken = taken = self._taken.tolist()
        if self.wide is not None and self._is_short:
            for k in np.flatnonzero(
                self._taken < np.minimum(self._elements, MOST)
            ):  # what a short last run leaves free
                self.wide[self._ends[k] + taken[k] : self._ends[k + 1]] = 0

    def _separate(self) -> None:
        """Give each tensor a program and room for its sample, as threads may run them side by side."""
        memory, places = self._program.places(len(self._rows))
        self._rooms = memory, np.empty((len(self._rows), MOST), np.float32)
        rooms = address_of(self._rooms[1]) + 4 * MOST * np.arange(len(self._rows))
        self._rows["program"] = places
        self._rows["sample"] = np.where(
            self._rows["sample"] == address_of(self._given[2].room), rooms, self._rows["sample"]
        )

    def look(self, step: int, samples: Sequence[int] | None = None) -> list[int]:
        """Count the tensors; return which of them hold NaN or infinity."""
        for totals in self._totals:
            totals.open(step)
        if self._given[2].others and not self._rooms:
            self._separate()
        self.copy(samples)
        extremes = self._extremes.tolist()
        return [k for k, taken in enumerate(self.taken) if self._add(k, taken, *extremes[k])]

    def look_at(self, data: int, count: int, key: int, step: int) -> bool:
        """Count the only tensor, in fewer calls than `point` and `look` take; return whether it has NaN or infinity."""
        totals = self._totals[0]
        if totals.step != step:
            totals.open(step)
        words, reals = self._words, self._reals
        if count != self.counts[0] or flushes():
            self.point(data, [count], key)
            return bool(self.look(step))
        words[_DATA], words[_KEY] = data, key
        self._program.kernel.run(self._one)
        return self._add(0, words[_TAKEN_OF_ROW], reals[_FIRST_REAL], reals[_FIRST_REAL + 1], reals[_FIRST_REAL + 2])

    def _add(self, k: int, taken: int, smallest: float, zeros: float, top: float) -> bool:
        """Add the kernels' counts of a tensor; return whether it holds NaN or infinity."""
        totals, factor = self._totals[k], self._factor
        totals.sampled += taken
        if self._given[2].others:
            self._count_others(k, taken)
        if not (amax := top * factor) < self._largest[k]:
            return self._look_beyond(k, int(zeros))
        totals.elements += self.counts[k]
        if zeros:
            totals.zeros += int(zeros)
        if amax > totals.last_amax:
            totals.last_amax = amax
            if amax > totals.amax:
                totals.amax = amax
        if smallest > self._smallest[k]:
            self._smallest[k] = smallest
            totals.amin = min(totals.amin, _amin(smallest) * factor)
        return False

    def _count_others(self, row: int, taken: int) -> None:
        """Count a sample in formats that kernels do not count in."""
        counting, place = self._given[2], int(self._rows["sample"][row])
        sample = torch.from_numpy(np.array((ctypes.c_float * taken).from_address(place), np.float32))
        for k in counting.others:
            self._totals[row].blocks[k] += count_in_blocks(sample, counting.candidates.blocks[k])

    def _look_beyond(self, row: int, zeros: int) -> bool:
        """Add the extremes of a tensor with NaN, infinity or its dtype's largest number; return if not finite."""
        dtype, count, largest = self._given[0], self.counts[row], self._largest[row]
        kind: Any
        kind, word = (np.uint16, torch.int16) if dtype.itemsize == 2 else (np.uint32, torch.int32)
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(int(self._data[row]))
        words: Any = np.frombuffer(memory, kind) & kind(0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF)
        finite = words[words < d.INFINITE_WORDS[dtype]]
        at_largest = int(torch.tensor(largest, dtype=dtype, device="cpu").view(word))
        top, low = (
            finite.max(initial=0),
            np.where(finite == 0, d.INFINITE_WORDS[dtype], finite).min(initial=d.INFINITE_WORDS[dtype]),
        )
        amax, amin = torch.tensor([int(top), int(low)], dtype=word, device="cpu").view(dtype).tolist()
        nonfinite = count - len(finite)
        self._totals[row].add_extremes(count, zeros, nonfinite, int((words == at_largest).sum()), amax, amin)
        return nonfinite > 0


def _amin(smallest: float) -> float:
    """Return the smallest magnitude from what `whole_table` finds."""
    word = d.INFINITE - struct.unpack("<I", struct.pack("<f", smallest))[0]
    amin: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return amin


@dataclass(slots=True)
class Look:
    """One tensor to look at.

    Attributes:
        dtype: of its storage, whose largest number is counted; the tensor's own but for eight bits and expansions.
        totals: what the counts are added to; None where only the sample is wanted, without the dtype.
    """

    tensor: torch.Tensor
    key: int
    dtype: torch.dtype | None = None
    totals: Totals | None = None


def look(
    tensors: Sequence[Look], candidates: Candidates | None = None, counting: Counting | None = None, step: int = 0
) -> list[torch.Tensor]:
    """Sample tensors, by compiled kernels where they run and else by the reference; with candidates count them too.

    Args:
        counting: of the candidates, for kernels.
        step: that is counted.

    Returns:
        One float32 tensor (float64 of a float64 tensor) per look, on the CPU, of at most 4096 elements; those of one
        dtype lie one after another in memory.
    """
    if counting is None:
        counting = _no_counting() if candidates is None else Counting(candidates)
    samples, engine = [_EMPTY] * len(tensors), select_engine("cpu")
    by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for k, one in enumerate(tensors):
        tensor = to_wide(one.tensor)
        if engine == "llvm" and tensor.dtype in d.KERNEL_DTYPES and tensor.is_cpu:
            by_dtype.setdefault(tensor.dtype, []).append((k, tensor))
        else:
            samples[k] = look_by_reference(one, candidates, step)
    for dtype, found in by_dtype.items():
        check_kernels(dtype)
        looks = [tensors[k] for k, _ in found]
        given = [(one.totals, one.dtype) for one in looks if one.totals is not None and one.dtype is not None]
        counts = [tensor.numel() for _, tensor in found]
        parts = _buffers(counts)
        rows = Rows(dtype, len(found), counting, given if candidates is not None else ())
        rows.point([address(tensor) for _, tensor in found], counts, [signed(one.key) for one in looks])
        places = [address(part) for part in parts]
        if candidates is None:
            rows.copy(places)
        else:
            rows.look(step, places)
        for (k, _), part, length in zip(found, parts, rows.taken):
            # A short last run leaves some of its part free.
            samples[k] = part if length == len(part) else part[:length]
    return samples


@functools.cache
def _no_counting() -> Counting:
    return Counting(Candidates(()))


def sampled(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy of a contiguous tensor's sampled elements, in float32 (float64 of float64), on the CPU."""
    return look([Look(flat, key)])[0]


def look_by_reference(one: Look, candidates: Candidates | None = None, step: int = 0) -> torch.Tensor:
    """Look at a tensor in plain torch, and return its sample."""
    flat = one.tensor.reshape(-1)
    sample = sample_of(flat, one.key)
    if candidates is not None and one.totals is not None and one.dtype is not None:
        one.totals.open(step)
        count_whole(flat, largest_of(one.dtype), one.totals)
        count_sample(sample, candidates, one.totals)
    return sample


def prepare_kernels(dtypes: Iterable[torch.dtype]) -> None:
    """Compile, or load, the kernels for tensors of some dtypes on the CPU."""
    for dtype in set(dtypes) & set(d.KERNEL_DTYPES) if select_engine("cpu") == "llvm" else ():
        check_kernels(dtype)


_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")


def to_wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floating-point numbers as bfloat16, which holds them all, and others as they are, contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor


@functools.lru_cache(64)
def largest_of(dtype: torch.dtype) -> float:
    """Return the largest finite number of a dtype."""
    return torch.finfo(dtype).max


def signed(key: int) -> int:
    """Return a key of 64 bits as a table of int64 holds it."""
    return key - 2**64 if key >= 2**63 else key


def _buffers(sizes: list[int]) -> Sequence[torch.Tensor]:
    """Allocate memory for samples of tensors of some sizes."""
    wanted = [sample_size(size) for size in sizes]
    if len(wanted) == 1:
        return (torch.empty(wanted[0], dtype=torch.float32, device="cpu"),)
    return torch.empty(sum(wanted), dtype=torch.float32, device="cpu").split(wanted)


@functools.cache
@undisturbed()
def check_kernels(dtype: torch.dtype) -> None:
    """Compare the kernels of a dtype with the reference, before their first use in a process."""
    candidates = Candidates(DEFAULT_FORMATS)
    ramp = torch.linspace(-3, 3, 5000, dtype=torch.float64, device="cpu")
    x = (torch.sinh(ramp * 9) * 2.0 ** (ramp * 20)).to(dtype)
    x[7], x[77], x[777], x[1777:1900] = torch.inf, torch.nan, 0.0, 0.0

    def counts(fast: bool) -> list[torch.Tensor]:
        totals = Totals(TensorRecord("weight", "", "", dtype), candidates)
        key, counting = 0x0123456789ABCDEF, Counting(candidates)
        if fast:
            rows = Rows(dtype, 1, counting, [(totals, dtype)], is_wide=True)
            rows.widen(torch.empty(MOST, dtype=torch.float64, device="cpu"), np.array([0, MOST]))
            rows.point([address(x)], [len(x)], [key])
            rows.look(0)
            totals.take(totals)
        else:
            look_by_reference(Look(x, key, dtype, totals), candidates)
        # Sums of squares depend on the order of the sum.
        reals = torch.tensor([totals.amax, totals.amin, totals.last_amax], dtype=torch.float64, device="cpu")
        counted = map(torch.from_numpy, (totals.singles, totals.blocks, totals.histogram))
        whole = [totals.elements, totals.zeros, totals.nonfinite, totals.largest, totals.sampled, int(totals.finite)]
        return [torch.tensor(whole, dtype=torch.int64, device="cpu"), *counted, reals]

    check_bits(f"sample of {dtype}", lambda: counts(True), lambda: counts(False))


def sample_of(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return the sampled elements of a contiguous flat tensor, in float32 (float64 of float64), on the CPU."""
    places = sampled_places(key, flat.numel())
    taken = flat if len(places) == flat.numel() else flat[places.to(flat.device)]
    return taken.to("cpu", torch.float64 if flat.dtype == torch.float64 else torch.float32, copy=True)


def count_whole(flat: torch.Tensor, largest: float, totals: Totals) -> None:
    """Add a whole tensor's extremes."""
    if not flat.numel():
        return
    magnitude = flat.abs()
    wide = magnitude.float() if magnitude.dtype.itemsize < 2 else magnitude
    finite = wide.isfinite()
    nonfinite, zeros = flat.numel() - int(finite.sum()), int((wide == 0).sum())
    amax, amin = float(torch.where(finite, wide, 0.0).max()), math.inf
    if zeros + nonfinite < flat.numel():
        amin = float(torch.where(finite & (wide > 0), wide.double(), math.inf).min())
    totals.add_extremes(flat.numel(), zeros, nonfinite, int((wide == largest).sum()), amax, amin)


def count_sample(sample: torch.Tensor, candidates: Candidates, totals: Totals) -> None:
    """Add a sample's counts: histogram, squares, and what each candidate makes of it."""
    finite = sample[sample.isfinite()]
    totals.sampled += len(sample)
    totals.squares += float(finite.double().square().sum())
    totals.finite += len(finite)
    exponents = torch.frexp(finite[finite != 0].double())[1].long() - 1
    totals.histogram += torch.bincount(exponents - totals.lowest, minlength=len(totals.histogram)).numpy()
    for k, format in enumerate(candidates.single):
        rounded = quantize(sample, format, Nearest(), overflow="nan") if len(sample) else sample
        known = sample.isfinite()
        size = rounded.abs()
        found = (known & (sample != 0) & (size == 0), known & (size > 0) & (size < format.smallest_normal))
        beyond = known & ~rounded.isfinite()
        totals.singles[k] += [int(one.sum()) for one in (*found, beyond)]
    for k, block in enumerate(candidates.blocks):
        totals.blocks[k] += count_in_blocks(sample, block)


def count_in_blocks(sample: torch.Tensor, format: BlockFormat) -> tuple[int, int, int, int]:
    """Return elements in finite blocks, those that become zero, subnormals, and zeros in blocks whose largest stays."""
    if not len(sample):
        return 0, 0, 0, 0
    target = target_of(format)
    rounded = quantize(sample, format)
    padding = -len(sample) % format.block
    x, y = (torch.nn.functional.pad(t, (0, padding)).view(-1, format.block) for t in (sample, rounded))
    work = x.double() if target.powers or x.dtype == torch.float64 else x
    amax = work.abs().amax(-1, keepdim=True)
    good = amax.isfinite()
    known = torch.where(good, amax, 0)
    scale = scales_of_blocks(known.double() if target.powers else known, target)
    gone = good & (x != 0) & (y == 0)
    smallest = (format.element.smallest_normal * scale).to(y.dtype)
    subnormal = good & (y != 0) & (y.abs() < smallest)
    shown = good & (y.abs().amax(-1, keepdim=True) > 0)
    counted = int(good.expand_as(x).flatten()[: len(sample)].sum())
    return counted, int(gone.sum()), int(subnormal.sum()), int((gone & shown).sum())
