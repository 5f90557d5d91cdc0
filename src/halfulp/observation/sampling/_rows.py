"""Tensors of one dtype on the CPU: compiled kernels find the extremes of all of each, and copy and count its sample.

Copies are counted many in one call, so that calls cost little beside what they count.
"""

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
from ...rounding._kernel_constants import WORD32
from ...rounding.blocks import _device_functions as b
from ...rounding.blocks._table import Kind, largest_table, layout_of, words_of
from ...rounding.blocks._target import BlockTarget
from . import _device_functions as d
from ._candidates import Candidates, thresholds
from ._sample_places import MOST, RUN, RUNS
from ._totals import Totals

SAMPLES = 64  # that wait to be counted
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


class Rows:
    """Some tensors of a dtype that are sampled together.

    Args:
        dtype: of their memory, one of KERNEL_DTYPES.
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.

    Attributes:
        wide: float64, to which the samples are written too; None where they are not.
    """

    def __init__(self, dtype: torch.dtype, count: int, totals: Sequence[tuple[Totals, torch.dtype]] = ()) -> None:
        self.dtype, self.totals = dtype, [one for one, _ in totals]
        self.wide: torch.Tensor | None = None
        self._largest: np.ndarray = np.array([torch.finfo(storage).max for _, storage in totals])
        self._counts: np.ndarray = np.full(count, -1, np.int64)
        self._data: np.ndarray = np.zeros((count, 1), np.int64)
        self._starts: np.ndarray = np.zeros((count, RUNS), np.int64)
        self._cut: np.ndarray = np.zeros((count * RUNS, 4), np.int64)
        self._cut[:, 0] = np.arange(count * RUNS)
        self._lengths: np.ndarray = self._cut[:, 2].reshape(count, RUNS)
        self._whole: np.ndarray = np.zeros((count, 4), np.int64)
        self._whole[:, 0] = np.arange(count)
        self._sums: np.ndarray = np.zeros((count, 4))
        self._taken: np.ndarray = np.zeros(count, np.int64)
        self._set_columns(2)
        self._given: tuple[int, ...] = *map(address_of, (self._whole, self._data)), 0, 0, 0, address_of(self._sums), 0

    def _set_columns(self, columns: int) -> None:
        self._pointers: np.ndarray = np.zeros((len(self._counts) * RUNS, columns), np.int64)
        self._sources: np.ndarray = self._pointers[:, 0].reshape(-1, RUNS)
        self._targets: np.ndarray = self._pointers[:, 1].reshape(-1, RUNS)

    def widen(self, packed: torch.Tensor, ends: np.ndarray) -> None:
        """Write the samples to float64 too, from the ends of parts that hold as many as are sampled at most."""
        self.wide = packed
        self._set_columns(3)
        self._pointers[:, 2] = (address(packed) + 8 * (ends[:-1, None] + _EVERY * RUN)).reshape(-1)

    def point(self, data: Any, counts: Any, words: Callable[[], np.ndarray]) -> np.ndarray:
        """Say where the tensors lie and how many elements they have; return how many of each are sampled.

        Args:
            words: of `run_words`, asked for where a tensor is not taken whole.
        """
        self._data[:, 0] = data
        if not np.array_equal(self._counts, counts):
            self._counts[:] = self._whole[:, 2] = counts
            self._taken[:] = np.minimum(self._counts, MOST)
            many = self._counts > MOST
            self._many = slice(None) if many.all() else np.flatnonzero(many)
            self._runs: np.ndarray = -(-self._counts[self._many, None] // RUN)
            self._has_short: bool = bool((self._counts[self._many] % RUN).any())
            self._starts[:] = _EVERY * RUN
            self._lengths[:] = (self._counts[:, None] - self._starts).clip(0, RUN)
        if self._runs.size:
            starts = words()[self._many] * self._runs
            starts >>= 37
            starts *= RUN
            self._starts[self._many] = starts
            if self._has_short:  # the last run of a tensor, which only the last of a sample can be
                last = np.minimum(self._counts[self._many] - starts[:, -1], RUN)
                self._lengths[self._many, -1] = last
                self._taken[self._many] = MOST - RUN + last
                if self.wide is not None:
                    for row in np.flatnonzero(self._taken < np.minimum(self._counts, MOST)).tolist():
                        at = (int(self._pointers[row * RUNS, 2]) - address(self.wide)) // 8
                        self.wide[at + int(self._taken[row]) : at + MOST] = 0.0
        np.multiply(self._starts, self.dtype.itemsize, out=self._sources)
        self._sources += self._data
        return self._taken

    def copy(self, targets: np.ndarray, first: int = 0) -> None:
        """Write samples as float32, of as many tensors from the first on as there are addresses to write to."""
        last, ends = first + len(targets), (first * RUNS, (first + len(targets)) * RUNS)
        np.add(targets[:, None], _EVERY * (4 * RUN), out=self._targets[first:last])
        kernel = _kernel("copy_samples", d.copy_table(self.dtype, self.wide is not None))
        cut = self._cut[ends[0] : ends[1]]
        run_chunks(kernel, cut[:, 2], address_of(cut), address_of(self._pointers), 0, 0, 0, 0, 0)

    def look(self, counting: Counting, step: int) -> list[int]:
        """Count the tensors, their samples when others are; return the rows of those that hold NaN or infinity."""
        broken = self.add_extremes(step)
        for first in range(0, len(self.totals), SAMPLES):
            some = self.totals[first : first + SAMPLES]
            self.copy(counting.places(len(some)), first)
            counting.add(some, self._taken[first : first + SAMPLES].tolist())
        return broken

    def add_extremes(self, step: int) -> list[int]:
        """Add what is counted of whole tensors; return the rows of those that hold NaN or infinity."""
        run_chunks(_kernel("extremes", d.whole_table(self.dtype)), self._counts, *self._given)
        factor = _factor(self.dtype)
        amax = self._sums[:, d.LARGEST] * factor
        amin = (d.INFINITE - self._sums[:, d.SMALLEST].astype(np.float32).view(np.int32)).view(np.float32) * factor
        columns = (self._counts, self._sums[:, d.ZEROS], amax, amin)
        broken, special = [], set(np.flatnonzero(~(amax < self._largest)).tolist())
        for row, (totals, count, zeros, top, low) in enumerate(zip(self.totals, *[x.tolist() for x in columns])):
            totals.open(step)
            if row not in special:
                totals.add_extremes(count, int(zeros), 0, 0, top, low)
            elif _look_beyond(totals, int(self._data[row, 0]), count, zeros, self.dtype, float(self._largest[row])):
                broken.append(row)
        return broken


class Row:
    """A tensor of one place whose looks are many: as `Rows`, in one call.

    Args:
        dtype: of its memory, one of KERNEL_DTYPES, and the dtype whose largest number is counted.
    """

    __slots__ = (
        "_at",
        "_cut",
        "_kernel",
        "_largest",
        "_pointers",
        "_runs",
        "_short",
        "_sums",
        "_work",
        "count",
        "dtype",
    )

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.count, self._runs, self._short = dtype, -1, 0, False
        self._kernel = _row_kernel(dtype)
        self._largest: float = torch.finfo(dtype).max
        self._sums: np.ndarray = np.zeros(4)
        # Arguments of both kernels; then a chunk and an address of the whole, chunks and addresses of the copies.
        self._work: np.ndarray = np.zeros(_POINTERS + 2 * RUNS, np.int64)
        at = address_of(self._work)
        self._at: int = at
        self._work[: 2 * 9] = 0, 1, at + 8 * _WHOLE, at + 8 * _DATA, 0, 0, 0, address_of(self._sums), 0, *[0] * 9
        self._work[11:13] = at + 8 * _CUT, at + 8 * _POINTERS
        self._cut: np.ndarray = self._work[_CUT:_POINTERS].reshape(RUNS, 4)
        self._cut[:, 0] = _EVERY
        self._pointers: np.ndarray = self._work[_POINTERS:].reshape(RUNS, 2)

    def look(self, at: int, count: int, words: Callable[[], np.ndarray], totals: Totals, counting: Counting) -> bool:
        """Count a tensor, its sample when others are; return whether it holds NaN or infinity."""
        work, taken, target = self._work, count if count < MOST else MOST, counting.next_place()
        if count != self.count:
            self.count = work[_WHOLE + 2] = count
            self._runs, self._short = -(-count // RUN), count % RUN > 0
            work[10] = 1 if count <= MOST else RUNS
            self._cut[:, 2] = RUN
            self._cut[0, 2] = min(count, RUN if count > MOST else MOST)
        work[_DATA] = at
        if count <= MOST:
            work[_POINTERS], work[_POINTERS + 1] = at, target
        else:
            starts = words() * self._runs
            starts >>= 37
            starts *= RUN
            if self._short:
                last = self._cut[-1, 2] = min(count - int(starts[-1]), RUN)
                taken += int(last) - RUN
            np.multiply(starts, self.dtype.itemsize, out=self._pointers[:, 0])
            self._pointers[:, 0] += at
            np.add(_PLACES, target, out=self._pointers[:, 1])
        self._kernel(self._at)
        counting.add_one(totals, taken)
        smallest, zeros, top, _ = self._sums.tolist()
        factor = _factor(self.dtype)
        if not top * factor < self._largest:
            return _look_beyond(totals, at, count, zeros, self.dtype, self._largest)
        totals.add_extremes(count, int(zeros), 0, 0, top * factor, _amin(smallest) * factor)
        return False


# Places in the memory of a row.
_WHOLE, _DATA, _CUT, _POINTERS = 18, 22, 23, 23 + 4 * RUNS
_PLACES = _EVERY * (4 * RUN)


@functools.cache
def _row_kernel(dtype: torch.dtype) -> Callable[[int], None]:
    return compile_series("look", [d.whole_table(dtype), d.copy_table(dtype, False)])


def _look_beyond(totals: Totals, at: int, count: int, zeros: float, dtype: torch.dtype, largest: float) -> bool:
    """Add the extremes of a tensor with NaN, infinities or its dtype's largest number; return whether with the former.

    Args:
        at: its address.
        zeros: how many it has.
    """
    words, found = np.array([_memory_word(largest, dtype)], np.uint32), np.empty((1, 4))
    work = np.array([0, 0, count, 0, at, 0], np.int64)
    place, *given = map(address_of, (work, words, found))
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


class Counting:
    """Samples that wait to be counted, at most SAMPLES, and how they are counted in the candidates' formats."""

    def __init__(self, candidates: Candidates, count_blocks: Callable[[torch.Tensor, BlockFormat], Any]) -> None:
        singles = len(candidates.single)
        self._table: Table = d.counts_table(singles)
        self._constants: np.ndarray = candidates.thresholds.astype(np.uint32)
        self._blocks: list[_Blocks] = [
            _Blocks(*pair, count_blocks) for pair in zip(candidates.blocks, candidates.targets)
        ]
        self._room: torch.Tensor = torch.empty(SAMPLES, MOST, dtype=torch.float32, device="cpu")
        self._first: int = self._room.data_ptr()
        self._places: np.ndarray = self._first + 4 * MOST * np.arange(SAMPLES)
        self._waiting: list[Totals] = []
        self._taken: list[int] = []
        # What kernels take and give, in memory that is there: fresh pages cost as much as the counts.
        own = np.arange(SAMPLES)
        self._cut: np.ndarray = np.zeros((SAMPLES, 4), np.int64)
        self._cut[:, 0] = own
        self._counters: np.ndarray = np.empty((SAMPLES, COPIES, d.BINS + 1), np.int64)
        self._pointers: np.ndarray = np.empty((SAMPLES, 2), np.int64)
        self._pointers[:, 1] = address_of(self._counters) + own * self._counters[0].nbytes

    def places(self, count: int) -> np.ndarray:
        """Return where so many samples, which are then added, are to be written."""
        first = len(self._waiting)
        if first + count > SAMPLES:
            self.flush()
            first = 0
        return self._places[first : first + count]

    def next_place(self) -> int:
        """Return where a sample, which is then added, is to be written."""
        if len(self._waiting) == SAMPLES:
            self.flush()
        return self._first + 4 * MOST * len(self._waiting)

    def add(self, totals: Sequence[Totals], taken: Sequence[int]) -> None:
        """Let samples wait that were written."""
        self._waiting += totals
        self._taken += taken

    def add_one(self, totals: Totals, taken: int) -> None:
        """Let a sample wait that was written."""
        self._waiting.append(totals)
        self._taken.append(taken)

    def flush(self) -> None:
        """Count the samples that wait."""
        waiting, taken = self._waiting, self._taken
        self._waiting, self._taken = [], []
        if waiting:
            self.count(self._places, taken, waiting)

    def count(self, places: np.ndarray, taken: Sequence[int], totals: Sequence[Totals]) -> None:
        """Count float32 samples at some addresses, of so many elements each."""
        for first in range(0, len(totals), SAMPLES):
            last = first + SAMPLES
            self._count(places[first:last], taken[first:last], totals[first:last])

    def _count(self, places: np.ndarray, taken: Sequence[int], totals: Sequence[Totals]) -> None:
        count = len(totals)
        cut, pointers, counters = (x[:count] for x in (self._cut, self._pointers, self._counters))
        cut[:, 2], pointers[:, 0] = taken, places[:count]
        counters.fill(0)
        found = _run(_kernel("sample_counts", self._table), self._table, cut, pointers, cut[:, 1], self._constants)
        numbers = found[:, 1:].astype(np.int64)
        finite, zeros = numbers[:, :1], numbers[:, 1:2]
        gone, small, fit = (numbers[:, 2 + k : 2 + self._constants.size : 3] for k in range(3))
        columns = [np.stack([gone - zeros, small - gone, finite - fit], 2).reshape(count, -1)]
        columns += [one.count(cut, pointers) for one in self._blocks]
        columns.append(counters.sum(1)[:, : d.BINS])
        reals = found[:, : d.FINITE + 1].tolist()
        for one, length, row, (squares, known) in zip(totals, taken, np.concatenate(columns, 1), reals):
            one.sampled += length
            one.squares += squares
            one.finite += known
            one.counts += row


class _Blocks:
    """How samples are counted in a block format; by the reference where its scales are no words of 32 bits."""

    def __init__(self, format: BlockFormat, target: BlockTarget, count_blocks: Callable[..., Any]) -> None:
        self.format, self._count_blocks = format, count_blocks
        self._table: Table | None = None
        if layout_of(torch.float32, target) is WORD32:
            kind = Kind.of(torch.float32, target, WORD32)
            self._scaled: bool = target.tensor_scale
            self._table, self._largest = (
                d.blocks_table(kind._replace(under_amax=self._scaled)),
                largest_table(torch.float32, kind),
            )
            words = words_of(target, WORD32, 1.0, target.element.max)
            self._amax: int = len(words) - b.WORDS + b.AMAX
            self._words: np.ndarray = np.concatenate([words, np.array(thresholds(format.element)[:2], np.uint32)])

    def count(self, cut: np.ndarray, pointers: np.ndarray) -> np.ndarray:
        """Return the four counts of each sample."""
        if self._table is None:
            samples = zip(pointers[:, 0].tolist(), cut[:, 2].tolist())
            return np.array([self._count_blocks(_sample_at(*one), self.format) for one in samples], np.int64)
        row, words = cut[:, 1], self._words[None]
        if self._scaled:
            kernel = _kernel("largest_blocks", self._largest)
            found = _run(kernel, self._largest, cut, pointers, row, self._words[:-2])
            row, words = cut[:, 0], np.repeat(words, len(cut), 0)
            words[:, self._amax] = found[:, 0].astype(np.float32).view(np.uint32)
        return _run(_kernel("block_counts", self._table), self._table, cut, pointers, row, words)[:, :4].astype(
            np.int64
        )


def _sample_at(place: int, taken: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * max(1, taken)).from_address(place), dtype=torch.float32)[:taken].clone()


def _run(
    kernel: Callable[..., None], table: Table, cut: np.ndarray, pointers: np.ndarray, row: np.ndarray, words: np.ndarray
) -> np.ndarray:
    """Return the sums of chunks, one per sample."""
    keys, sums = np.zeros(len(cut), np.uint64), np.zeros((len(cut), table.sums))
    given = map(address_of, (cut, pointers, np.ascontiguousarray(row), np.ascontiguousarray(words), keys, sums))
    run_chunks(kernel, cut[:, 2], *given, 0)
    return sums


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
    sums = _run(_kernel("changes", table), table, cut, pointers, cut[:, 0], words)
    return sums[:, :2].astype(np.int64), sums[:, 2:]
