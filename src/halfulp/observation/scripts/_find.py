"""The model and the losses that belong to a script's optimizers, found among all living objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...gradients import AdaptiveGradScaler
from ...kernels import to_float64
from ...optim.parameters._narrow_groups import walk_group_parameters
from ._run import replace_function

SCALER_TYPES = (torch.amp.GradScaler, AdaptiveGradScaler)


class JointModel(nn.ModuleDict):
    """Several models that are trained together, as one to observe."""


def find_trained_model(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module | None:
    """Return the outermost module that holds the parameters which optimizers step, None where no module holds any.

    It comes without wrappers that only distribute or compile it. Several models are one `JointModel`, in which each is
    named by its class.
    """
    order = [id(parameter) for one in optimizers for _, _, parameter in walk_group_parameters(one)]
    wanted = {key: place for place, key in reversed(list(enumerate(order)))}
    modules = _find_modules()
    children = {id(child) for module in modules for child in module.children()}
    found = {module: _collect_parameter_ids(module) & wanted.keys() for module in modules if id(module) not in children}
    # As few modules as together hold all parameters that any holds, those of most parameters first.
    left, chosen = set[int]().union(*found.values()), []
    for module, held in sorted(found.items(), key=lambda root: (-len(root[1]), sum(1 for _ in root[0].modules()))):
        if held & left:
            chosen.append((min(wanted[key] for key in held), _unwrap_module(module)))
            left -= held
    models = list(dict.fromkeys(model for _, model in sorted(chosen, key=lambda pair: pair[0])))
    if len(models) < 2:
        return models[0] if models else None
    names = [type(model).__name__.replace(".", "_") for model in models]
    numbers = [names[:k].count(name) for k, name in enumerate(names)]
    named = (f"{name}_{number + 1}" if number else name for name, number in zip(names, numbers))
    return JointModel(dict(zip(named, models)))


def find_model(parameters: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return the outermost module that holds all of some parameters, None where none does."""
    wanted = {id(parameter) for parameter in parameters}
    holding = [module for module in _find_modules() if wanted <= _collect_parameter_ids(module)]
    return _unwrap_module(max(holding, key=lambda module: sum(1 for _ in module.modules()))) if holding else None


def find_scaler() -> torch.amp.GradScaler | None:
    """Return the one gradient scaler that is alive; None without one, or of several."""
    found = _find_living_objects(SCALER_TYPES)
    return found[0] if len(found) == 1 else None


def _find_living_objects(kind: Any) -> list[Any]:
    # Proxies answer isinstance for what they stand for, and may raise when they are asked.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def _find_modules() -> list[nn.Module]:
    """Return the living modules whose construction is done, but those that hold models together for an observation."""
    ready = [one for one in _find_living_objects(nn.Module) if "_parameters" in vars(one) and "_modules" in vars(one)]
    return [module for module in ready if not isinstance(module, JointModel)]


def _collect_parameter_ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


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


@contextlib.contextmanager
def listen_to_backward_losses(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
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

    def wrap_backward(backward: Any) -> Any:
        def tell_loss_and_run_backward(tensors: Any, *args: Any, **options: Any) -> Any:
            single = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
            if isinstance(single, torch.Tensor) and single.numel() == 1:
                listener(undo_scale(single))
            return backward(tensors, *args, **options)

        return tell_loss_and_run_backward

    def wrap_scale(scale: Any) -> Any:
        def scale_and_note(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                factors[:] = [to_float64(result.detach()) / to_float64(outputs.detach())]
            return result

        return scale_and_note

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(replace_function(torch.autograd, "backward", wrap_backward))
        for kind in SCALER_TYPES:
            replaced.enter_context(replace_function(kind, "scale", wrap_scale))
        yield
