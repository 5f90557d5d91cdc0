"""What belongs to optimizers, looked for among all living objects: model, scaler, scheduler, average, and names."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ...gradients import AdaptiveGradScaler
from ...optim import EMA
from ...optim._gradient_release import model_parameters
from ..observing._averages import read_averages
from ..observing._observe import find_scheduler

SCALERS = (torch.amp.GradScaler, AdaptiveGradScaler)


class Together(nn.Module):
    """Several models that are trained together, as one to observe; each has a name of its own.

    Args:
        names: that the script has for them; without one a model is called by its class.
    """

    def __init__(self, models: Iterable[nn.Module], names: Iterable[str | None] = ()) -> None:
        super().__init__()
        for model, name in itertools.zip_longest(models, names):
            self.add_module(self._free_name(name or type(model).__name__.replace(".", "_") or "model"), model)

    def _free_name(self, name: str) -> str:
        free, count = name, 1
        while hasattr(self, free):
            count += 1
            free = f"{name}_{count}"
        return free


@dataclass(frozen=True)
class Found:
    """The model, scaler, scheduler and average that belong to optimizers.

    Attributes:
        model: the outermost module that holds the optimizers' parameters, without wrappers that only distribute or
            compile it; a `Together` where optimizers step several models.
        scaler: the GradScaler, None without one, or where it is not known which of several it is.
        scheduler: the learning-rate scheduler, None without one.
        average: an average of just this model's parameters; None without one, or where there are several.
        compiled: whether some of the model runs compiled.
    """

    model: nn.Module
    scaler: torch.amp.GradScaler | None
    scheduler: LRScheduler | None
    average: AveragedModel | EMA | None
    compiled: bool

    @property
    def name(self) -> str:
        """The class of the model, or the names of several."""
        names = self.model._modules if isinstance(self.model, Together) else [type(self.model).__name__]
        return " + ".join(names)


def find(optimizers: Sequence[torch.optim.Optimizer], used: Container[torch.amp.GradScaler] = ()) -> Found | None:
    """Find the model, scaler and so on of optimizers; None where no module holds any of their parameters.

    Args:
        used: scalers that belong to others, and are taken only where there is no other one.
    """
    order = [id(parameter) for one in optimizers for _, _, parameter in model_parameters(one)]
    wanted = {key: place for place, key in reversed(list(enumerate(order)))}
    modules, scalers, averages = _alive()
    children = {id(child) for module in modules for child in module.children()}
    roots = [(module, _parameter_ids(module) & wanted.keys()) for module in modules if id(module) not in children]
    roots = [(module, held) for module, held in roots if held]
    if not roots:
        return None
    covering = sorted(
        _choose_covering(roots), key=lambda module: min(wanted[key] for key in _parameter_ids(module) & wanted.keys())
    )
    wrapped: dict[int, list[nn.Module]] = {}
    for one in covering:
        wrapped.setdefault(id(_unwrap(one)), [_unwrap(one)]).append(one)
    chosen = list(wrapped.values())
    single = len(chosen) == 1
    model = chosen[0][0] if single else Together([same[0] for same in chosen], names_in_script(chosen))
    free = [scaler for scaler in scalers if scaler not in used] or scalers
    return Found(
        model,
        free[0] if len(free) == 1 else None,
        find_scheduler(optimizers),
        _average_of(model, averages),
        any(map(_is_compiled, covering)),
    )


def model_of(parameters: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return the outermost module that holds all of some parameters, None where none does."""
    wanted = {id(parameter) for parameter in parameters}
    modules, _, _ = _alive()
    holding = [module for module in modules if wanted <= _parameter_ids(module)]
    return _unwrap(max(holding, key=lambda module: sum(1 for _ in module.modules()))) if holding else None


def _alive() -> tuple[list[nn.Module], list[torch.amp.GradScaler], list[AveragedModel | EMA]]:
    modules: list[nn.Module] = []
    scalers: list[torch.amp.GradScaler] = []
    averages: list[AveragedModel | EMA] = []
    for thing in gc.get_objects():
        # Proxies answer isinstance for what they stand for, and may raise when they are asked.
        kind = type(thing)
        if issubclass(kind, nn.Module):
            modules.append(thing)
        elif issubclass(kind, SCALERS):
            scalers.append(thing)
        elif issubclass(kind, EMA):
            averages.append(thing)
    ready = [module for module in modules if "_parameters" in vars(module) and "_modules" in vars(module)]
    # One whose construction failed may be alive without the model that it averages.
    averages += [module for module in ready if isinstance(module, AveragedModel) and "module" in module._modules]
    return [module for module in ready if not isinstance(module, Together)], scalers, averages


def _average_of(model: nn.Module, averages: list[AveragedModel | EMA]) -> AveragedModel | EMA | None:
    """Return the one average of all parameters of a model and no others."""
    live = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = [one for one in averages if {name: x.shape for name, x in read_averages(one).items()} == live]
    return found[0] if len(found) == 1 else None


def _parameter_ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _choose_covering(roots: list[tuple[nn.Module, set[int]]]) -> list[nn.Module]:
    """Return as few modules as together hold all parameters that any holds, those of most parameters first."""
    left = set().union(*(held for _, held in roots))
    chosen = []
    for module, held in sorted(roots, key=lambda root: (-len(root[1]), sum(1 for _ in root[0].modules()))):
        if held & left:
            chosen.append(module)
            left -= held
    return chosen


def _is_compiled(model: nn.Module) -> bool:
    return any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in model.modules())


def _unwrap(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._orig_mod  # type: ignore[assignment]
        elif "_forward_module" in module._modules:  # Fabric's
            module = module._forward_module  # type: ignore[assignment]
        else:
            return module


# Frames of these hold models under names of their own, as self and module.
_SKIPPED_PACKAGES = ("torch", "halfulp", "runpy", "contextlib", "functools")
_MOST_ATTRIBUTES = 200


def names_in_script(models: Sequence[Iterable[nn.Module]]) -> list[str | None]:
    """Return the variable or attribute that holds each model, None where none does.

    The outermost frame that has one decides, as there a model has the name that tells it from the others.

    Args:
        models: each with the wrappers around it, whose name does as well.
    """
    wanted = {id(one): place for place, same in enumerate(models) for one in same}
    found: dict[int, str] = {}
    for frame in reversed(list(_frames())):
        for variables in (_locals(frame), dict(frame.f_globals)):
            for name, value in _bound(variables):
                place = wanted.get(id(value))
                if place is not None and name.isidentifier() and name != "self" and not name.startswith("__"):
                    found.setdefault(place, name)
    return [found.get(place) for place in range(len(models))]


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the script, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in _SKIPPED_PACKAGES:
            yield frame
        frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, Any]:
    """Return a frame's variables, which its own copy of them does not keep alive afterwards."""
    found = dict(frame.f_locals)
    # Until Python 3.12 a function's frame holds what was read until it is read again; a module's frame has its globals.
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        frame.f_locals.clear()
    return found


def _bound(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, then what attributes of objects and items of dictionaries among them hold, with their names."""
    yield from variables.items()
    for value in variables.values():
        inner = value if type(value) is dict else getattr(type(value), "__dict__", None) and _attributes(value)
        if isinstance(inner, dict) and len(inner) <= _MOST_ATTRIBUTES:
            yield from ((name, one) for name, one in list(inner.items()) if isinstance(name, str))


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object, or of an outer module and its children; None of classes and modules."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # objects without one, and those that raise for any question
        return None
    if type(own) is not dict or isinstance(value, type(sys)):
        return None
    return own
