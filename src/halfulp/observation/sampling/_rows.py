"""Tensors on the CPU: one call of compiled kernels finds extremes of all of one, and copies and counts its sample."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, address_of, run_chunks
from ...kernels._trace import COPIES
from ...kernels.vector._table_loop import Table, compile_series, compile_table
from ...rounding._target import WORD32
from ...rounding.blocks._table import BlockTarget, Kind, largest_table, layout_of, words_of
from . import _device_functions as d
from ._candidates import Candidates, thresholds
from ._sample_places import MOST, RUN, RUNS
from ._totals import Totals

_EVERY = np.arange(RUNS, dtype=np.int64)


@functools.cache
def _kernel(name: str, table: Table) -> Callable[..., None]:
    return compile_table(name, table)


def run_words(keys: np.ndarray) -> np.ndarray:
    """Return (k + u_k) 2^32 of the runs of each int64 key: int64 (keys, 32)."""
    rows = np.arange(len(keys), dtype=np.int64)
    words, cut = np.empty((len(keys), RUNS), np.uint32), np.zeros((len(keys), 4), np.int64)
    cut[:, 0], cut[:, 2] = rows, RUNS
    pointers = address_of(words) + rows * (4 * RUNS)
    given = cut, pointers, rows, keys
    at = [address_of(one) for one in given]
    _kernel("sample_places", d.words_table())(0, len(keys), *at[:3], 0, at[3], 0, 0)
    return _EVERY << 32 | words


class Counting:
    """How kernels count samples in the candidates' formats.

    Attributes:
        tables: that run one after another on a sample.
        words: the constants of each.
        scaled: of those whose constants end in what the table before them finds, the places among the tables.
        others: the block formats that `count_blocks` counts in.
        room: for a sample in float32.
    """

    def __init__(self, candidates: Candidates, count_blocks: Callable[[torch.Tensor, BlockFormat], Any]) -> None:
        self.tables: list[Table] = [d.counts_table(len(candidates.single))]
        self.words: list[np.ndarray] = [candidates.thresholds.astype(np.uint32).reshape(-1)]
        self.scaled: list[int] = []
        for format, target in zip(candidates.blocks, candidates.targets):
            if not counts_by_kernel(target):
                continue
            kind = Kind.of(torch.float32, target, WORD32)
            words = words_of(target, WORD32, 1.0, target.element.max)
            if target.tensor_scale:
                self.tables.append(largest_table(torch.float32, kind))
                self.words.append(words)
                self.scaled.append(len(self.tables))
            self.tables.append(d.blocks_table(kind._replace(under_amax=target.tensor_scale)))
            room = np.zeros(_SUMS * 2, np.uint32)  # of which the first two words are read
            self.words.append(np.concatenate([np.array(thresholds(format.element)[:2], np.uint32), words, room]))
        self.candidates: Candidates = candidates
        self.others: list[int] = [k for k, one in enumerate(candidates.targets) if not counts_by_kernel(one)]
        self._count_blocks = count_blocks
        self.room: np.ndarray = np.empty(MOST, np.float32)

    def counters(self) -> np.ndarray:
        """Return new counters of exponents."""
        return np.zeros((COPIES, d.BINS + 1), np.int64)

    def take(self, totals: Totals) -> None:
        """Move what kernels have counted to the counts."""
        sums, counters, first = totals.sums, totals.counters, -149 - totals.lowest
        assert sums is not None
        assert counters is not None
        sums[d.SQUARES] = 0.0  # which may be beyond integers
        parts = iter(np.split(sums.astype(np.int64), np.cumsum([table.sums for table in self.tables])))
        counts, singles = next(parts), totals.singles
        gone, small, fit = (counts[d.SINGLES + k : d.SINGLES + 3 * len(singles) : 3] for k in range(3))
        singles += np.stack([gone - counts[d.ZERO], small - gone, counts[d.FINITE] - fit], 1)
        for k, target in enumerate(self.candidates.targets):
            if k not in self.others:
                if target.tensor_scale:
                    next(parts)
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


def new_chunks(rows: int, is_wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return chunks and pointers of the copies of some rows: (rows, 32, 4) and (rows, 32, columns)."""
    cut = np.zeros((rows, RUNS, 4), np.int64)
    cut[:, :, 0] = np.arange(rows * RUNS).reshape(rows, RUNS)
    return cut, np.zeros((rows, RUNS, 3 if is_wide else 2), np.int64)


@functools.cache
def _series(dtype: torch.dtype, wide: bool, tables: tuple[Table, ...]) -> Callable[[int], None]:
    return compile_series("look", [d.whole_table(dtype), d.copy_table(dtype, wide), *tables])


