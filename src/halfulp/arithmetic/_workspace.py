"""Scratch memory of one thread, kept between calls so that a product of matrices does not fault its pages in again."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch

KEPT_BYTES = 64 << 20
_ALIGNMENT = 64
_mine = threading.local()

Spec = tuple[tuple[int, ...], torch.dtype]
Layout = tuple[tuple[Spec, ...], ...]


@contextlib.contextmanager
def workspace(layout: Layout, device: torch.device) -> Iterator[list[list[torch.Tensor]]]:
    """Return uninitialized contiguous tensors from the thread's scratch memory.

    Args:
        layout: groups of (shape, dtype). The first group has memory of its own; all later ones lie over each other.
        device: of the tensors. On the CPU the ones used last are kept for the next call, up to KEPT_BYTES a thread.
    """
    if device.type != "cpu":
        yield _built(layout, device)[0]
        return
    kept = _mine.__dict__.setdefault("kept", {})
    # Taken out while in use, so that a call inside a call gets memory of its own.
    made = kept.pop(layout, None) or _built(layout, device)
    try:
        yield made[0]
    finally:
        kept[layout] = made
        if sum(size for _, size in kept.values()) > KEPT_BYTES:
            _forget_oldest(kept)


def _forget_oldest(kept: dict[Layout, tuple[list, int]]) -> None:
    for layout in list(kept):
        if sum(size for _, size in kept.values()) <= KEPT_BYTES:
            return
        del kept[layout]


def _built(layout: Layout, device: torch.device) -> tuple[list[list[torch.Tensor]], int]:
    start = sum(_bytes_of(spec) for spec in layout[0])
    size = start + max((sum(_bytes_of(spec) for spec in group) for group in layout[1:]), default=0)
    block = torch.empty(size, dtype=torch.uint8, device=device)
    groups = [_carve_views(block, 0, layout[0]), *(_carve_views(block, start, group) for group in layout[1:])]
    return groups, size


def _carve_views(block: torch.Tensor, at: int, group: tuple[Spec, ...]) -> list[torch.Tensor]:
    out = []
    for shape, dtype in group:
        size = math.prod(shape) * dtype.itemsize
        out.append(block[at : at + size].view(dtype).view(shape))
        at += _bytes_of((shape, dtype))
    return out


def _bytes_of(spec: Spec) -> int:
    shape, dtype = spec
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
