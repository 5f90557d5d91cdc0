"""Scratch memory of one thread, kept between calls so that a product of matrices does not fault its pages in again."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch

MOST_KEPT_BYTES = 64 << 20
_ALIGNMENT = 64
_thread_memory = threading.local()

TensorSpec = tuple[tuple[int, ...], torch.dtype]
WorkspaceLayout = tuple[tuple[TensorSpec, ...], ...]


@contextlib.contextmanager
def borrow_workspace(layout: WorkspaceLayout, device: torch.device) -> Iterator[list[list[torch.Tensor]]]:
    """Return uninitialized contiguous tensors from the thread's scratch memory.

    Args:
        layout: groups of (shape, dtype). The first group has memory of its own; all later ones lie over each other.
        device: of the tensors. On the CPU the ones used last are kept for the next call, up to KEPT_BYTES a thread.
    """
    if device.type != "cpu":
        yield _allocate_workspace(layout, device)[0]
        return
    kept = _thread_memory.__dict__.setdefault("kept", {})
    # Taken out while in use, so that a call inside a call gets memory of its own.
    made = kept.pop(layout, None) or _allocate_workspace(layout, device)
    try:
        yield made[0]
    finally:
        kept[layout] = made
        if sum(size for _, size in kept.values()) > MOST_KEPT_BYTES:
            _forget_oldest(kept)


def _forget_oldest(kept: dict[WorkspaceLayout, tuple[list, int]]) -> None:
    for layout in list(kept):
        if sum(size for _, size in kept.values()) <= MOST_KEPT_BYTES:
            return
        del kept[layout]


def _allocate_workspace(layout: WorkspaceLayout, device: torch.device) -> tuple[list[list[torch.Tensor]], int]:
    start = sum(_count_aligned_bytes(spec) for spec in layout[0])
    size = start + max((sum(_count_aligned_bytes(spec) for spec in group) for group in layout[1:]), default=0)
    block = torch.empty(size, dtype=torch.uint8, device=device)
    groups = [_carve_views(block, 0, layout[0]), *(_carve_views(block, start, group) for group in layout[1:])]
    return groups, size


def _carve_views(block: torch.Tensor, at: int, group: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
    out = []
    for shape, dtype in group:
        size = math.prod(shape) * dtype.itemsize
        out.append(block[at : at + size].view(dtype).view(shape))
        at += _count_aligned_bytes((shape, dtype))
    return out


def _count_aligned_bytes(spec: TensorSpec) -> int:
    shape, dtype = spec
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
