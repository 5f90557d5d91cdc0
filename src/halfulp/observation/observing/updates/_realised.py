"""What became of wanted changes: counts over samples of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....kernels import address, select_engine, plain_address
from ...record._record import Realised
from ._change_loop import WORDS, change_kernel


def add_changes(
    records: Sequence[Realised],
    before: torch.Tensor,
    after: torch.Tensor,
    wanted: torch.Tensor,
    ends: Sequence[int] | np.ndarray,
    *,
    known: bool = True,
    decreases: bool = False,
    as_values: bool = False,
    rounded: torch.Tensor | None = None,
) -> None:
    """Add to each record the changes of its part of three flat tensors.

    Args:
        records: one per tensor.
        before, after: sampled values, one tensor's after the other's.
        wanted: the changes that were wanted; where they are not known, the gradients, whose zeros want none.
        ends: where the tensors begin and end: one more than there are tensors.
        known: whether `wanted` is what was wanted.
        decreases: whether wanted decreases alone are counted.
        as_values: whether `wanted` holds the values that were wanted, and not the changes.
        rounded: float32, to which the wanted changes are written.
    """
    ends = np.asarray(ends, np.int64)
    work = np.zeros(WORDS + 4 * len(records), np.int64)  # the table, then what is counted
    found = work[WORDS:].reshape(2, -1, 2)
    counts, sums = found[0], found[1].view(np.float64)
    before, after, wanted = map(_as_float64, (before, after, wanted))
    if select_engine("cpu") == "numba":
        written = 0 if rounded is None else address(rounded)
        at, counted = work.ctypes.data, 16 * len(records)
        results = at + 8 * WORDS, at + 8 * WORDS + counted
        places = *map(address, (before, after, wanted)), written, as_values, decreases, ends.ctypes.data
        work[:WORDS] = (*places, *results)
        change_kernel(rounded is not None)(0, len(records), at)
    else:
        wanted = wanted - before if as_values else wanted
        if rounded is not None:
            rounded.copy_(wanted)
        wanted = wanted.clamp(max=0) if decreases else wanted
        _by_numpy(before.numpy(), after.numpy(), wanted.numpy(), ends, counts, sums)
    for record, (seen, cancelled), (square, kept) in zip(records, counts.tolist(), sums.tolist()):
        record.seen += seen
        record.cancelled += cancelled
        if not known:
            record.known = False
        elif record.known:
            # Each step's share counts by its elements, not by the size of its learning rate.
            share = kept / square if square else 0.0
            record.wanted += seen if square else 0
            record.kept += seen * share


def _as_float64(values: torch.Tensor) -> torch.Tensor:
    """Plain memory of float64 on the CPU."""
    if values.dtype is torch.float64 and plain_address(values):
        return values
    return values.detach().to("cpu", torch.float64).contiguous()


def _by_numpy(
    before: np.ndarray,
    after: np.ndarray,
    wanted: np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
    sums: np.ndarray,
) -> None:
    """The reference."""
    for tensor in range(len(counts)):
        b, a, w = (part[ends[tensor] : ends[tensor + 1]] for part in (before, after, wanted))
        with np.errstate(invalid="ignore", over="ignore"):
            change = a - b
        asked = (w != 0) & np.isfinite(w) & np.isfinite(change)
        counts[tensor] = asked.sum(), (asked & (b.view(np.int64) == a.view(np.int64))).sum()
        sums[tensor] = (w[asked] ** 2).sum(), (w[asked] * change[asked]).sum()
