"""What became of wanted changes: counts over samples of many tensors at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ....kernels import address, chosen, compile_kernel
from ....kernels.scalar._operations import load64, real64
from ...record._record import Realised

INFINITY = float("inf")


def add_changes(
    records: Sequence[Realised],
    before: torch.Tensor,
    after: torch.Tensor,
    wanted: torch.Tensor,
    ends: Sequence[int] | np.ndarray,
    known: bool = True,
) -> None:
    """Add to each record the changes of its part of three flat tensors.

    Args:
        records: one per tensor.
        before, after: sampled values, one tensor's after the other's.
        wanted: the changes that were wanted; where they are not known, the gradients, whose zeros want none.
        ends: where the tensors begin and end: one more than there are tensors.
        known: whether `wanted` is what was wanted.
    """
    parts = [one.detach().to("cpu", torch.float64).contiguous() for one in (before, after, wanted)]
    ends = np.asarray(ends, np.int64)
    counts, sums = np.zeros((len(records), 2), np.int64), np.zeros((len(records), 2))
    if chosen("cpu") == "numba":
        _kernel()(*map(address, parts), ends, counts, sums)
    else:
        before, after, wanted = parts
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


def count_changes(before, after, wanted, ends, counts, sums):
    """Kernel: wanted changes, those that left the bits, their squares, and their products with what took place."""
    for tensor in range(counts.shape[0]):
        seen = cancelled = 0
        squares = kept = 0.0
        for i in range(ends[tensor], ends[tensor + 1]):
            b, a, w = real64(load64(before, i)), real64(load64(after, i)), real64(load64(wanted, i))
            change = a - b
            if (w != 0.0) & (abs(w) < INFINITY) & (abs(change) < INFINITY):
                seen += 1
                cancelled += 1 if load64(before, i) == load64(after, i) else 0
                squares += w * w
                kept += w * change
        counts[tensor, 0], counts[tensor, 1] = seen, cancelled
        sums[tensor, 0], sums[tensor, 1] = squares, kept


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


@functools.cache
def _kernel() -> Callable:
    arrays = "int64[::1], int64[:,::1], float64[:,::1]"
    return compile_kernel(count_changes, f"void(int64, int64, int64, {arrays})")
