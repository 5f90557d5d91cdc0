"""What data-parallel processes must agree on: the global exponent, at which their gradients are added up."""

from __future__ import annotations

import sys

import torch
from torch import nn


def in_parallel(model: nn.Module | None) -> bool:
    """Whether gradients of a model, or of the one whose forward pass runs now, are shared with other processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if torch.distributed.get_world_size() == 1:
        return False
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        return True
    # Whoever shards a model has loaded it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return model is not None and fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())


def least(values: list[int], device: torch.device) -> list[int]:
    """The least of all processes' numbers, one by one."""
    found = torch.tensor(values, device=device, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN)
    return found.tolist()
