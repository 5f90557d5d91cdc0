"""A step of a wrapped optimizer, which is part of another's step."""

from __future__ import annotations

from typing import Any

import torch


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
