"""What belongs to a script's optimizers, found among all living objects, and the training that they make."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ...gradients import AdaptiveGradScaler
from ...kernels import to_float64
from ...optim import EMA
from ...optim.parameters._narrow_groups import walk_model_parameters
from ...sinks import Outlet, Row
from ..observing._averages import list_averaged_parameters
from ..observing._observation import Observation, RunSummary
from ..observing._observe import find_scheduler, observe
from ._run import replace_function

SCALER_TYPES = (torch.amp.GradScaler, AdaptiveGradScaler)


class JointModel(nn.Module):
    """Several models that one optimizer steps, as one to observe; each is named by its class, numbered if need be."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        for model in models:
            name = free = type(model).__name__.replace(".", "_")
            count = 1
            while hasattr(self, free):
                count += 1
                free = f"{name}_{count}"
            self.add_module(free, model)


@dataclass(frozen=True)
class FoundTraining:
    """The model, scaler, scheduler and average that belong to optimizers.

    Attributes:
        model: the outermost module that holds the optimizers' parameters, without wrappers that only distribute or
            compile it; a `JointModel` where optimizers step several models.
        scaler: the GradScaler, None without one, or where it is not known which of several it is.
        scheduler: the learning-rate scheduler, None without one.
        average: an average of just this model's parameters; None without one, or where there are several.
    """

    model: nn.Module
    scaler: torch.amp.GradScaler | None
    scheduler: LRScheduler | None
    average: AveragedModel | EMA | None


def find_training(
    optimizers: Sequence[torch.optim.Optimizer], used: Container[torch.amp.GradScaler] = ()
) -> FoundTraining | None:
    """Find the model, scaler and so on of optimizers; None where no module holds any of their parameters."""
    order = [id(parameter) for one in optimizers for _, _, parameter in walk_model_parameters(one)]
    wanted = {key: place for place, key in reversed(list(enumerate(order)))}
    modules, scalers = _find_modules(), _find_living_objects(SCALER_TYPES)
    children = {id(child) for module in modules for child in module.children()}
    found = {module: _collect_parameter_ids(module) & wanted.keys() for module in modules if id(module) not in children}
    roots = [(module, held) for module, held in found.items() if held]
    if not roots:
        return None
    covering = sorted(
        _choose_covering_modules(roots),
        key=lambda module: min(wanted[key] for key in _collect_parameter_ids(module) & wanted.keys()),
    )
    models = list(dict.fromkeys(map(_unwrap_module, covering)))
    model = models[0] if len(models) == 1 else JointModel(models)
    # Those that belong to others are taken only where there is no other one.
    free = [scaler for scaler in scalers if scaler not in used] or scalers
    return FoundTraining(
        model,
        free[0] if len(free) == 1 else None,
        find_scheduler(optimizers),
        _find_average(model, modules),
    )


