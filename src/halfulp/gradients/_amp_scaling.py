"""Steps of optimizers whose gradients a scaler unscales, including those that handle overflow themselves."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def supports(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer skips overflowed steps by itself, as torch's fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step takes the scaler and unscales by itself: the older form of the contract."""
    return supports(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def idles(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has no gradients and takes a step all the same, as torch's fused ones do from GradScaler."""
    return supports(optimizer) and not takes_scaler(optimizer) and not has_gradients(optimizer)


def flags_of(
    optimizer: torch.optim.Optimizer, found: Mapping[torch.device, Tensor], device: str | torch.device
) -> list[Tensor]:
    """Return the flags that a check of an optimizer's gradients gave, or one that is not set where it idles.

    Raises:
        ValueError: there are no gradients, where GradScaler wants some.
    """
    flags = list(found.values())
    if not flags and idles(optimizer):
        flags = [torch.zeros((), dtype=torch.float32, device=device)]
    if not flags:
        raise ValueError(
            "the optimizer's parameters have no gradients: there is nothing to step with. Leave this step out, or call "
            "another optimizer's zero_grad(), which clears what they share, after all steps"
        )
    return flags


def stepped_with(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> Any:
    """The step of an optimizer that takes the scaler."""
    warnings.warn(
        "the optimizer's step takes grad_scaler=, which torch.amp.GradScaler is going to stop giving: let it read the "
        "attributes grad_scale and found_inf that are set on it during a step",
        FutureWarning,
        stacklevel=3,
    )
    step: Callable[..., Any] = optimizer.step
    return step(*args, **kwargs, grad_scaler=scaler)


def stepped(optimizer: torch.optim.Optimizer, found: list[Tensor], overflowed: bool, args: tuple, kwargs: dict) -> Any:
    """Step with unscaled gradients; None where they overflowed, unless the optimizer handles that itself."""
    if not supports(optimizer):
        return None if overflowed else optimizer.step(*args, **kwargs)
    aware: Any = optimizer
    # A scale of its own that somebody set stays.
    aware.grad_scale = getattr(optimizer, "grad_scale", None)
    aware.found_inf = sum(flag.to(found[0].device, non_blocking=True) for flag in found)
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del aware.grad_scale, aware.found_inf
