"""Loss scales, skipped steps and learning-rate schedules, as scalers and schedulers have them at each step."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import torch

from ...gradients import AdaptiveGradScaler

Scaler = torch.amp.GradScaler
MOST_FRAMES = 12


class LossScales:
    """Follows a gradient scaler and a learning-rate scheduler.

    Args:
        scaler: the run's, or None: then one that calls an optimizer's step is found there.
        scheduler: the run's, or None.
    """

    def __init__(self, scaler: Scaler | None, scheduler: Any | None) -> None:
        self.scaler, self.scheduler = scaler, scheduler
        self.skipped: int = 0
        self._scale: float | None = None
        self._searches: int = 0 if scaler is not None else 3
        self._epoch: int | None = None if scheduler is None else int(getattr(scheduler, "last_epoch", 0))

    def search(self) -> None:
        """Look for the scaler among the callers of an optimizer's step, in the first steps."""
        if self._searches <= 0:
            return
        self._searches -= 1
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MOST_FRAMES):
            frame = frame.f_back if frame is not None else None
            if frame is None:
                return
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(owner, Scaler):
                self.scaler, self._searches = owner, 0
                return

    def scale(self) -> float | None:
        """Return the loss scale, None without an enabled scaler."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        if isinstance(scaler, AdaptiveGradScaler):
            return scaler._scale_now()
        return float(scaler.get_scale())

    def read(self) -> tuple[float | None, int]:
        """Return the scale now, and how many steps were skipped since it was read last."""
        now = self.scale()
        if now is None or self.scaler is None or isinstance(self.scaler, AdaptiveGradScaler):
            self._scale = now
            return now, 0
        before = self._scale if self._scale is not None else float(self.scaler._init_scale)
        self._scale = now
        skipped = _backoffs(before, now, float(self.scaler.get_backoff_factor()))
        self.skipped += skipped
        return now, skipped

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


def _backoffs(before: float, now: float, factor: float) -> int:
    """How many times a scale was multiplied by its backoff factor, where it fell; growth between them hides none but
    as many as it made good."""
    if not (0 < factor < 1) or now >= before or before <= 0:
        return 0
    return 1 if now <= 0 else max(1, round(math.log(now / before) / math.log(factor)))
