"""Learning rates by step: named schedules, a scheduler of torch, a function, a list."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..._messages import a_kind
from ..._names import unknown

Schedule = str | LRScheduler | Callable[[int], float] | Sequence[float] | Tensor | None
NAMES = ("constant", "linear", "cosine", "wsd")
# What a run of unknown length is taken to have.
CONSTANT_STEPS = 1000
# Far more than any training makes; each costs some bytes and nanoseconds.
MOST_STEPS = 10**8
# "wsd" falls over the last fifth unless told otherwise.
_DECAY = 5


def compute_learning_rates(
    schedule: Schedule,
    top_rates: Sequence[float],
    *,
    steps: int | None = None,
    start: int = 0,
    warmup: int = 0,
    decay: int | None = None,
    final: float = 0.0,
) -> Tensor:
    """Return the learning rate of each group at each step from `start` to the end.

    Args:
        schedule: "constant" (or None), "linear", "cosine" or "wsd" (warm-up, stable, decay); a scheduler of torch,
            which is run on a copy that holds no parameters; a function step -> learning rate; a list of them.
        top_rates: per group, the learning rate that a named schedule begins to fall from.
        steps: length of the whole run; a list has its own.
        start: steps that were made already.
        warmup: steps over which a named schedule rises from top / warmup to the top.
        decay: steps over which "wsd" falls at the end; a fifth of all by default.
        final: the learning rate that a named schedule ends at.

    Returns:
        float64 (groups, steps - start).

    Raises:
        ValueError: an unknown name, no steps where they are needed, none left, or rates that are no finite numbers
            from 0.
        NotImplementedError: ReduceLROnPlateau, which depends on the losses to come.

    >>> compute_learning_rates("linear", [1.0], steps=4, warmup=2).tolist()
    [[0.5, 1.0, 1.0, 0.5]]
    """
    if isinstance(schedule, str) or schedule is None:
        rates = _rates_of_name(schedule or "constant", top_rates, steps, start, warmup, decay, final)
    else:
        _check_unused(schedule, warmup=warmup, decay=decay, final=final)
        if isinstance(schedule, LRScheduler):
            rates = _rates_of_scheduler(schedule, _length(steps, "a scheduler of torch", start))
        elif callable(schedule):
            count = _length(steps, "a function step -> learning rate", start)
            rates = _one_for_all([_rate(schedule(step)) for step in range(start, start + count)], top_rates)
        else:
            rates = _one_for_all(_rates_of_list(schedule, steps, start), top_rates)
    if not (rates.isfinite() & (rates >= 0)).all():
        raise ValueError("the schedule gives learning rates that are no finite numbers from 0: see its formula")
    return rates


def name_schedule(schedule: Schedule) -> str:
    """Return the name of a schedule for a report: its name, its class, "function" or "list"."""
    if schedule is None or isinstance(schedule, str):
        return schedule or "constant"
    if isinstance(schedule, LRScheduler):
        return type(schedule).__name__
    return "function" if callable(schedule) else "list"


def _rates_of_name(
    name: str, top_rates: Sequence[float], steps: int | None, start: int, warmup: int, decay: int | None, final: float
) -> Tensor:
    if name not in NAMES:
        raise ValueError(unknown("schedule", name, NAMES))
    if steps is None and name == "constant":
        steps = start + CONSTANT_STEPS
    count = _length(steps, f"schedule {name!r}", start)
    total = start + count
    fall = (decay if decay is not None else max(1, total // _DECAY)) if name == "wsd" else total - warmup
    if name != "wsd" and decay is not None:
        raise ValueError(f"decay={decay} is for schedule 'wsd'; {name!r} falls from its warm-up to its end")
    if not 0 <= warmup <= total or not 0 <= fall <= total:
        raise ValueError(f"warmup={warmup} and decay={decay}: give numbers of steps from 0 to steps={total}")
    at = torch.arange(start, total, dtype=torch.float64, device="cpu")
    gone = ((at - (total - fall)) / max(fall, 1)).clamp(0, 1)
    share = torch.ones_like(at)
    if name in ("linear", "wsd"):
        share = 1 - gone
    elif name == "cosine":
        share = (1 + torch.cos(math.pi * gone)) / 2
    rise = ((at + 1) / warmup).clamp_max(1) if warmup else torch.ones_like(at)
    return torch.stack([rise * (final + (top - final) * share) for top in top_rates])


def _length(steps: int | None, what: str, start: int) -> int:
    """Return the steps from `start` to the end."""
    if steps is None:
        raise ValueError(f"{what} needs the length of the run: give steps=")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps <= start:
        raise ValueError(
            f"steps={steps!r}: give the length of the whole run, a whole number above the {start} steps made so far"
        )
    if steps - start > MOST_STEPS:
        raise ValueError(f"steps={steps}: a forecast follows each step; give at most {MOST_STEPS:,} steps ahead")
    return steps - start


def _check_unused(schedule: Schedule, **options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value} is for named schedules; {a_kind(schedule)} has its own: leave it out")


def _rate(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"a learning rate is a number, the schedule gave {a_kind(value)}") from None


def _rates_of_list(schedule: Any, steps: int | None, start: int) -> list[float]:
    if not isinstance(schedule, Iterable):
        raise TypeError(
            f"schedule: give {', '.join(map(repr, NAMES))}, a scheduler of torch, a function step -> learning rate "
            f"or a list of learning rates; got {a_kind(schedule)}"
        )
    rates = [_rate(value) for value in schedule]
    if steps is not None and steps != len(rates):
        raise ValueError(f"steps={steps} and a list of {len(rates)} learning rates: leave steps out")
    _length(len(rates), "a list", start)
    return rates[start:]


def _one_for_all(rates: list[float], top_rates: Sequence[float]) -> Tensor:
    return torch.tensor(rates, dtype=torch.float64, device="cpu").expand(len(top_rates), -1)


def _rates_of_scheduler(scheduler: LRScheduler, count: int) -> Tensor:
    """Return the rates that a scheduler would give from now on, by a copy with one number per group."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise NotImplementedError(
            "ReduceLROnPlateau depends on losses to come: give a function step -> learning rate, or a list"
        )
    optimizer = scheduler.optimizer
    stand_in = torch.optim.SGD(
        [{"params": [torch.zeros((), dtype=torch.float32, device="cpu")]} for _ in optimizer.param_groups], lr=0.0
    )
    for group, given in zip(stand_in.param_groups, optimizer.param_groups):
        group.update({key: copy.deepcopy(value) for key, value in given.items() if key != "params"})
    copied = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers warn where no step of the optimizer went before
        for _ in range(count):
            rates.append([float(group["lr"]) for group in stand_in.param_groups])
            copied.step()
    return torch.tensor(rates, dtype=torch.float64, device="cpu").T
