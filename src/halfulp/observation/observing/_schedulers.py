"""Learning-rate schedulers of optimizers, found where nobody says which they are."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


def scheduler_of(optimizers: Sequence[torch.optim.Optimizer]) -> LRScheduler | None:
    """Return the scheduler of optimizers, None without one.

    torch's schedulers mark the `step` of their optimizer, but leave no way from there to themselves: only where the
    mark stands all living objects are searched.
    """
    if not any(hasattr(one.step, "_wrapped_by_lr_sched") for one in optimizers):
        return None
    return outermost(
        thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler) and _of(thing, optimizers)
    )


def outermost(schedulers: Iterable[Any]) -> LRScheduler | None:
    """Return the scheduler that no other one steps, None without any; one of several."""
    found = list(schedulers)
    inner = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    outer = [one for one in found if id(one) not in inner]
    return outer[-1] if outer else None


def _of(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    return any(getattr(scheduler, "optimizer", None) is one for one in optimizers)
