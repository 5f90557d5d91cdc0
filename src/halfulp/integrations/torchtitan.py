"""Optimizers of hu.optim by name in torchtitan's optimizer container.

    from halfulp.integrations.torchtitan import register

    register()  # names such as "halfulp.AdamW" in every OptimizersContainer
    options = {"lr": 3e-4, "weight_update": "kahan"}
    ParamGroupConfig(pattern=".*", optimizer_name="halfulp.AdamW", optimizer_kwargs=options)

`implementation="fused"`, "foreach" and "for-loop" mean the same here: one kernel steps all tensors, and says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchtitan.components.optimizer import OptimizersContainer

from .._names import describe_unknown_name
from ..optim import OPTIMIZERS

OPTIMIZER_NAME_PREFIX = "halfulp."
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
    if not name.startswith(OPTIMIZER_NAME_PREFIX):
        return _find_torchtitan_optimizer(name)
    own = {f"{OPTIMIZER_NAME_PREFIX}{known}": kind for known, kind in OPTIMIZERS.items()}
    if name not in own:
        raise ValueError(describe_unknown_name("optimizer", name, own))
    return own[name]


def register() -> None:
    """Let every OptimizersContainer know the names "halfulp.AdamW" and so on, for the process."""
    OptimizersContainer._resolve_optimizer_factory = staticmethod(find_optimizer)
