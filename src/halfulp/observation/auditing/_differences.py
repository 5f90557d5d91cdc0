"""How two tensors differ: counts, and changes in ulps by size, gathered part by part."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import formats
from ...formats import Format
from ...kernels import CHUNK, IndexMap, address, address_of, chunks, plain, run_chunks, run_on_tensors, select_engine
from ...kernels._table import Table
from ...kernels._trace import COPIES
from ...kernels.tensors._writer import as_signed
from ...kernels.vector._table_loop import compile_table
from . import _device_functions as d

# Elements of the parts that are converted, or read, one after another.
AT_ONCE = 1 << 21


@dataclass(slots=True)
class Differences:
    """What is known of the parts of two tensors of floating-point numbers that were compared.

    Attributes:
        counts: by the names of `_device_functions`.
        table: changed elements by binade and first bits of the fraction of their change in ulps.
        total, largest: sum and largest of the changes in ulps.
        first: the first element of A and B.
    """

    counts: np.ndarray
    table: np.ndarray
    total: float = 0.0
    largest: float = 0.0
    first: tuple[float, float] | None = None

    def histogram(self) -> dict[int, int]:
        """Return the changed elements by floor(log2 |change in ulps|)."""
        binades = self.table.reshape(d.BINADES, -1).sum(1)
        return {int(k) + d.LOWEST: int(binades[k]) for k in np.flatnonzero(binades)}

    def median(self) -> float:
        """Return the lower median of |change in ulps| over finite elements, unchanged ones as 0; NaN without any."""
        finite = int(self.counts[d.FINITE])
        if not finite:
            return math.nan
        still = finite - int(self.table.sum())
        rank = (finite - 1) // 2
        if rank < still:
            return 0.0
        slot = int(np.searchsorted(np.cumsum(self.table), rank - still, side="right"))
        return math.ldexp(1 + (slot % (1 << d.FINE)) / (1 << d.FINE), (slot >> d.FINE) + d.LOWEST)

    def mean(self) -> float:
        """Return the mean of |change in ulps| over finite elements; NaN without any."""
        finite = int(self.counts[d.FINITE])
        return self.total / finite if finite else math.nan


def empty_differences() -> Differences:
    """Return what is known before the first part."""
    return Differences(np.zeros(d.COUNTS, np.int64), np.zeros(d.SLOTS, np.int64))


def add_differences(found: Differences, a: Tensor, b: Tensor) -> None:
    """Compare a part of A with the same part of B, both of one shape and floating-point.

    A change is measured in the spacing, at the element of A, of that dtype of the two which is coarser there.
    """
    if not a.numel():
        return
    forms = formats.get(a.dtype), formats.get(b.dtype)
    a, b = (plain(x.detach()).reshape(-1) for x in (a, b))
    first = float(a[0].double()), float(b[0].double())
    if found.first is None:
        found.first = first
    # NaN is no number that a tensor can be constant at.
    for which, before, now in ((d.A_VARIES, found.first[0], first[0]), (d.B_VARIES, found.first[1], first[1])):
        found.counts[which] |= int(before != now)
    count = _count_compiled if select_engine("cpu") == "llvm" else _count_tensors
    for parts in zip(a.split(AT_ONCE), b.split(AT_ONCE), strict=True):
        count(found, [_native(part) for part in parts], forms)


def _native(x: Tensor) -> Tensor:
    """Return the elements in a row, in a dtype that has them all and whose codes are read."""
    wide = x if x.dtype in d.NATIVE else x.to(torch.float32)
    return wide.contiguous().cpu()


def _constants(found: Differences, parts: list[Tensor], forms: tuple[Format, Format]) -> tuple[list[int], list[int]]:
    """Return what the device functions of codes and of changes take, as words."""
    assert found.first is not None
    firsts, tops = (
        [_word(x.dtype, value) for x, value in zip(parts, pair)] for pair in (found.first, [form.max for form in forms])
    )
    return [*firsts, *tops], [word for form in forms for word in (form.emin + 1023, form.mantissa_bits)]


@functools.cache
def _word(dtype: torch.dtype, value: float) -> int:
    """Return a number's code, as a word."""
    code = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    return int(code.view(getattr(torch, f"int{8 * dtype.itemsize}"))) & ((1 << 8 * dtype.itemsize) - 1)


