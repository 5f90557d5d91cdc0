"""The history of a run's steps, of bounded length, and what its losses show."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

import torch

from .._record import StepRecord

MOST_HISTORY = 2000


class History:
    """Appends steps to a list, and thins it where it grows long; counts of skipped steps are never lost.

    Args:
        steps: the record's list.
    """

    def __init__(self, steps: list[StepRecord]) -> None:
        self._steps = steps

    def add(self, step: StepRecord) -> None:
        """Append a step."""
        self._steps.append(step)
        if len(self._steps) > MOST_HISTORY:
            self._steps[:] = thinned(self._steps)


def thinned(steps: list[StepRecord]) -> list[StepRecord]:
    """Return every second step, with the skipped and scheduled steps of the one before it added to its own.

    >>> one = StepRecord(0, True, 0.1, skipped=2, scheduled=1)
    >>> thinned([one, StepRecord(1, False, 0.1, scheduled=1)])[0].skipped
    2
    """
    kept = []
    for first, second in zip(steps[::2], steps[1::2]):
        scheduled = None if second.scheduled is None else (first.scheduled or 0) + second.scheduled
        loss = first.loss if second.loss is None else second.loss
        kept.append(replace(second, skipped=first.skipped + second.skipped, scheduled=scheduled, loss=loss))
    return kept + (steps[-1:] if len(steps) % 2 else [])


def loss_gap(losses: Iterable[float], dtype: torch.dtype | None) -> float | None:
    """Median, over losses in a row, of the distance between a dtype's numbers there over their change."""
    losses = list(losses)
    if dtype is None or not dtype.is_floating_point or len(losses) < 2:
        return None
    kind = torch.finfo(dtype)
    gaps = []
    for a, b in itertools.pairwise(losses):
        exponent = math.frexp(max(abs(a), abs(b), kind.smallest_normal))[1] - 1
        gaps.append(math.ldexp(kind.eps, exponent) / abs(b - a) if a != b else math.inf)
    found = statistics.median(gaps)
    if math.isinf(found):  # most are one number: of a wide dtype that is a run that stands still
        return math.inf if kind.bits <= 16 and losses[-1] else None
    return found
