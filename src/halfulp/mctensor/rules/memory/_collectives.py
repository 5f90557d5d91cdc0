"""Collective operations of torch.distributed: all components are sent, and reductions are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ..._mctensor import MCTensor, wrap
from ..._registry import implements
from ..._write import inner_tensors


def to_message(tensors: Sequence[Tensor]) -> Tensor:
    """Return every component and the scale of some tensors as one byte tensor."""
    whole = [part for x in tensors for part in inner_tensors(x)]
    return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in whole])


def from_message(message: Tensor, like: MCTensor, shape: Sequence[int]) -> MCTensor:
    """Return the MCTensor that a message holds: of a shape, with dtype, components and scale like another's."""
    count = len(like._parts)
    fixed = 0 if like._scale is None else like._scale.element_size()
    size = (message.numel() - fixed) // count
    pieces = message.split([*[size] * count, *([fixed] if fixed else [])])
    parts = tuple(_as_dtype(piece, like.dtype).reshape(shape) for piece in pieces[:count])
    scale = _as_dtype(pieces[count], torch.float32).reshape(()) if fixed else None
    return wrap(parts, scale, like._gradients)


def _as_dtype(message: Tensor, dtype: torch.dtype) -> Tensor:
    # A clone: a piece may start anywhere, and a view of another dtype may not.
    return message.clone().view(dtype)


def broadcast_(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
    """Broadcast every component and the scale from one rank, as one message; synchronous."""
    message = to_message(tensors)
    _, work = torch.ops.c10d.broadcast_.default([message], *arguments, **options)
    work.wait()
    whole = [part for x in tensors for part in inner_tensors(x)]
    sizes = [part.numel() * part.element_size() for part in whole]
    for part, piece in zip(whole, message.split(sizes), strict=True):
        part.copy_(_as_dtype(piece, part.dtype).reshape(part.shape))
    return list(tensors), work


if torch.distributed.is_available():
    implements(torch_operators("c10d").broadcast_.default)(broadcast_)
