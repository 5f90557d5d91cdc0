"""Float32 copies (shadows) of parameters, and torch optimizers that step them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .._float32_weights import Float32Buffer
from ..parameters._local_tensors import is_dtensor, local, placed_like
from ..step._memory import gradient_memory

OWN = ("weight_update", "state_dtype", "param_dtype", "format", "seed", "report_interval", "identities")


def from_class(optimizer: Callable, params: Iterable, options: dict) -> tuple[torch.optim.Optimizer, list[dict], dict]:
    """Make an optimizer over shadows of parameters; return it, its groups and the shadows."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of tensors, of named tensors, or of groups, not one tensor")
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    given = given if isinstance(given[0], Mapping) else [{"params": given}]
    shadows: dict[torch.Tensor, torch.Tensor] = {}
    pairs = [shadow_group(group, shadows) for group in given]
    base = optimizer([inner for inner, _ in pairs], **options)
    if not isinstance(base, torch.optim.Optimizer):
        raise TypeError(f"{optimizer!r} made {base!r}, which is no torch.optim.Optimizer")
    refuse_inner_optimizers(base)
    if len(base.param_groups) != len(pairs):
        raise NotImplementedError(f"{type(base).__name__} regroups its parameters: wrap it with one group of them")
    return base, [merged_group(outer, inner) for (_, outer), inner in zip(pairs, base.param_groups)], shadows


def shadow_group(group: Mapping, shadows: dict) -> tuple[dict, dict]:
    """Return a group over shadows for the wrapped optimizer, and the same over the parameters."""
    members = group["params"]
    members = [members] if isinstance(members, torch.Tensor) else members if isinstance(members, set) else list(members)
    inner = []
    for member in members:
        parameter = member[1] if isinstance(member, tuple) else member
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"an optimizer takes tensors, got {type(parameter).__name__}")
        shadow = shadows.setdefault(parameter, shadow_of(parameter))
        inner.append((member[0], shadow) if isinstance(member, tuple) else shadow)
    rest = {name: value for name, value in group.items() if name not in (*OWN, "params")}
    return {**rest, "params": inner}, {**group, "params": members}


def merged_group(outer: Mapping, inner: Mapping) -> dict:
    """A group of parameters with the options of the wrapped optimizer's group."""
    options = {name: value for name, value in inner.items() if name not in ("params", "param_names")}
    return {**outer, **options}


def fields_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's attributes without hooks, and without a step that a scheduler has bound to it."""
    return {k: v for k, v in vars(optimizer).items() if k != "step" and not k.endswith("_hooks")}


def rebuilt(kind: type, fields: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer from its class and attributes, as unpickling makes one."""
    optimizer: torch.optim.Optimizer = object.__new__(kind)
    optimizer.__setstate__(fields)
    return optimizer


def empty_like(parameter: torch.Tensor) -> torch.Tensor:
    """One element in a parameter's local shape."""
    part = local(parameter)
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def shadow_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the wrapped optimizer steps instead of a parameter."""
    return torch.nn.Parameter(placed_like(empty_like(parameter), parameter), requires_grad=parameter.requires_grad)


def point(shadow: torch.Tensor, values: torch.Tensor) -> None:
    """Point a shadow, or its shard on this rank, to other memory."""
    if is_dtensor(shadow):
        shadow._local_tensor = values
    else:
        shadow.data = values


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with every tensor in them replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(item, function) for item in value)
    return value


def float32_gradient(gradient: torch.Tensor | None, buffer: Float32Buffer) -> torch.Tensor | None:
    """A gradient as it is or converted; one that is not strided keeps its layout."""
    if gradient is None or (gradient.dtype == torch.float32 and type(gradient) is torch.Tensor):
        return gradient
    if local(gradient) is gradient:
        gradient, _ = gradient_memory(gradient, gradient, "a wrapped parameter")
    if gradient.dtype == torch.float32:
        return gradient
    part = local(gradient.detach())
    if part.layout is not torch.strided:
        return gradient.detach().to(torch.float32)
    return placed_like(buffer.take(part).copy_(part), gradient)


def refuse_inner_optimizers(base: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds another one.

    Float32 weights exist during a step of the wrapped optimizer alone. An optimizer inside of it has the narrow
    parameters themselves, or a copy of memory that is not filled yet.

    Raises:
        NotImplementedError: such an optimizer, with what to do.
    """
    name = type(base).__name__
    for place, inner in _inner_optimizers(base):
        raise NotImplementedError(
            f"{name} holds another optimizer, {type(inner).__name__} in {place!r}, whose parameters wrap cannot put "
            f"float32 weights behind: step float32 parameters by {name}, or wrap {type(inner).__name__} alone: "
            f"hu.optim.wrap({type(inner).__name__}, params, ...)"
        )


def _inner_optimizers(base: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(base).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if name not in ("param_groups", "state", "defaults"):
            yield from ((name, one) for one in held if isinstance(one, torch.optim.Optimizer) and one is not base)


def plain_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
    """An optimizer's step with its own hooks, and without the global ones.

    torch patches the `step` of every class so that it calls both kinds; the global ones run around the outer step.
    A `step` that somebody has set on the instance, as a scheduler does, is called as it is.

    Args:
        optimizer: to step.
        arguments: of `step`.

    Returns:
        What `step` returns.
    """
    patched: Any = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(patched, "hooked", False) or not hasattr(patched, "__wrapped__"):
        return optimizer.step(*arguments)
    options: dict[str, Any] = {}
    for hook in tuple(optimizer._optimizer_step_pre_hooks.values()):
        changed = hook(optimizer, (optimizer, *arguments), options)
        if changed is None:
            continue
        if not (isinstance(changed, tuple) and len(changed) == 2):
            raise RuntimeError(f"a step pre hook returns None or (args, kwargs), this one returned {changed!r}")
        (_, *given), options = changed
        arguments = tuple(given)
    result = patched.__wrapped__(optimizer, *arguments, **options)
    optimizer._optimizer_step_code()
    for hook in tuple(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (optimizer, *arguments), options)
    return result


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has step hooks that must run."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
