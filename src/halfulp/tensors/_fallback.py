"""Counting what has no rule and went through float64."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch._ops import OpOverload

_totals: Counter[str] = Counter()
_warned: set[str] = set()
# Process-wide and not per thread: a backward pass on an accelerator runs in threads of its own.
_recorders: list[Counter[str]] = []
_strict: list[bool] = []


class FallbackWarning(UserWarning):
    """An operator without a rule for MCTensors ran in float64 and lost the digits beyond it."""


def fallbacks() -> dict[str, int]:
    """How often each operator without a rule ran in float64 instead, in this process.

    >>> isinstance(fallbacks(), dict)
    True
    """
    return dict(_totals)


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """A block whose fallbacks are counted apart: operator names and how often, backward passes in it included.

    >>> with recorded() as counts:
    ...     pass
    >>> dict(counts)
    {}
    """
    counts: Counter[str] = Counter()
    _recorders.append(counts)
    try:
        yield counts
    finally:
        _recorders[:] = [other for other in _recorders if other is not counts]


@contextmanager
def strict() -> Iterator[None]:
    """A block in which an operator without a rule raises NotImplementedError instead of running in float64."""
    _strict.append(True)
    try:
        yield
    finally:
        _strict.pop()


def note(operator: OpOverload, why: str) -> None:
    """Count a fallback; warn at an operator's first; raise where strict."""
    name = str(operator)
    advice = f"{name} has no rule for {why}: register one by MCTensor.implements"
    if _strict:
        raise NotImplementedError(f"{advice}, or leave halfulp.tensors.strict()")
    _totals[name] += 1
    for counts in _recorders:
        counts[name] += 1
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{advice}. It ran in float64 and lost the digits beyond it", FallbackWarning, stacklevel=4)
