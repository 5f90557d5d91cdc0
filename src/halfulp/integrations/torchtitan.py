"""Optimizers of hu.optim by name in torchtitan's optimizer container.

    from halfulp.integrations.torchtitan import Optimizers, register

    register()  # names such as "halfulp.AdamW" in every OptimizersContainer
    options = {"lr": 3e-4, "weight_update": "kahan"}
    ParamGroupConfig(pattern=".*", optimizer_name="halfulp.AdamW", optimizer_kwargs=options)

A config that names its container takes `Optimizers.Config(...)` in place of `OptimizersContainer.Config(...)` and needs
no `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer

from .._names import describe_unknown_name
from ..optim import OPTIMIZERS

NAME_PREFIX = "halfulp."
_find_torchtitan_optimizer: Callable[[str], Callable[..., torch.optim.Optimizer]] = (
    OptimizersContainer._resolve_optimizer_factory
)


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of a name "halfulp.AdamW"; other names are torchtitan's.

    Raises:
        ValueError: an unknown name after "halfulp.".
        NotImplementedError: torchtitan's, for a name that it does not know.

    >>> find_optimizer("halfulp.AdamW").__name__
    'AdamW'
    """
    if not name.startswith(NAME_PREFIX):
        return _find_torchtitan_optimizer(name)
    if name.removeprefix(NAME_PREFIX) not in OPTIMIZERS:
        raise ValueError(describe_unknown_name("optimizer", name, [f"{NAME_PREFIX}{known}" for known in OPTIMIZERS]))
    return OPTIMIZERS[name.removeprefix(NAME_PREFIX)]


def register() -> None:
    """Let every OptimizersContainer know the names "halfulp.AdamW" and so on, for the process."""
    OptimizersContainer._resolve_optimizer_factory = staticmethod(find_optimizer)


class Optimizers(OptimizersContainer):
    """torchtitan's container, which knows the optimizers of hu.optim and does not choose their implementation.

    `implementation="fused"`, "foreach" and "for-loop" mean the same here: one kernel steps all tensors.
    """

    _resolve_optimizer_factory: Any = staticmethod(find_optimizer)

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {} if _has_halfulp_names(config) else OptimizersContainer._build_impl_kwargs(config)


def _has_halfulp_names(config: Any) -> bool:
    return all(group.optimizer_name.startswith(NAME_PREFIX) for group in config.param_groups)
