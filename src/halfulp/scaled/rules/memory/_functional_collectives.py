"""Functional collectives, which torch.compile, DTensor and FSDP2 call: results are new tensors, already complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ....kernels import torch_operators
from ....subclass import group_size
from ..._operands import make_scaled
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor, wrap
from ._collectives import agreed_scales, payload_to_send, wire_storage

_REDUCTIONS = ("sum", "avg", "max", "min")


def _sent(name: str, x: Tensor, *arguments: Any) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor.default(getattr(functional, name).default(x, *arguments))


def _agreed(x: ScaledTensor, group: Any, terms: int = 1) -> Tensor:
    return agreed_scales([x], lambda numbers: _sent("all_reduce", numbers, "max", group), terms)[0]


def _reduced(name: str, x: ScaledTensor, reduction: str, *arguments: Any) -> ScaledTensor:
    """The payloads under an agreed scale, reduced."""
    if reduction not in _REDUCTIONS:
        raise NotImplementedError(f"{name} of scaled tensors by {reduction!r}: allowed are {', '.join(_REDUCTIONS)}")
    adds = reduction in ("sum", "avg")
    size = group_size(arguments[-1]) if adds else 1
    scale = _agreed(x, arguments[-1], size)
    values = _sent(name, payload_to_send(x, scale), "sum" if adds else reduction, *arguments).to(torch.float32)
    return make_scaled(values / size if reduction == "avg" else values, scale, wire_storage(x), x.dtype)


def all_reduce(x: ScaledTensor, reduction: str, group: Any) -> ScaledTensor:
    """The reduction over all ranks."""
    return _reduced("all_reduce", x, reduction, group)


def reduce_scatter(x: ScaledTensor, reduction: str, size: int, group: Any) -> ScaledTensor:
    """This rank's piece of the reduction."""
    return _reduced("reduce_scatter_tensor", x, reduction, size, group)


def all_gather(x: ScaledTensor, size: int, group: Any) -> ScaledTensor:
    """Every rank's payload under the largest scale, one after another."""
    agreed = _agreed(x, group)
    payload = payload_to_send(x, agreed)
    return wrap(_sent("all_gather_into_tensor", payload, size, group), agreed, x.dtype)


def all_to_all(x: ScaledTensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: Any) -> ScaledTensor:
    """Rows of the payload to every rank, under the largest scale, and rows of every rank in their place."""
    agreed = _agreed(x, group)
    payload = _sent("all_to_all_single", payload_to_send(x, agreed), output_sizes, input_sizes, group)
    return wrap(payload, agreed, x.dtype)


def broadcast(x: ScaledTensor, source: int, group: Any) -> ScaledTensor:
    """One rank's payload and scale."""
    bits = _sent("broadcast", x._payload.contiguous().reshape(-1).view(torch.uint8).clone(), source, group)
    scale = _sent("broadcast", x._scale.reshape(1).clone(), source, group).reshape(())
    return wrap(bits.view(x._payload.dtype).reshape(x.shape), scale, x.dtype)


def wait_tensor(x: ScaledTensor) -> ScaledTensor:
    """Return the tensor: collectives here are complete when they return."""
    return wrap(x._payload, x._scale, x.dtype)


if dist.is_available():
    _functional = torch_operators("_c10d_functional")
    implements(_functional.all_reduce.default, family="collectives")(all_reduce)
    implements(_functional.reduce_scatter_tensor.default, family="collectives")(reduce_scatter)
    implements(_functional.all_gather_into_tensor.default, family="collectives")(all_gather)
    implements(_functional.all_to_all_single.default, family="collectives")(all_to_all)
    implements(_functional.broadcast.default, family="collectives")(broadcast)
    implements(_functional.wait_tensor.default, family="collectives")(wait_tensor)