# Places in the memory of a row.
_WHOLE, _DATA, _SAMPLE, _SAMPLE_AT, _COUNTERS, _ZERO, _ROW_WORDS = 0, 4, 5, 9, 10, 11, 12
_SUMS = 4  # of a table, at least


class Row:
    """A tensor, and those that come at its place after it.

    Args:
        dtype: of its memory, one of KERNEL_DTYPES.
        counting: how its samples are counted.
        totals: what its counts are added to; None where samples are only copied.
        storage: the dtype whose largest number is counted.
        is_wide: whether its samples are written as float64 too, where `widen` says.
        chunks: chunks and pointers of the copies of several rows, of which this is one.
        number: of the row among them.

    Attributes:
        taken: how many elements the last sample has.
    """

    __slots__ = (
        "_arguments",
        "_at",
        "_copy",
        "_count",
        "_counting",
        "_cut",
        "_factor",
        "_first",
        "_given",
        "_largest",
        "_look",
        "_pointers",
        "_runs",
        "_short",
        "_sums",
        "_words",
        "_work",
        "dtype",
        "taken",
        "totals",
    )

    def __init__(
        self,
        dtype: torch.dtype,
        counting: Counting | None = None,
        totals: Totals | None = None,
        storage: torch.dtype | None = None,
        is_wide: bool = False,
        chunks: tuple[np.ndarray, np.ndarray] | None = None,
        number: int = 0,
    ) -> None:
        self.dtype, self._counting, self.totals, self.taken = dtype, counting, totals, 0
        self._factor: float = _factor(dtype)
        self._largest: float = torch.finfo(storage or dtype).max
        self._count, self._runs, self._short = -1, 0, False
        cut, pointers = chunks or new_chunks(1, is_wide)
        self._work: np.ndarray = np.zeros(_ROW_WORDS, np.int64)
        self._cut, self._pointers = cut[number], pointers[number]
        self._first: np.ndarray = self._pointers[0]
        at = address_of(self._work)
        self._copy: Callable[..., None] = _kernel("copy_samples", d.copy_table(dtype, is_wide))
        self._given: tuple[int, ...] = (address_of(self._cut), address_of(pointers), 0, 0, 0, 0, 0)
        if counting is not None and totals is not None:
            self._prepare(counting, totals, at, is_wide)

    def _prepare(self, counting: Counting, totals: Totals, at: int, is_wide: bool) -> None:
        """Lay out what the kernels are given."""
        self._look: Callable[[int], None] = _series(self.dtype, is_wide, tuple(counting.tables))
        self._words: list[np.ndarray] = [words.copy() for words in counting.words]
        sizes = [_SUMS, *(table.sums for table in counting.tables)]
        self._sums: np.ndarray = np.zeros(sum(sizes))
        ends, sums = np.cumsum([0, *sizes]), address_of(self._sums)
        own = [at + 8 * place for place in (_SAMPLE, _SAMPLE_AT, _ZERO)]
        rows = [(0, 1, at + 8 * _WHOLE, at + 8 * _DATA, 0, 0, 0, sums, 0), (0, RUNS, *self._given)]
        for words, end in zip(self._words, ends[1:].tolist()):
            rows.append((0, 1, *own, address_of(words), 0, sums + 8 * end, 0))
        arguments = np.array(rows, np.int64)
        for k in counting.scaled:
            words = self._words[k]
            arguments[k + 1, 7] = address_of(words) + words.nbytes - 8 * _SUMS
        if totals.counters is None:
            totals.sums, totals.counters, totals.take = (
                np.zeros(len(self._sums) - _SUMS),
                counting.counters(),
                counting.take,
            )
        self._work[_COUNTERS] = address_of(totals.counters)
        self._arguments: np.ndarray = arguments
        self._at: int = address_of(arguments)

    def widen(self, wide: int) -> None:
        """Say where samples are written to as float64."""
        self._pointers[:, 2] = wide + _EVERY * (8 * RUN)

    def aim(self, at: int, count: int, words: Callable[[], np.ndarray], room: int) -> None:
        """Say where the tensor lies, how many elements it has, and where its sample goes in float32.

        Args:
            words: of `run_words`, asked for where it is not taken whole.
        """
        work = self._work
        if count != self._count:
            self._count = work[_WHOLE + 2] = count
            self._runs, self._short = -(-count // RUN), count % RUN > 0
            self._cut[:, 2] = RUN if count > MOST else 0
            if count <= MOST:
                self._cut[0, 2] = count
            self.taken = work[_SAMPLE + 2] = min(count, MOST)
            if self.totals is not None:
                self._arguments[1, 1] = 1 if count <= MOST else RUNS
        work[_DATA], work[_SAMPLE_AT] = at, room
        if count <= MOST:
            self._first[0], self._first[1] = at, room
            return
        starts = words() * self._runs
        starts >>= 37
        starts *= RUN
        if self._short:
            last = min(count - int(starts[-1]), RUN)
            self._cut[-1, 2], self.taken = last, MOST - RUN + last
            work[_SAMPLE + 2] = self.taken
        np.multiply(starts, self.dtype.itemsize, out=self._pointers[:, 0])
        self._pointers[:, 0] += at
        np.add(_PLACES, room, out=self._pointers[:, 1])

    def copy(self) -> None:
        """Copy the sample alone."""
        self._copy(0, 1 if self._count <= MOST else RUNS, *self._given)

    def look(self, step: int) -> bool:
        """Count the tensor and its sample; return whether it holds NaN or infinity."""
        totals, counting = self.totals, self._counting
        assert totals is not None
        assert counting is not None
        totals.open(step)
        self._look(self._at)
        smallest, zeros, top, _, squares, finite = self._sums[: _SUMS + 2].tolist()
        totals.sampled += self.taken
        totals.squares += squares
        totals.finite += finite
        totals.sums += self._sums[_SUMS:]
        if counting.others:
            counting.count_others(totals, int(self._work[_SAMPLE_AT]), self.taken)
        if not top * self._factor < self._largest:
            at = int(self._work[_DATA])
            return _look_beyond(totals, at, self._count, zeros, self.dtype, self._largest)
        totals.add_extremes(self._count, int(zeros), 0, 0, top * self._factor, _amin(smallest) * self._factor)
        return False


_PLACES = _EVERY * (4 * RUN)


class Rows:
    """Some tensors of a dtype that are sampled together, each a `Row`.

    Args:
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.
        is_wide: whether samples are written as float64 too.

    Attributes:
        wide: float64, to which they are written.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        count: int,
        counting: Counting,
        totals: Sequence[tuple[Totals, torch.dtype]] = (),
        is_wide: bool = False,
    ) -> None:
        given: Sequence[tuple[Totals | None, torch.dtype]] = totals or [(None, dtype)] * count
        self.wide: torch.Tensor | None = None
        self._cut, self._pointers = chunks = new_chunks(count, is_wide)
        self._rows: list[Row] = [
            Row(dtype, counting, one, storage, is_wide, chunks, number) for number, (one, storage) in enumerate(given)
        ]
        self._copy: Callable[..., None] = _kernel("copy_samples", d.copy_table(dtype, is_wide))
        self._room: np.ndarray = counting.room[None]
        self._ends: list[int] = []

    def widen(self, packed: torch.Tensor, ends: np.ndarray) -> None:
        """Write the samples to float64 too, from the ends of parts that hold as many as are sampled at most."""
        self.wide, self._ends = packed, ends.tolist()
        first = address(packed)
        for row, end in zip(self._rows, self._ends):
            row.widen(first + 8 * end)

    def copy(self, data: Sequence[int] | np.ndarray, counts: Sequence[int], words: Callable[[int], np.ndarray]) -> list:
        """Copy samples of tensors at some addresses; return how many elements each has."""
        room = address_of(self._room)
        for number, (row, at, count) in enumerate(zip(self._rows, data, counts)):
            row.aim(at, count, functools.partial(words, number), room)
        lengths = self._cut[:, :, 2].reshape(-1)
        run_chunks(self._copy, lengths, address_of(self._cut), address_of(self._pointers), 0, 0, 0, 0, 0)
        return self._clear()

    def look(
        self, data: Sequence[int] | np.ndarray, counts: Sequence[int], words: Callable[[int], np.ndarray], step: int
    ) -> tuple[list[int], list[int]]:
        """Count tensors at some addresses; return the elements of each sample, and rows that hold NaN or infinity."""
        threads, broken = torch.get_num_threads(), []
        if threads > 1 and len(self._room) < len(self._rows):
            self._room = np.empty((len(self._rows), MOST), np.float32)
        room, apart = address_of(self._room), self._room.strides[0] if len(self._room) > 1 else 0

        def look(first: int, last: int) -> None:
            for number in range(first, last):
                row = self._rows[number]
                row.aim(data[number], counts[number], functools.partial(words, number), room + apart * number)
                if row.look(step):
                    broken.append(number)

        if apart:
            run_chunks(look, np.asarray(counts))
        else:
            look(0, len(self._rows))
        return self._clear(), sorted(broken)

    def _clear(self) -> list[int]:
        """Write zeros behind samples that leave some of their part free; return how many elements each sample has."""
        taken = [row.taken for row in self._rows]
        for start, end, length in zip(self._ends, self._ends[1:], taken):
            if self.wide is not None and length < end - start:
                self.wide[start + length : end] = 0.0
        return taken


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
