"""The history of a run's steps, of bounded length, and what its losses show."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import torch

from ..record._record import StepRecord

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


def loss_gap(losses: list[float], dtype: torch.dtype | None) -> float | None:
    """Distance between numbers of a dtype at the losses, over their median change from one to the next."""
    changes = [abs(b - a) for a, b in itertools.pairwise(losses)]
    if dtype is None or not dtype.is_floating_point or not changes:
        return None
    largest = torch.tensor(max(map(abs, losses)), dtype=torch.float64, device="cpu")
    exponent = max(int(torch.frexp(largest)[1]) - 1, math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1)
    ulp = math.ldexp(torch.finfo(dtype).eps, exponent)
    change = statistics.median(changes)
    if not change:  # all are one number: of a wide dtype that is a run that stands still
        return math.inf if torch.finfo(dtype).bits <= 16 and losses[-1] else None
    return ulp / change
