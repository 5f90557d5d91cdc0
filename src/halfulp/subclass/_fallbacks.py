"""Counting fallbacks: operators without a rule that ran on plain tensors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch._ops import OpOverload

_totals: Counter[str] = Counter()
_warned: set[tuple[str, str]] = set()
# Process-wide and not per thread: a backward pass on an accelerator runs in threads of its own.
_recorders: list[Counter[str]] = []


class _Running:
    """Thread-local counts of the model whose forward pass began last.

    Only written while a compiled model is traced: reading it there would be a guard, and each change a new graph.
    """

    counts: Counter[str] | None = None


_running = _Running()
_strict: list[bool] = []


class FallbackWarning(UserWarning):
    """An operator without a rule ran on plain tensors: MCTensors in float64, scaled tensors in float32."""


def fallbacks() -> dict[str, int]:
    """Return how often each operator without a rule ran on plain tensors instead, in this process.

    >>> isinstance(fallbacks(), dict)
    True
    """
    return dict(_totals)


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Return a block whose fallbacks are counted apart: operator names and how often, backward passes in it included.

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
    """Return a context in which an operator without a rule raises NotImplementedError and never uses plain tensors."""
    _strict.append(True)
    try:
        yield
    finally:
        _strict.pop()


def note_fallback(operator: OpOverload, why: str, remedy: str, loss: str) -> None:
    """Count a fallback; warn at an operator's first; raise where strict.

    Args:
        operator: that has no rule.
        why: for what it has none.
        remedy: how a user registers one.
        loss: what running on plain tensors did.
    """
    name = str(operator)
    advice = f"{name} has no rule for {why}: {remedy}"
    if _strict:
        raise NotImplementedError(f"{advice}, or leave halfulp.mctensor.strict()")
    _totals[name] += 1
    for counts in (*_recorders, _running.counts):
        if counts is not None:
            counts[name] += 1
    if (name, remedy) not in _warned:
        _warned.add((name, remedy))
        warnings.warn(f"{advice}. {loss}", FallbackWarning, stacklevel=4)
