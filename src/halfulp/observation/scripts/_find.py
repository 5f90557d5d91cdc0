"""What belongs to a script's optimizers, found among all living objects, and the training that they make."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ...gradients import AdaptiveGradScaler
from ...kernels import in_float64
from ...optim import EMA
from ...optim.parameters._narrow_groups import walk_model_parameters
from ...sinks import Outlet, Row
from .._finding import Finding, plain_causes
from .._record import Record, plain_record
from .._text import of_model
from ..findings import findings_of
from ..observing._averages import read_averages
from ..observing._observation import Observation, write_summary
from ..observing._observe import find_scheduler, observe
from ._run import replace_function

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
    """Find the model, scaler and so on of optimizers; None where no module holds any of their parameters."""
    order = [id(parameter) for one in optimizers for _, _, parameter in walk_model_parameters(one)]
    wanted = {key: place for place, key in reversed(list(enumerate(order)))}
    modules, scalers = _find_modules(), _find_living(SCALERS)
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
    model = chosen[0][0] if len(chosen) == 1 else Together([same[0] for same in chosen], names_in_script(chosen))
    # Those that belong to others are taken only where there is no other one.
    free = [scaler for scaler in scalers if scaler not in used] or scalers
    return Found(
        model,
        free[0] if len(free) == 1 else None,
        find_scheduler(optimizers),
        _average_of(model, modules),
        any(map(_is_compiled, covering)),
    )


def model_of(parameters: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return the outermost module that holds all of some parameters, None where none does."""
    wanted = {id(parameter) for parameter in parameters}
    holding = [module for module in _find_modules() if wanted <= _parameter_ids(module)]
    return _unwrap(max(holding, key=lambda module: sum(1 for _ in module.modules()))) if holding else None


def _find_living(kind: Any) -> list[Any]:
    # Proxies answer isinstance for what they stand for, and may raise when they are asked.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def _find_modules() -> list[nn.Module]:
    """Return the living modules whose construction is done, but those that hold models together for an observation."""
    ready = [one for one in _find_living(nn.Module) if "_parameters" in vars(one) and "_modules" in vars(one)]
    return [module for module in ready if not isinstance(module, Together)]


def _average_of(model: nn.Module, modules: list[nn.Module]) -> AveragedModel | EMA | None:
    """Return the one average of all parameters of a model and no others."""
    live = {name: parameter.shape for name, parameter in model.named_parameters()}
    # One whose construction failed may be alive without the model that it averages.
    averaged = [one for one in modules if isinstance(one, AveragedModel) and "module" in one._modules]
    averages = [*_find_living(EMA), *averaged]
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
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    frames = [one for one in frames if str(one.f_globals.get("__name__", "")).split(".")[0] not in _SKIPPED_PACKAGES]
    for frame in reversed(frames):
        variables = dict(frame.f_locals)
        # Until Python 3.12 a function's frame keeps alive what was read; a module's frame has its globals.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            frame.f_locals.clear()
        for name, value in itertools.chain(_bound(variables), _bound(dict(frame.f_globals))):
            place = wanted.get(id(value))
            if place is not None and name.isidentifier() and name != "self" and not name.startswith("__"):
                found.setdefault(place, name)
    return [found.get(place) for place in range(len(models))]


