"""The history of a run's steps: losses, loss scales, skipped steps and learning-rate schedules."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch

from ...gradients import AdaptiveGradScaler
from .._record import StepRecord

Scaler = torch.amp.GradScaler
MOST_SEARCHES = 3
MOST_FRAMES = 14
# A scale that would grow beyond float32 stays as it is.
LARGEST_SCALE = torch.finfo(torch.float32).max


class LossScales:
    """Follows a gradient scaler and a learning-rate scheduler.

    Args:
        scaler: the run's, or None: then one that calls an optimizer's step is found there.

    Attributes:
        skipped: steps that were seen to be skipped.
    """

    def __init__(self, scaler: Scaler | None, scheduler: Any | None) -> None:
        self.scaler, self.scheduler = scaler, scheduler
        self.skipped: int = 0
        self._before: _Reading | None = None
        self._taken: int = 0
        self._fresh: bool = False
        self._searches: int = 0 if scaler is not None else MOST_SEARCHES
        self._epoch: int | None = None if scheduler is None else int(getattr(scheduler, "last_epoch", 0))

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take the scale from which skips are counted, as a run begins to be watched."""
        self._fresh = not any(optimizer.state for optimizer in optimizers)
        self._before = self._now()
        self._taken = 0

    @property
    def seeks(self) -> bool:
        """Whether the scaler is to be looked for, as it is in the first steps of a run without a given one."""
        return self._searches > 0

    def search(self) -> None:
        """Look for the scaler among the callers of an optimizer's step."""
        self._searches -= 1
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MOST_FRAMES):
            frame = frame.f_back if frame is not None else None
            if frame is None:
                return
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(owner, Scaler):
                self.scaler, self._searches = owner, 0
                self._before = self._found()
                return

    def scale(self) -> float | None:
        """Return the loss scale, None without an enabled scaler."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        if isinstance(scaler, AdaptiveGradScaler):
            return scaler._scale_now()
        return float(scaler.get_scale())

    def after_step(self, optimizer: torch.optim.Optimizer, sampled: bool) -> tuple[float | None, int]:
        """Count a step that was taken, before the scaler is told of it.

        Returns:
            What `read` does, or (None, 0) where reading would wait for a device to no end.
        """
        found = self.read() if sampled or self._is_on_host() or self._can_have_grown() else (None, 0)
        infinite = getattr(optimizer, "found_inf", None)  # of an optimizer that skips its step itself
        on_host = isinstance(infinite, torch.Tensor) and infinite.is_cpu
        self._taken += 0 if on_host and bool(infinite) else 1
        return found

    def read(self) -> tuple[float | None, int]:
        """Return the scale now, and how many steps were skipped since it was read last."""
        before, taken = self._before, self._taken
        now = self._before = self._now()
        self._taken = 0
        if now is None or before is None or self.scaler is None:
            return self.scale(), 0
        skipped = _skips(before, now, taken, self.scaler)
        self.skipped += skipped
        return now.scale, skipped

    def _now(self) -> _Reading | None:
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled() or isinstance(scaler, AdaptiveGradScaler):
            return None
        return _Reading(float(scaler.get_scale()), int(scaler._get_growth_tracker()))

    def _found(self) -> _Reading | None:
        """What to count from with a scaler that is found as the first step is taken.

        The first step that a new scaler does not skip follows on nothing but skips. One that has been at work before
        has made other steps since its last skip, or has left a state in the optimizer.
        """
        now = self._now()
        if now is None or self.scaler is None or now.streak or not self._fresh:
            return now
        return _Reading(float(self.scaler._init_scale), 0)

    def _is_on_host(self) -> bool:
        scale = getattr(self.scaler, "_scale", None)
        return isinstance(self.scaler, AdaptiveGradScaler) or scale is None or bool(scale.is_cpu)

    def _can_have_grown(self) -> bool:
        before, scaler = self._before, self.scaler
        return before is None or scaler is None or before.streak + self._taken >= scaler.get_growth_interval()

    def scheduled(self) -> int | None:
        """Return how many steps the scheduler took since it was asked last; None without one."""
        if self.scheduler is None or self._epoch is None:
            return None
        before, self._epoch = self._epoch, int(getattr(self.scheduler, "last_epoch", 0))
        return self._epoch - before

    def sites(self) -> list[dict[str, Any]]:
        """Return an AdaptiveGradScaler's gradient exponents per site."""
        if not isinstance(self.scaler, AdaptiveGradScaler) or not self.scaler.is_enabled():
            return []
        return [
            {
                "site": site.key,
                "exponent": site.exponent,
                "overflows": site.overflows,
                "merged": site.merged,
                "format": None if site.format is None else site.format.name,
                "amax": {kind: reading.amax for kind, reading in site.readings.items()},
            }
            for site in self.scaler._controller.sites
        ]


class _Reading(NamedTuple):
    """A scaler's scale, and how many iterations in a row it had not skipped then."""

    scale: float
    streak: int


def _skips(before: _Reading, now: _Reading, taken: int, scaler: Scaler) -> int:
    """How many steps were skipped between two readings, between which so many were taken.

    Exact where one step is taken between them, as on the host; of a scale that grew and then fell, together with
    skips before it grew, all but one are counted.
    """
    if before.streak and now.streak == before.streak + taken:
        return 0  # the scale may have been set by hand
    factor, grown = float(scaler.get_backoff_factor()), before.scale * float(scaler.get_growth_factor())
    grew = not now.streak and taken > 0 and before.streak + taken >= scaler.get_growth_interval()
    highest = grown if grew and grown <= LARGEST_SCALE else before.scale
    if not 0 < factor < 1 or now.scale >= highest or before.scale <= 0:
        return 0
    return 1 if now.scale <= 0 else max(1, round(math.log(now.scale / highest) / math.log(factor)))


MOST_HISTORY = 2000


class History:
    """Appends steps to a list, and thins it where it grows long; counts of skipped steps are never lost."""

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
