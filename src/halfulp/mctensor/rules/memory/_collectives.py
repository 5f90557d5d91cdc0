"""Collective operations of MCTensors, functional ones too: all components are sent as bytes, reductions are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

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


def _run_and_wait(name: str, message: Tensor, *arguments: Any) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor.default(getattr(functional, name).default(message, *arguments))


def all_gather(x: MCTensor, size: int, group: Any) -> Tensor:
    """Every rank's value, one after another."""
    messages = _run_and_wait("all_gather_into_tensor", to_message([x]), size, group).chunk(size)
    return torch.cat([from_message(message, x, x.shape) for message in messages])


def all_to_all(x: MCTensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: Any) -> Tensor:
    """Rows of x to every rank, and rows of every rank in x's place, one after another."""
    pieces = [to_message([piece]) for piece in x.split(list(input_sizes))]
    shapes = [(rows, *x.shape[1:]) for rows in output_sizes]
    # An empty message still holds a scale.
    fixed = 0 if x._scale is None else x._scale.element_size()
    row = len(x._parts) * x.dtype.itemsize * x.shape[1:].numel()
    arriving = [rows * row + fixed for rows in output_sizes]
    leaving = [piece.numel() for piece in pieces]
    messages = _run_and_wait("all_to_all_single", torch.cat(pieces), arriving, leaving, group).split(arriving)
    return torch.cat([from_message(message, x, shape) for message, shape in zip(messages, shapes, strict=True)])


def broadcast(x: MCTensor, source: int, group: Any) -> Tensor:
    """One rank's value."""
    return from_message(_run_and_wait("broadcast", to_message([x]), source, group), x, x.shape)


def wait_tensor(x: MCTensor) -> MCTensor:
    """Return the same memory: there is nothing to wait for."""
    return wrap(x._parts, x._scale, x._gradients)


if dist.is_available():
    _functional = torch_operators("_c10d_functional")
    implements(_functional.all_gather_into_tensor.default)(all_gather)
    implements(_functional.all_to_all_single.default)(all_to_all)
    implements(_functional.broadcast.default)(broadcast)
    implements(_functional.wait_tensor.default)(wait_tensor)
