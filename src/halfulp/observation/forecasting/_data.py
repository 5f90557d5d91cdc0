"""What a forecast found out, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ._costs import Cost


@dataclass(frozen=True)
class LayerForecast:
    """One parameter under a schedule, its updates rounded to nearest unless its optimizer does better.

    Attributes:
        name: qualified.
        dtype: of the weights.
        elements: how many.
        weight_update: of halfulp's optimizers; "nearest" for every other.
        updates: where the size of its updates is known from, in words; None where nothing tells it, and then steps
            and shares are None or empty.
        update_size: root mean square of an update over the learning rate, now.
        lr: the largest learning rate to come.
        freeze_step: the first step of the schedule from which on fewer than 1% of the nonzero updates change their
            element; None if there is none. The first step to come if that holds already.
        freeze_lr: the learning rate there.
        freeze_range: steps before which and after which it lies with a chance of 1 in 20 each: what few elements, a
            sample of many, and updates that become a half smaller or larger leave open; an end is None beyond the
            schedule.
        freeze_update: the size of an update, in the weights' unit, below which fewer than 1% change their element.
        after_freeze: share of the learning rates to come that comes after it, which trains nothing; 0 without one.
        lost: (step, share of nonzero updates that change nothing) at steps spread over the schedule.
        lost_share: the mean of that share, each step weighed by its learning rate.
        weight_decay: decoupled; 0 without.
        decay_lost: share of the decoupled weight decay that rounding drops; None without one, negative if rounding
            makes more of it.
        noise_drift: how far a weight drifts by updates of one sign before stochastic rounding's noise is smaller than
            the drift, in the weights' unit; None where updates are unknown.
        noise_steps: how many steps that takes at the largest learning rate to come.
        noise_over_drift: the ratio of the two at the end of the schedule.
        relative: updates over the median weight, at the schedule's mean learning rate; None where unknown.
        beta2, eps: of the optimizer, None without.
        denominator: dtype in which a denominator of rounded numbers is computed, None where in float32.
    """

    name: str
    dtype: torch.dtype
    elements: int
    weight_update: str = "nearest"
    updates: str | None = None
    update_size: float | None = None
    lr: float = 0.0
    freeze_step: int | None = None
    freeze_lr: float | None = None
    freeze_range: tuple[int | None, int | None] | None = None
    freeze_update: float | None = None
    after_freeze: float = 0.0
    lost: tuple[tuple[int, float], ...] = ()
    lost_share: float | None = None
    weight_decay: float = 0.0
    decay_lost: float | None = None
    noise_drift: float | None = None
    noise_steps: float | None = None
    noise_over_drift: float | None = None
    relative: float | None = None
    beta2: float | None = None
    eps: float | None = None
    denominator: torch.dtype | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        plain = {key: value for key, value in vars(self).items() if key not in ("dtype", "denominator")}
        plain |= {"dtype": _name(self.dtype), "lost": [list(pair) for pair in self.lost]}
        plain["freeze_range"] = None if self.freeze_range is None else list(self.freeze_range)
        return plain | {"denominator": None if self.denominator is None else _name(self.denominator)}


@dataclass(frozen=True)
class ForecastData:
    """The layers, what they have in common, and what each way to store them would cost.

    Attributes:
        layers: in the model's order.
        rule: the optimizer's update rule.
        schedule: its name.
        start, steps: steps made so far, and of the whole run.
        costs: bytes of each weight update; empty without parameters of 16 bits.
        notes: what could not be read or is not known, in sentences.
        learning_rates: (step, learning rate of the first group) at steps spread over the schedule.
    """

    layers: tuple[LayerForecast, ...]
    rule: str
    schedule: str
    start: int
    steps: int
    costs: tuple[Cost, ...] = ()
    notes: tuple[str, ...] = field(default=())
    learning_rates: tuple[tuple[int, float], ...] = ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
