"""Runs a kernel over many chunks, on as many threads as torch uses, with subnormal numbers kept.

`torch.set_flush_denormal(True)`, which some imports call, makes a thread's float arithmetic take subnormal numbers
for 0 (FTZ and DAZ). A kernel and its reference in torch would then give other bits than without it, and than each
other.

The kernels run without the GIL, so plain Python threads run them side by side. That compiles one kernel instead of two,
survives fork (a child makes its own pool), lets several callers run at once, and needs no library of threads.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    from functools import cached_property as cached_attribute
else:

    class cached_attribute:
        """functools.cached_property without a lock: Python 3.11's, if held in a fork, stops the child for ever."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self._function, self.__doc__ = function, function.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = vars(instance)[self._function.__name__] = self._function(instance)
            return value


# The smallest normal float64; its half is subnormal.
_LEAST_NORMAL_FLOAT64 = 2.0**-1022


def flushes_subnormals() -> bool:
    """Return whether this thread's arithmetic takes subnormal numbers for 0.

    >>> flushes_subnormals()
    False
    """
    return _LEAST_NORMAL_FLOAT64 * 0.5 == 0.0


# Of a thread that keeps subnormal numbers meanwhile.
_saved_thread_settings = threading.local()


def count_kernel_threads() -> int:
    """Return how many threads a kernel takes: as many as torch's operators, outside of `keeping_subnormals`."""
    return getattr(_saved_thread_settings, "threads", None) or torch.get_num_threads()


class keeping_subnormals:
    """A context, or a decorator of a function, in which arithmetic that this thread begins keeps subnormal numbers.

    torch's operators take one thread then: its other threads flush if they began while this one flushed. A thread of
    Python that first calls torch meanwhile begins with one, too, and keeps it.
    """

    def __init__(self) -> None:
        self._flushed = False

    def __call__(self, function: Function) -> Function:
        """Decorate a function, which mostly finds nothing to do: then without a context, which costs 2 us a call."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if not flushes_subnormals():
                return function(*arguments, **options)
            with keeping_subnormals():
                return function(*arguments, **options)

        return cast("Function", run)

    def __enter__(self) -> None:
        """Stop flushing."""
        self._flushed = flushes_subnormals()
        if self._flushed:
            self._threads = getattr(_saved_thread_settings, "threads", None), torch.get_num_threads()
            _saved_thread_settings.threads = count_kernel_threads()
            torch.set_num_threads(1)
            torch.set_flush_denormal(False)

    def __exit__(self, *error: object) -> None:
        """Restore flushing if the thread flushed before."""
        if self._flushed:
            torch.set_flush_denormal(True)
            _saved_thread_settings.threads, threads = self._threads
            torch.set_num_threads(threads)


MOST_SERIAL_ELEMENTS = 65_536


def run_chunks(kernel: Callable, lengths: np.ndarray, *arguments) -> None:
    """Call kernel(first, last, *arguments), which works on the chunks [first, last) without the GIL, by threads.

    `lengths`, an int64 array of shape (chunks,), are the elements of each chunk, by which threads get equal parts.
    """
    count = len(lengths)
    threads = min(count_kernel_threads(), count)
    if threads == 1 or int(lengths.sum()) < MOST_SERIAL_ELEMENTS:
        kernel(0, count, *arguments)
        return
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads, side="left")
    edges = [0, *(int(c) for c in cuts), count]
    pieces = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    pool = _make_thread_pool(count_kernel_threads())
    futures: list[Future] = []
    try:
        for a, b in pieces[1:]:
            futures.append(pool.submit(kernel, a, b, *arguments))  # those before one that fails run
        kernel(*pieces[0], *arguments)
    finally:
        _wait_for_pieces(futures)
    for future in futures:
        future.result()


def _wait_for_pieces(futures: list[Future]) -> None:
    """Wait until no piece runs, whatever interrupts: behind an exception the caller frees the memory they work on."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except BaseException as error:  # as Ctrl-C; pieces that wait for a thread need not begin
            interrupted = error
            for future in futures:
                future.cancel()
    if interrupted is not None:
        raise interrupted


@functools.lru_cache(4)  # threads of a pool that falls out end when its last caller has left it
def _make_thread_pool(threads: int) -> ThreadPoolExecutor:
    # A thread begins as the one that starts it, which may flush.
    return ThreadPoolExecutor(threads, "halfulp", initializer=lambda: torch.set_flush_denormal(False))


def hold_while_forking(lock: Any) -> None:
    """Let forks wait for a lock, so that no child begins with one that nobody there will release.

    Of two that a thread holds together the outer one is to be given last, as forks take the last one first.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_thread_pool.cache_clear)