def _count_compiled(found: Differences, parts: list[Tensor], forms: tuple[Format, Format]) -> None:
    kinds, of_codes, of_changes = [x.dtype for x in parts], *_constants(found, parts, forms)
    cut = chunks(IndexMap.whole((parts[0].numel(),)), 0)
    counted = _run(d.codes_table(*kinds), cut, parts, of_codes)
    whole = (counted[:, d.EQUAL] == cut[:, 2]) & (counted[:, d.SPECIAL] == 0) & (kinds[0] == kinds[1])
    _add_codes(found, counted[:, 2:].sum(0))
    found.counts[[d.SAME, d.FINITE]] += int(cut[whole, 2].sum())
    if (rest := cut[~whole]).size:
        table = np.zeros((torch.get_num_threads(), COPIES, d.SLOTS), np.int64)
        changed = _run(d.changes_table(*kinds), rest, parts, of_changes, table)
        _add_changes(found, table.sum((0, 1)), changed[:, :-1].sum(0), float(changed[:, -1].max()))


def _run(table: Table, cut: np.ndarray, parts: list[Tensor], constants: list[int], *counters: np.ndarray) -> np.ndarray:
    """Run a device function on chunks, those of each thread with counters of its own; return the chunks' sums."""
    groups = len(counters[0]) if counters else len(cut)
    edges = np.linspace(0, len(cut), groups + 1).astype(np.int64)
    lengths, cut = np.diff(edges), cut.copy()
    cut[:, 0] = np.repeat(np.arange(groups), lengths)
    pointers = np.empty((groups, table.columns), np.int64)
    pointers[:, :2] = [address(x) for x in parts]
    for own in counters:
        pointers[:, 2] = [address_of(one) for one in own]
    words, sums = np.array([constants], np.uint64), np.empty((len(cut), table.sums))
    kernel = _kernel(table)
    given = cut, pointers, np.zeros(groups, np.int64), words, np.zeros(0, np.int64), sums
    run_chunks(
        lambda first, last, *places: kernel(int(edges[first]), int(edges[last]), *places),
        lengths * CHUNK,
        *map(address_of, given),
        0,
    )
    return sums


@functools.cache
def _kernel(table: Table) -> Callable[..., None]:
    return compile_table("compare", table)


def _count_tensors(found: Differences, parts: list[Tensor], forms: tuple[Format, Format]) -> None:
    kinds, of_codes, of_changes = [x.dtype for x in parts], *_constants(found, parts, forms)
    table = torch.zeros(1, d.SLOTS, dtype=torch.int64, device="cpu")
    sums = []
    for one, words in ((d.codes_table(*kinds), of_codes), (d.changes_table(*kinds), of_changes)):
        inputs = {("constant", k): as_signed(word, 64) for k, word in enumerate(words)}
        sums.append(np.array(run_on_tensors(one.trace, [*parts, table], inputs)[1]))
    _add_codes(found, sums[0][2:])
    _add_changes(found, table[0].numpy(), sums[1][:-1], sums[1][-1])


def _add_codes(found: Differences, counted: np.ndarray) -> None:
    for which, count in zip(d.SIDES, counted):
        found.counts[which] = (
            found.counts[which] or count > 0 if which in (d.A_VARIES, d.B_VARIES) else found.counts[which] + count
        )


def _add_changes(found: Differences, table: np.ndarray, sums: np.ndarray, largest: float) -> None:
    *counted, total = sums.tolist()
    found.counts[list(d.CHANGED)] += np.array(counted, np.int64)
    found.table += table
    found.total += total
    found.largest = max(found.largest, largest)
