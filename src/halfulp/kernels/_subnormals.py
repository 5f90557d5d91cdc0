"""Subnormal numbers stay numbers in kernels, whatever the process has told its processor.

`torch.set_flush_denormal(True)`, which some imports call, makes a thread's float arithmetic take subnormal numbers
for 0 (FTZ and DAZ). A kernel and its reference in torch would then give other bits than without it, and than each
other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

# The smallest normal float64; its half is subnormal.
_LEAST_NORMAL = 2.0**-1022


def flushes() -> bool:
    """Return whether this thread's arithmetic takes subnormal numbers for 0.

    >>> flushes()
    False
    """
    return _LEAST_NORMAL * 0.5 == 0.0


class keeping_subnormals:
    """A context, or a decorator of a function, in which this thread's arithmetic keeps subnormal numbers."""

    def __init__(self) -> None:
        self._flushed = False

    def __call__(self, function: Function) -> Function:
        """Decorate a function, which mostly finds nothing to do: then without a context, which costs 2 us a call."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if not flushes():
                return function(*arguments, **options)
            with keeping_subnormals():
                return function(*arguments, **options)

        return cast("Function", run)

    def __enter__(self) -> None:
        """Stop flushing."""
        self._flushed = flushes()
        if self._flushed:
            torch.set_flush_denormal(False)

    def __exit__(self, *error: object) -> None:
        """Restore flushing if the thread flushed before."""
        if self._flushed:
            torch.set_flush_denormal(True)


def keep_subnormals() -> None:
    """Make this thread's arithmetic keep subnormal numbers: a thread begins as the one that starts it."""
    if flushes():
        torch.set_flush_denormal(False)