def find_model(parameters: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return the outermost module that holds all of some parameters, None where none does."""
    wanted = {id(parameter) for parameter in parameters}
    holding = [module for module in _find_modules() if wanted <= _collect_parameter_ids(module)]
    return _unwrap_module(max(holding, key=lambda module: sum(1 for _ in module.modules()))) if holding else None


def _find_living_objects(kind: Any) -> list[Any]:
    # Proxies answer isinstance for what they stand for, and may raise when they are asked.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def _find_modules() -> list[nn.Module]:
    """Return the living modules whose construction is done, but those that hold models together for an observation."""
    ready = [one for one in _find_living_objects(nn.Module) if "_parameters" in vars(one) and "_modules" in vars(one)]
    return [module for module in ready if not isinstance(module, JointModel)]


def _find_average(model: nn.Module, modules: list[nn.Module]) -> AveragedModel | EMA | None:
    """Return the one average of all parameters of a model and no others."""
    live = {name: parameter.shape for name, parameter in model.named_parameters()}
    # One whose construction failed may be alive without the model that it averages.
    averaged = [one for one in modules if isinstance(one, AveragedModel) and "module" in one._modules]
    averages = [*_find_living_objects(EMA), *averaged]
    found = [one for one in averages if {name: x.shape for name, x in list_averaged_parameters(one).items()} == live]
    return found[0] if len(found) == 1 else None


def _collect_parameter_ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _choose_covering_modules(roots: list[tuple[nn.Module, set[int]]]) -> list[nn.Module]:
    """Return as few modules as together hold all parameters that any holds, those of most parameters first."""
    left = set().union(*(held for _, held in roots))
    chosen = []
    for module, held in sorted(roots, key=lambda root: (-len(root[1]), sum(1 for _ in root[0].modules()))):
        if held & left:
            chosen.append(module)
            left -= held
    return chosen


def _unwrap_module(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._orig_mod  # type: ignore[assignment]
        elif "_forward_module" in module._modules:  # Fabric's
            module = module._forward_module  # type: ignore[assignment]
        else:
            return module


class ScriptTraining:
    """Observes optimizers and the model that they step, without keeping them alive.

    The hooks alone hold the observation, and the optimizers the hooks: where the script lets go of its model and
    optimizers, the three go together, and what was counted until then stays here.

    Attributes:
        number: in the order of their first rows, where rows are taken; None before one.
        model: name of the model's class.
        optimizer_names: names of the optimizers' classes.
        has_ended: whether nothing is observed any more.
        summary: what was seen, from the end on.
    """

    def __init__(
        self,
        found: FoundTraining,
        optimizers: Sequence[torch.optim.Optimizer],
        interval: int,
        rows: Callable[[ScriptTraining, Row], None] | None = None,
    ) -> None:
        self.number: int | None = None
        names = found.model._modules if isinstance(found.model, JointModel) else [type(found.model).__name__]
        self.model: str = " + ".join(names)
        self.optimizer_names: list[str] = list(dict.fromkeys(type(one).__name__ for one in optimizers))
        self.has_ended: bool = False
        self.summary: RunSummary
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
        vars(observation)["_guard"] = _EndGuard(self, observation)
        self._observation = weakref.ref(observation)

    @property
    def observation(self) -> Observation | None:
        """The observation that runs; None after the end."""
        return None if self.has_ended else self._observation()

    def end_observation(self, observation: Observation | None = None) -> None:
        """Stop observing and keep the summary alone."""
        # Its own is given where weak references to it are gone already.
        observation = observation or self.observation
        if observation is None or self.has_ended:
            return
        self.summary, self.has_ended = observation.stop().summarize(), True
        vars(observation).pop("_guard", None)

    def __len__(self) -> int:
        observation = self.observation
        return self.summary.steps if observation is None else len(observation)


@dataclass
class _EndGuard:
    """Ends a training when its observation is garbage."""

    training: ScriptTraining
    observation: Observation

    def __del__(self) -> None:
        self.training.end_observation(self.observation)


@contextlib.contextmanager
def tell_backward_losses(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tell a listener each loss of one element, detached, that a backward pass begins with, before it does.

    `torch.autograd.backward` and the scalers' `scale` are wrapped for that time; a scaler's factor is taken off.
    """
    # What the last scale was, until a backward pass has begun with the scaled loss.
    factors: list[torch.Tensor] = []

    def undo_scale(tensor: torch.Tensor) -> torch.Tensor:
        if not factors:
            return tensor.detach()
        factor, loss = factors.pop(), tensor.detach()
        known = factor.isfinite() & (factor != 0)
        return torch.where(known, (to_float64(loss) / factor).to(loss.dtype), loss)

    def tell_losses(backward: Any) -> Any:
        def tell_loss_and_run_backward(tensors: Any, *args: Any, **options: Any) -> Any:
            single = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
            if isinstance(single, torch.Tensor) and single.numel() == 1:
                listener(undo_scale(single))
            return backward(tensors, *args, **options)

        return tell_loss_and_run_backward

    def note_scales(scale: Any) -> Any:
        def scale_and_note(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                factors[:] = [to_float64(result.detach()) / to_float64(outputs.detach())]
            return result

        return scale_and_note

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(replace_function(torch.autograd, "backward", tell_losses))
        for kind in SCALER_TYPES:
            replaced.enter_context(replace_function(kind, "scale", note_scales))
        yield
