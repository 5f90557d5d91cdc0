"""Tensors on the CPU: one call of compiled kernels finds extremes of all of one, and copies and counts its sample."""

from __future__ import annotations

import copy
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, address_of, run_chunks
from ...kernels._table import Table
from ...kernels._trace import COPIES
from ...kernels.vector._machine_function import Kernel
from ...kernels.vector._table_loop import compile_table
from ...rounding._target import WORD32
from ...rounding.blocks._table import BlockTarget, Kind, largest_table, layout_of, words_of
from . import _device_functions as d
from . import _loop as loop
from ._candidates import Candidates, thresholds
from ._sample_places import MOST
from ._totals import BLOCK_COLUMNS, Totals


@functools.cache
def _kernel(name: str, table: Table) -> Callable[..., None]:
    return compile_table(name, table)


class Counting:
    """How kernels count samples in the candidates' formats.

    Attributes:
        tables: that run one after another on a sample.
        constants: uint32, of all tables.
        others: the block formats that `count_blocks` counts in.
        room: for a sample in float32.
    """

    def __init__(self, candidates: Candidates, count_blocks: Callable[[torch.Tensor, BlockFormat], Any]) -> None:
        tables: list[Table] = [d.counts_table(len(candidates.single))]
        constants: list[np.ndarray] = [candidates.thresholds.reshape(-1)]
        for format, target in zip(candidates.blocks, candidates.targets):
            if not counts_by_kernel(target):
                continue
            kind = Kind.of(torch.float32, target, WORD32)
            words = words_of(target, WORD32, 1.0, target.element.max)
            if target.tensor_scale:
                tables.append(largest_table(torch.float32, kind))
                constants.append(words)
            tables.append(d.blocks_table(kind._replace(under_amax=target.tensor_scale)))
            constants.append(np.concatenate([thresholds(format.element)[:2], words]))
        self.tables: tuple[Table, ...] = tuple(tables)
        sizes = [loop.constant_bytes(table) // 4 for table in tables]
        parts = [np.pad(part, (0, size - len(part))) for part, size in zip(constants, sizes)]
        self.constants: np.ndarray = np.concatenate(parts).astype(np.uint32)
        self.candidates: Candidates = candidates
        self.others: list[int] = [k for k, one in enumerate(candidates.targets) if not counts_by_kernel(one)]
        self._count_blocks = count_blocks
        self.room: np.ndarray = np.empty(MOST, np.float32)

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        # All but the room is read alone.
        memo[id(self)] = made = copy.copy(self)
        made.room = np.empty_like(self.room)
        return made

    def open(self, totals: Totals) -> None:
        """Make room for what kernels count, unless there is some."""
        if totals.counters is None:
            formats = len(self.candidates.targets) - len(self.others)
            totals.sums = np.zeros(d.SINGLES + 3 * len(totals.singles) + BLOCK_COLUMNS * formats)
            totals.counters, totals.take = np.zeros((COPIES, d.BINS + 1), np.int64), self.take

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

    def count_others(self, totals: Totals, place: int, taken: int) -> None:
        """Count a sample in formats that kernels do not count in."""
        words = (ctypes.c_float * taken).from_address(place)
        sample = torch.from_numpy(np.array(words, np.float32))
        for k in self.others:
            totals.blocks[k] += self._count_blocks(sample, self.candidates.blocks[k])


def counts_by_kernel(target: BlockTarget) -> bool:
    """Return whether a kernel counts in a block format: its scales are words of 32 bits."""
    return layout_of(torch.float32, target) is WORD32


class Row:
    """A tensor that is counted, and those that come at its place after it.

    Args:
        rows: among which it is.
        number: of the row.
        storage: the dtype whose largest number is counted.

    Attributes:
        words: what the kernel reads and writes, see `_loop`.
    """

    __slots__ = (
        "_counting",
        "_dtype",
        "_factor",
        "_found",
        "_largest",
        "_limit",
        "_packed",
        "_run",
        "_smallest",
        "_totals",
        "words",
    )

    def __init__(self, rows: Rows, number: int, totals: Totals, storage: torch.dtype) -> None:
        assert rows.kernel is not None
        self._counting, self._totals, self._dtype = rows.counting, totals, rows.dtype
        self._factor: float = _factor(rows.dtype)
        self._largest: float = torch.finfo(storage).max
        self._limit: float = self._largest / self._factor
        self._smallest: float = 0.0
        self.words: memoryview = memoryview(rows.table[number])
        self._found: memoryview = memoryview(rows.table.view(np.float64)[number])
        self._run: Callable[[bytes], None] = rows.kernel.run
        self._packed: bytes = rows.kernel.pack(number, number + 1, *rows.given)
        rows.counting.open(totals)
        assert totals.sums is not None
        assert totals.counters is not None
        self.words[loop.SUMS], self.words[loop.COUNTERS] = address_of(totals.sums), address_of(totals.counters)

    def look(self, step: int) -> bool:
        """Count the tensor and its sample; return whether it holds NaN or infinity."""
        if self._totals.step != step:
            self._totals.open(step)
        self._run(self._packed)
        return self.add()

    def add(self) -> bool:
        """Add what the kernel found of the whole tensor; return whether it holds NaN or infinity."""
        totals, words, found = self._totals, self.words, self._found
        count, zeros, top, smallest = words[loop.COUNT], found[loop.ZEROS], found[loop.LARGEST], found[loop.SMALLEST]
        totals.sampled += words[loop.TAKEN]
        if self._counting.others:
            self._counting.count_others(totals, words[loop.SAMPLE], words[loop.TAKEN])
        if not top < self._limit:
            return _look_beyond(totals, words[loop.DATA], count, zeros, self._dtype, self._largest)
        totals.elements += count
        if zeros:
            totals.zeros += int(zeros)
        if top * self._factor > totals.last_amax:
            totals.note_amax(top * self._factor)
        if smallest > self._smallest:
            self._smallest = smallest
            totals.amin = min(totals.amin, _amin(smallest) * self._factor)
        return False


class Rows:
    """Some tensors of a dtype that are sampled together.

    Args:
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.
        is_wide: whether samples are written as float64 too.

    Attributes:
        rows: of those that are counted.
        table: int64 (tensors, `_loop.WORDS`).
        wide: float64, to which they are written.
        kernel: what counts them, if anything does.
        given: its arguments behind the first two.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        count: int,
        counting: Counting,
        totals: Sequence[tuple[Totals, torch.dtype]] = (),
        is_wide: bool = False,
    ) -> None:
        self.dtype, self.counting = dtype, counting
        self.table: np.ndarray = np.zeros((count, loop.WORDS), np.int64)
        self.wide: torch.Tensor | None = None
        self.kernel: Kernel | None = loop.compile_looks(dtype, is_wide, counting.tables) if totals else None
        self._is_wide: bool = is_wide
        self.given: tuple[int, int] = (address_of(self.table), address_of(counting.constants))
        self.rows: list[Row] = [Row(self, number, *one) for number, one in enumerate(totals)]
        self._counted: list[tuple[Totals, torch.dtype]] = [*totals]
        self._room: np.ndarray = counting.room[None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        # The table holds addresses: a copy has a table, and memory, of its own.
        counting, totals = copy.deepcopy((self.counting, self._counted), memo)
        memo[id(self)] = made = Rows(self.dtype, len(self.table), counting, totals, self._is_wide)
        return made

    def widen(self, packed: torch.Tensor, ends: np.ndarray) -> None:
        """Write the samples to float64 too, from the ends of parts that hold as many as are sampled at most.

        What a short last run leaves free becomes zeros.
        """
        self.wide = packed
        self.table[:, loop.WIDE] = address(packed) + 8 * ends[:-1]

    def point(self, data: Sequence[int] | np.ndarray, counts: Sequence[int], keys: Sequence[int] | np.ndarray) -> None:
        """Say where the tensors lie, how many elements they have, and the keys of their places."""
        table = self.table
        table[:, loop.DATA], table[:, loop.COUNT], table[:, loop.KEY] = data, counts, keys

    def copy(self, samples: Sequence[int] | None = None) -> list[int]:
        """Copy samples, to some addresses if they are given; return how many elements each has."""
        self._place_samples(samples)
        kernel = loop.compile_copies(self.dtype, self._is_wide)
        run_chunks(kernel, np.minimum(self.table[:, loop.COUNT], MOST), self.given[0])
        taken: list[int] = self.table[:, loop.TAKEN].tolist()
        return taken

    def look(self, step: int, samples: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Count the tensors; return the elements of each sample, and rows that hold NaN or infinity."""
        assert self.kernel is not None
        self._place_samples(samples)
        if self.counting.others:
            broken = [number for number, row in enumerate(self.rows) if row.look(step)]
        else:
            for totals, _ in self._counted:
                totals.open(step)
            run_chunks(self.kernel, self.table[:, loop.COUNT], *self.given)
            broken = [number for number, row in enumerate(self.rows) if row.add()]
        return self.table[:, loop.TAKEN].tolist(), broken

    def _place_samples(self, samples: Sequence[int] | None) -> None:
        """Say where samples in float32 go: of each tensor its own room where threads share them, else one after all."""
        if samples is not None:
            self.table[:, loop.SAMPLE] = samples
            return
        several = torch.get_num_threads() > 1
        if several and len(self._room) < len(self.table):
            self._room = np.empty((len(self.table), MOST), np.float32)
        rooms = np.arange(len(self.table), dtype=np.int64) * (4 * MOST * several)
        self.table[:, loop.SAMPLE] = address_of(self._room) + rooms


def _look_beyond(totals: Totals, at: int, count: int, zeros: float, dtype: torch.dtype, largest: float) -> bool:
    """Add the extremes of a tensor with NaN, infinities or its dtype's largest number; return whether with the former.

    Args:
        at: its address.
        zeros: how many it has.
    """
    words, found = np.array([_memory_word(largest, dtype)], np.uint32), np.empty((1, 4))
    work = np.array([0, 0, count, 0, at, 0], np.int64)
    place, *given = (address_of(one) for one in (work, words, found))
    kernel = _kernel("beyond", d.beyond_table(dtype))
    run_chunks(kernel, work[2:3], place, place + 32, place + 40, given[0], 0, given[1], 0)
    nonfinite, at_largest, top, smallest = found[0].tolist()
    factor = _factor(dtype)
    totals.add_extremes(count, int(zeros), int(nonfinite), int(at_largest), top * factor, _amin(smallest) * factor)
    return nonfinite > 0


def _factor(dtype: torch.dtype) -> float:
    """Return what float32 numbers of kernels are multiplied by: the fraction of float16 stands where theirs does."""
    return 2.0**112 if dtype == torch.float16 else 1.0


def _amin(smallest: float) -> float:
    """Return the smallest magnitude from what `whole_table` finds."""
    word = d.INFINITE - struct.unpack("<I", struct.pack("<f", smallest))[0]
    amin: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return amin


@functools.cache
def _memory_word(largest: float, memory: torch.dtype) -> int:
    """Return the word of a number in the dtype of the memory that is read."""
    number = torch.tensor(largest, dtype=memory, device="cpu")
    return int(number.view(torch.int16 if memory.itemsize == 2 else torch.int32))


def count_changes(
    parts: Sequence[torch.Tensor],
    ends: Sequence[int] | np.ndarray,
    rounded: torch.Tensor | None,
    *,
    as_values: bool,
    decreases: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what counts of changes of some tensors, and of their squares and products: (tensors, 2) each.

    Args:
        parts: float64, one tensor's behind the other's: before, after, and wanted.
        ends: where the tensors begin and end.
        rounded: float32, to which the wanted changes are written.
        as_values: whether the values are given that were wanted, and not the changes.
        decreases: whether wanted decreases alone are counted.
    """
    table, ends = d.changes_table(rounded is not None), np.asarray(ends, np.int64)
    cut = np.zeros((len(ends) - 1, 4), np.int64)
    cut[:, 1], cut[:, 2] = ends[:-1], np.diff(ends)
    pointers = np.array([address(x) for x in (*parts, *([] if rounded is None else [rounded]))], np.int64)
    words = np.array([float(as_values), 0.0 if decreases else np.inf])
    sums = np.empty((len(cut), table.sums))
    given = *map(address_of, (cut, pointers, cut[:, 0], words)), 0, address_of(sums), 0
    run_chunks(_kernel("changes", table), cut[:, 2], *given)
    return sums[:, :2].astype(np.int64), sums[:, 2:]
