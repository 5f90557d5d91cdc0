"""Unscaling gradients of which some are sharded and some are not, as where fully_shard ignores parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def unscaled_by_kind(unscale: Callable, optimizer: torch.optim.Optimizer, inverse: Tensor, found: Tensor) -> dict:
    """GradScaler's unscaling, kind by kind: torch takes no list of plain gradients and DTensors, or of two meshes.

    Plain gradients come first: what is found in them is told to other processes by what follows.

    Args:
        unscale: GradScaler's own, of an optimizer, the inverse scale and a flag; gives a flag for every device.
        optimizer: whose gradients are unscaled.
        inverse, found: as GradScaler has them.

    Returns:
        A flag for every device.
    """
    kinds = _by_mesh(optimizer)
    if len(kinds) < 2:
        return unscale(optimizer, inverse, found)
    flags: dict[torch.device, Tensor] = {}
    for parameters in kinds.values():
        part = SimpleNamespace(param_groups=[{"params": parameters}])
        for device, flag in unscale(part, inverse, found).items():
            flags[device] = torch.maximum(flags[device], flag) if device in flags else flag
    return flags


def _by_mesh(optimizer: torch.optim.Optimizer) -> dict[Any, list[Tensor]]:
    """Parameters by the device mesh of their gradients, plain ones first."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return {}
    found: dict[Any, list[Tensor]] = {None: []}
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if parameter.grad is not None:
            is_sharded = isinstance(parameter.grad, dtensor.DTensor)
            found.setdefault(parameter.grad.device_mesh if is_sharded else None, []).append(parameter)
    return {mesh: parameters for mesh, parameters in found.items() if parameters}
