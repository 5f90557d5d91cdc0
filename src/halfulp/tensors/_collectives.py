"""Collective operations of torch.distributed: MCTensors are broadcast whole, and reduced nowhere silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..kernels import torch_operators
from ._mctensor import MCTensor
from ._registry import implements

_REFUSED = (
    *("allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    *("_reduce_scatter_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("_allgather_base_", "alltoall_", "alltoall_base_", "gather_", "scatter_", "send", "recv_", "recv_any_source_"),
)


def broadcast_(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
    """Every component and the scale from one rank into the others', as one message; it has arrived on return."""
    whole = [part for x in tensors for part in (x._inner() if isinstance(x, MCTensor) else [x])]
    message = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in whole])
    _, work = torch.ops.c10d.broadcast_.default([message], *arguments, **options)
    work.wait()
    sizes = [part.numel() * part.element_size() for part in whole]
    for part, piece in zip(whole, message.split(sizes), strict=True):
        # A clone: a piece may start anywhere, and a view of another dtype may not.
        part.copy_(piece.clone().view(part.dtype).reshape(part.shape))
    return list(tensors), work


def _refuse(operator: OpOverload) -> Callable:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{operator} of MCTensors: every component rounded apart would lose digits. Gradients are plain tensors "
            "with gradients='first'; send other values as x.decode(torch.float64), or as x.components one by one"
        )

    return refuse


if torch.distributed.is_available():
    _c10d = torch_operators("c10d")
    implements(_c10d.broadcast_.default)(broadcast_)
    for _name in _REFUSED:
        _operator = getattr(_c10d, _name).default
        implements(_operator)(_refuse(_operator))
