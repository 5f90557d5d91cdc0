"""Which ranks hold the same numbers of a parameter, and which of its shards this one holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ....optim.parameters._local_tensors import is_dtensor, local
from ...sampling._plain import stored


def ranks_that_share(model: nn.Module) -> list[int] | None:
    """Return the ranks of the process group of a model's DistributedDataParallel; None where there is none.

    Pipelines and experts share a model among some ranks alone, and all groups have models of one kind.
    """
    groups = [m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)]
    found = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    return sorted(found.pop()) if len(found) == 1 else None


def replicated(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of which all ranks should hold the same bits.

    Not shards of a DTensor, of FSDP1 or of Megatron's tensor parallelism, and not what DistributedDataParallel is told
    to leave to each rank.
    """
    own: set[int] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters()
            own |= {id(parameter) for name, parameter in named if name in module.parameters_to_ignore}
        elif any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            own |= {id(parameter) for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in parameters.items()
        if id(parameter) not in own and not _is_sharded(parameter) and stored(parameter) is not None
    }


def shards_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return of DTensors' shards a number, the same on ranks that hold the same one, and how many elements it has."""
    found = {}
    for name, parameter in parameters.items():
        if is_dtensor(parameter) and _is_sharded(parameter):
            mesh = parameter.device_mesh
            number = 0
            for k, (at, placement) in enumerate(zip(mesh.get_coordinate() or (), parameter.placements)):
                if not placement.is_replicate():
                    number = number * mesh.size(k) + at
            found[name] = number, local(parameter).numel()
    return found


def _is_sharded(parameter: torch.Tensor) -> bool:
    if is_dtensor(parameter):
        return not all(placement.is_replicate() for placement in parameter.placements)
    return bool(getattr(parameter, "tensor_model_parallel", False))
