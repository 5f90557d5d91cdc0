"""Windows over the last dimensions: as a view, and added back where they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def window_views(x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """All windows over the last dimensions as a view: (..., out..., kernel...)."""
    spatial = len(kernel)
    lead, sizes = x.shape[:-spatial], x.shape[-spatial:]
    steps, leads = x.stride()[-spatial:], x.stride()[:-spatial]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(sizes, kernel, stride, dilation)]
    if min(counts) < 1:
        raise RuntimeError(f"a kernel of {tuple(kernel)} is larger than the padded input of {tuple(sizes)}")
    strides = [*leads, *(a * s for a, s in zip(steps, stride)), *(a * d for a, d in zip(steps, dilation))]
    return x.as_strided([*lead, *counts, *kernel], strides, x.storage_offset())


def fold_windows(columns: Any, size: Sequence[int], places: Sequence[int], setup: dict) -> Any:
    """Windows' values, (batch, channels x taps, places), summed where they overlap: one strided sum per tap."""
    kernel, stride, dilation = setup["kernel"], setup["stride"], setup["dilation"]
    into = columns.new_zeros(list(size))
    columns = columns.reshape([size[0], size[1], math.prod(kernel), *places])
    for tap in range(math.prod(kernel)):
        at = torch.unravel_index(torch.tensor(tap, dtype=torch.int64, device="cpu"), tuple(kernel))
        reach = tuple(
            slice(int(a) * d, int(a) * d + s * (n - 1) + 1, s) for a, d, s, n in zip(at, dilation, stride, places)
        )
        into[(slice(None), slice(None), *reach)] += columns[:, :, tap]
    return into
