"""The memory behind a parameter: its local tensors, and the place of their elements in the whole parameter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch

from ..._torch_versions import HAS_SRC_DATA_RANK_ARGUMENT, make_torch_too_old_error
from ...kernels import IndexMap
from ...mctensor import MCTensor
from ...scaled import ScaledTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TensorOrOther = TypeVar("TensorOrOther")


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "_local_tensor")


def get_local(tensor: TensorOrOther) -> TensorOrOther:
    """Return a DTensor's shard on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def get_payload(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stores a parameter: a payload, a first component, a DTensor's shard, else itself."""
    if isinstance(parameter, MCTensor):
        return parameter.components[0]
    return parameter.payload if isinstance(parameter, ScaledTensor) else get_local(parameter)


def get_scaled_parameter_scale(parameter: torch.Tensor) -> torch.Tensor:
    """Return the scale of a scaled parameter."""
    assert isinstance(parameter, ScaledTensor)
    return parameter.scale


def list_payloads(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return all tensors that store a parameter: the components of an MCTensor, else its payload."""
    return parameter.components if isinstance(parameter, MCTensor) else (get_payload(parameter),)


def wrap_like_dtensor(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a local result as a DTensor if its parameter is one."""
    if not is_dtensor(tensor):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(value, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False)


def find_index_map(parameter: torch.Tensor) -> IndexMap:
    """Return the map from a parameter's local elements to its global ones."""
    if not is_dtensor(parameter):
        return _make_whole_index_map(parameter.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError("a parameter with Partial placement is a sum still to be made: redistribute it first")
    if any(type(placement).__name__ == "_StridedShard" for placement in parameter.placements):
        return _find_strided_index_map(parameter)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    offset = tuple(o if n else 0 for o, n in zip(offset, shape))
    return IndexMap(tuple(shape), tuple(parameter.shape), offset, (1,) * len(shape))


@functools.lru_cache(256)
def _make_whole_index_map(shape: torch.Size) -> IndexMap:
    return IndexMap.whole(tuple(shape))


def _find_strided_index_map(parameter: DTensor) -> IndexMap:
    """Return the map of a strided shard, found by sharding the coordinates themselves."""
    if not HAS_SRC_DATA_RANK_ARGUMENT:
        raise make_torch_too_old_error(
            "twice sharded dimensions need distribute_tensor(src_data_rank=)", "shard each dimension once"
        )
    from torch.distributed.tensor import distribute_tensor

    offset, step = [], []
    for d, whole in enumerate(parameter.shape):
        coordinates = torch.arange(whole, dtype=torch.int64, device=get_local(parameter).device)
        coordinates = coordinates.view([-1 if k == d else 1 for k in range(parameter.dim())]).expand(parameter.shape)
        mesh, placements = parameter.device_mesh, parameter.placements
        mine = get_local(distribute_tensor(coordinates.contiguous(), mesh, placements, src_data_rank=None))
        along = mine.movedim(d, 0).reshape(mine.shape[d], -1)[:, :1].flatten()
        gaps = torch.unique(along.diff())
        if gaps.numel() > 1:
            raise NotImplementedError(
                f"dimension {d} of a parameter of shape {tuple(parameter.shape)} is sharded into several runs: "
                "use Shard placements, or weight_update='split', which draws nothing"
            )
        offset.append(int(along[0]) if along.numel() else 0)
        step.append(int(gaps[0]) if gaps.numel() else 1)
    return IndexMap(tuple(get_local(parameter).shape), tuple(parameter.shape), tuple(offset), tuple(step))
