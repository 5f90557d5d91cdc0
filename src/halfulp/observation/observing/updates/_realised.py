"""What became of wanted changes: counts over samples of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....kernels import address, select_engine
from ..._record import Realised
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
    count = len(records)
    work = np.empty(WORDS + 4 * count + len(ends), np.int64)  # the table, what is counted, and the ends
    counts, sums = work[WORDS : WORDS + 2 * count], work[WORDS + 2 * count : WORDS + 4 * count].view(np.float64)
    work[WORDS + 4 * count :] = ends
    parts = [_as_float64(one) for one in (before, after, wanted)]
    if select_engine("cpu") == "llvm":
        at = work.ctypes.data
        here = at + 8 * WORDS
        written = 0 if rounded is None else address(rounded)
        places = here + 32 * count, here, here + 16 * count
        work[:WORDS] = (*map(address, parts), written, as_values, decreases, *places)
        change_kernel(rounded is not None)(0, count, at)
    else:
        if as_values:
            parts[2] = parts[2] - parts[0]
        if rounded is not None:
            rounded.copy_(parts[2])
        if decreases:
            parts[2] = parts[2].clamp(max=0)
        b, a, w = (part.numpy() for part in parts)
        _by_numpy(b, a, w, work[-len(ends) :], counts.reshape(-1, 2), sums.reshape(-1, 2))
    numbers, amounts = counts.tolist(), sums.tolist()
    for record, seen, cancelled, square, kept in zip(
        records, numbers[::2], numbers[1::2], amounts[::2], amounts[1::2], strict=True
    ):
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
    if values.dtype is torch.float64 and values.is_cpu and values.is_contiguous():
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
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            change = a - b
            asked = (w != 0) & np.isfinite(w) & np.isfinite(change)
            counts[tensor] = asked.sum(), (asked & (b.view(np.int64) == a.view(np.int64))).sum()
            sums[tensor] = (w[asked] ** 2).sum(), (w[asked] * change[asked]).sum()
