"""Functional collectives of MCTensors (torch.compile, DTensor): all components are sent as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ....kernels import torch_operators
from ..._mctensor import MCTensor, wrap
from ..._registry import implements
from ._collectives import from_message, to_message


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
