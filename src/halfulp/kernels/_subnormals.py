"""Subnormal numbers stay numbers in kernels, whatever the process has told its processor.

`torch.set_flush_denormal(True)`, which some imports call, makes a thread's float arithmetic take subnormal numbers
for 0 (FTZ and DAZ). A kernel and its reference in torch would then give other bits than without it, and than each
other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# The smallest normal float64; its half is subnormal.
_LEAST_NORMAL = 2.0**-1022


def flushes() -> bool:
    """Return whether this thread's arithmetic takes subnormal numbers for 0.

    >>> flushes()
    False
    """
    return _LEAST_NORMAL * 0.5 == 0.0


@contextlib.contextmanager
def keeping_subnormals() -> Iterator[None]:
    """A context, or a decorator of a function, in which this thread's arithmetic keeps subnormal numbers."""
    if not flushes():
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)


def keep_subnormals() -> None:
    """Make this thread's arithmetic keep subnormal numbers: a thread begins as the one that starts it."""
    if flushes():
        torch.set_flush_denormal(False)
