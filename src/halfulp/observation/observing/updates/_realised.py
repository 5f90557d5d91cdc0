"""What became of wanted changes: counts over samples of many tensors at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ....kernels import address, compile_kernel, select_engine
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
    decreases: bool = False,
) -> None:
    """Add to each record the changes of its part of three flat tensors.

    Args:
        records: one per tensor.
        before, after: sampled values, one tensor's after the other's.
        wanted: the changes that were wanted; where they are not known, the gradients, whose zeros want none.
        ends: where the tensors begin and end: one more than there are tensors.
        known: whether `wanted` is what was wanted.
        decreases: whether wanted decreases alone are counted.
    """
    parts = [one.detach().to("cpu", torch.float64).contiguous() for one in (before, after, wanted)]
    ends = np.asarray(ends, np.int64)
    counts, sums = np.zeros((len(records), 2), np.int64), np.zeros((len(records), 2))
    if select_engine("cpu") == "numba":
        _kernel()(*map(address, parts), decreases, ends, counts, sums)
    else:
        before, after, wanted = parts
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


def count_changes(before, after, wanted, decreases, ends, counts, sums):
    """Kernel: wanted changes, those that left the bits, their squares, and their products with what took place.

    Four sums at a time, each of which would wait for the addition before it.
    """
    for tensor in range(counts.shape[0]):
        seen = cancelled = 0
        s0 = s1 = s2 = s3 = k0 = k1 = k2 = k3 = 0.0
        start, end = ends[tensor], ends[tensor + 1]
        whole = start + (end - start) // 4 * 4
        for i in range(start, whole, 4):
            n0, c0, q0, p0 = change_of(before, after, wanted, decreases, i)
            n1, c1, q1, p1 = change_of(before, after, wanted, decreases, i + 1)
            n2, c2, q2, p2 = change_of(before, after, wanted, decreases, i + 2)
            n3, c3, q3, p3 = change_of(before, after, wanted, decreases, i + 3)
            seen += n0 + n1 + n2 + n3
            cancelled += c0 + c1 + c2 + c3
            s0, s1, s2, s3 = s0 + q0, s1 + q1, s2 + q2, s3 + q3
            k0, k1, k2, k3 = k0 + p0, k1 + p1, k2 + p2, k3 + p3
        for i in range(whole, end):
            n0, c0, q0, p0 = change_of(before, after, wanted, decreases, i)
            seen += n0
            cancelled += c0
            s0, k0 = s0 + q0, k0 + p0
        counts[tensor, 0], counts[tensor, 1] = seen, cancelled
        sums[tensor, 0], sums[tensor, 1] = (s0 + s1) + (s2 + s3), (k0 + k1) + (k2 + k3)


def change_of(before, after, wanted, decreases, i):
    """Piece: of element i whether a change was wanted, whether it was cancelled, its square, and its product."""
    b, a, w = real64(load64(before, i)), real64(load64(after, i)), real64(load64(wanted, i))
    change = a - b
    counted = (w != 0.0) & ((w < 0.0) | (decreases == 0)) & (abs(w) < INFINITY) & (abs(change) < INFINITY)
    wanted_here = w if counted else 0.0
    product = w * change if counted else 0.0
    same = load64(before, i) == load64(after, i)
    return (1 if counted else 0), (1 if counted & same else 0), wanted_here * wanted_here, product


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
    return compile_kernel(count_changes, f"void(int64, int64, int64, int64, {arrays})")
