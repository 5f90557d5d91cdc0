"""The model, scaler and scheduler that belong to optimizers, looked for among all living objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class Found:
    """What belongs together.

    Attributes:
        model: the outermost module that holds the optimizers' parameters, without wrappers that only distribute or
            compile it; where optimizers step several models, a module that holds these by the names of their classes.
        scaler: the GradScaler, None without one.
        scheduler: the learning-rate scheduler, None without one.
    """

    model: nn.Module
    scaler: torch.amp.GradScaler | None
    scheduler: LRScheduler | None


def find(optimizers: Sequence[torch.optim.Optimizer]) -> Found | None:
    """Return what belongs to optimizers; None where no module holds any of their parameters."""
    wanted = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    modules, scalers, schedulers = _alive()
    children = {id(child) for module in modules for child in module.children()}
    roots = [(module, _held(module) & wanted) for module in modules if id(module) not in children]
    roots = [(module, held) for module, held in roots if held]
    if not roots:
        return None
    chosen = [_unwrapped(module) for module in _covering(roots)]
    model = chosen[0] if len(chosen) == 1 else _together(chosen)
    mine = [one for one in schedulers if any(getattr(one, "optimizer", None) is optimizer for optimizer in optimizers)]
    return Found(model, scalers[-1] if scalers else None, _outermost(mine))


def model_of(parameters: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return the outermost module that holds all of some parameters, None where none does."""
    wanted = {id(parameter) for parameter in parameters}
    modules, _, _ = _alive()
    holding = [module for module in modules if wanted <= _held(module)]
    return _unwrapped(max(holding, key=lambda module: sum(1 for _ in module.modules()))) if holding else None


def _alive() -> tuple[list[nn.Module], list[torch.amp.GradScaler], list[LRScheduler]]:
    modules: list[nn.Module] = []
    scalers: list[torch.amp.GradScaler] = []
    schedulers: list[LRScheduler] = []
    for thing in gc.get_objects():
        # Proxies answer isinstance for what they stand for, and may raise when they are asked.
        kind = type(thing)
        if issubclass(kind, nn.Module):
            modules.append(thing)
        elif issubclass(kind, torch.amp.GradScaler):
            scalers.append(thing)
        elif issubclass(kind, LRScheduler):
            schedulers.append(thing)
    ready = [module for module in modules if "_parameters" in vars(module) and "_modules" in vars(module)]
    return ready, scalers, schedulers


def _held(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _covering(roots: list[tuple[nn.Module, set[int]]]) -> list[nn.Module]:
    """As few modules as hold all that any holds: those of most parameters first, the smallest of equal ones."""
    left = set().union(*(held for _, held in roots))
    chosen = []
    for module, held in sorted(roots, key=lambda root: (-len(root[1]), sum(1 for _ in root[0].modules()))):
        if held & left:
            chosen.append(module)
            left -= held
    return chosen


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _together(models: list[nn.Module]) -> nn.Module:
    holder = nn.Module()
    for model in models:
        name, count = type(model).__name__, 1
        while name in holder._modules:
            count += 1
            name = f"{type(model).__name__}_{count}"
        holder.add_module(name, model)
    return holder


def _outermost(schedulers: list[LRScheduler]) -> LRScheduler | None:
    """The scheduler that no other one steps."""
    inner: set[int] = set()
    for one in schedulers:
        parts: Any = getattr(one, "_schedulers", ())
        inner |= {id(part) for part in parts}
    outer = [one for one in schedulers if id(one) not in inner]
    return outer[-1] if outer else None