def _bound(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, then what attributes of plain objects and items of dictionaries among them hold, by name."""
    yield from variables.items()
    for value in variables.values():
        try:
            inner = value if type(value) is dict else object.__getattribute__(value, "__dict__")
        except Exception:  # objects without one, and those that raise for any question
            continue
        if type(inner) is dict and not isinstance(value, ModuleType) and len(inner) <= _MOST_ATTRIBUTES:
            yield from ((name, one) for name, one in list(inner.items()) if isinstance(name, str))


class Training:
    """Observes optimizers and the model that they step, without keeping them alive.

    The hooks alone hold the observation, and the optimizers the hooks: where the script lets go of its model and
    optimizers, the three go together, and what was counted until then stays here.

    Attributes:
        number: in the order of their first rows, where rows are taken; None before one.
        model: name of the model's class.
        together: whether it is of several models.
        compiled: whether some of the model runs compiled.
        kinds: names of the optimizers' classes.
        span: the first and the last of the script's optimizer steps that were its own, counted over all.
        record: what was counted, once it has ended.
    """

    def __init__(
        self,
        found: Found,
        optimizers: Sequence[torch.optim.Optimizer],
        interval: int,
        rows: Callable[[Training, Row], None] | None = None,
    ) -> None:
        self.number: int | None = None
        self.model: str = found.name
        self.together: bool = isinstance(found.model, Together)
        self.compiled: bool = found.compiled
        self.kinds: list[str] = list(dict.fromkeys(type(one).__name__ for one in optimizers))
        self.interval: int = interval
        self.span: tuple[float, float] = (math.inf, -math.inf)
        self.record: Record | None = None
        self._steps: int = 0
        self._overhead: float | None = None
        sinks = [] if rows is None else [Outlet("the file of JSON lines", functools.partial(rows, self))]
        observation = observe(
            found.model,
            optimizers,
            interval=interval,
            scaler=found.scaler,
            scheduler=found.scheduler,
            average=found.average,
            sinks=sinks,
        )
        observation.start()
        # Found by the garbage collector together with the observation, whose record it saves.
        vars(observation)["_guard"] = _Guard(self, observation)
        self._observation = weakref.ref(observation)

    @property
    def observation(self) -> Observation | None:
        """The observation that runs; None after the end."""
        return None if self.record is not None else self._observation()

    def end(self, observation: Observation | None = None) -> None:
        """Stop observing and keep the record alone."""
        # Its own is given where weak references to it are gone already.
        observation = observation or self.observation
        if observation is None or self.record is not None:
            return
        observation.stop()
        self._steps, self._overhead = len(observation), observation.overhead
        self.record = observation.record
        vars(observation).pop("_guard", None)

    def sample_next(self) -> None:
        """Sample the next step too: the one before had begun when it was first seen."""
        if (observation := self.observation) is not None:
            observation.stop()
            observation.start()

    def models(self) -> list[nn.Module]:
        """Return the models that are trained together, or the one; none after the end."""
        model = None if self.observation is None else self.observation.model
        return list(model.children()) if isinstance(model, Together) else [] if model is None else [model]

    def stepped(self, at: int) -> None:
        """Note a step of one of its optimizers."""
        self.span = (min(self.span[0], at), at)

    def overlaps(self, other: Training) -> bool:
        """Return whether steps of both lie between each other."""
        return self.span[0] < other.span[1] and other.span[0] < self.span[1]

    def __len__(self) -> int:
        observation = self.observation
        return self._steps if observation is None else len(observation)

    @property
    def findings(self) -> list[Finding]:
        """The problems that its record shows, the worst first; none while it runs."""
        found = [] if self.record is None else findings_of("observe", self.record)
        return [_name_model(one) for one in found] if self.together else found

    def to_dict(self) -> dict[str, Any]:
        """Return plain data as `Observation.to_dict` does, once it has ended."""
        assert self.record is not None
        findings = self.findings
        return {
            "findings": [finding.to_dict() for finding in findings],
            "causes": plain_causes(findings),
            "steps": len(self),
            "interval": self.interval,
            "overhead": self._overhead,
            "record": plain_record(self.record),
        }

    def __str__(self) -> str:
        assert self.record is not None
        return write_summary(self.record, self.findings, len(self), self.interval, self._overhead)


def _name_model(finding: Finding) -> Finding:
    """Return a finding whose code uses the name of its model, where a training has several models."""
    names = {name.partition(".")[0] for name in finding.where}
    return replace(finding, write=of_model(finding.write, names.pop())) if len(names) == 1 else finding


@dataclass
class _Guard:
    """Ends a training when its observation is garbage."""

    training: Training
    observation: Observation

    def __del__(self) -> None:
        self.training.end(self.observation)


@contextlib.contextmanager
def tell_backward_losses(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tell a listener each loss of one element, detached, that a backward pass begins with, before it does.

    `torch.autograd.backward` and the scalers' `scale` are wrapped for that time. What a scaler was given is the loss;
    of what was computed from a scaled loss (a share of it, a sum), the factor between the two is taken off.
    """
    # The last loss of a scaler that no backward pass has begun with: what the scaler made of it, and itself.
    scaled: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor]] = []

    def undo_scale(tensor: torch.Tensor) -> torch.Tensor:
        if not scaled:
            return tensor.detach()
        result, large, loss = scaled.pop()
        if result() is tensor:
            return loss
        factor = in_float64(large) / in_float64(loss)
        known = bool(factor.isfinite()) and bool(factor)
        return (tensor.detach() / factor.item()).to(tensor.dtype) if known else tensor.detach()

    def tell_losses(backward: Any) -> Any:
        def told(tensors: Any, *args: Any, **options: Any) -> Any:
            single = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
            if isinstance(single, torch.Tensor) and single.numel() == 1:
                listener(undo_scale(single))
            return backward(tensors, *args, **options)

        return told

    def note_scales(scale: Any) -> Any:
        def noted(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                scaled[:] = [(weakref.ref(result), result.detach(), outputs.detach())]
            return result

        return noted

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(replace_function(torch.autograd, "backward", tell_losses))
        for kind in SCALERS:
            replaced.enter_context(replace_function(kind, "scale", note_scales))
        yield
