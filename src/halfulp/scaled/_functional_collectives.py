"""Collectives as torch.compile, DTensor and FSDP2 call them: results are new tensors, already waited for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from . import _powers
from ._bilinear import root_of_count
from ._collectives import on_the_wire
from ._families import result
from ._form import EIGHT_BITS
from ._registry import implements
from ._scaled_tensor import ScaledTensor, wrap

_REDUCTIONS = ("sum", "avg", "max", "min")


def _sent(name: str, x: Tensor, *arguments: Any) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor.default(getattr(functional, name).default(x, *arguments))


def _size(group: Any) -> int:
    return dist.distributed_c10d._resolve_process_group(group).size()


def _agreed(x: ScaledTensor, group: Any) -> Tensor:
    return _sent("all_reduce", x._scale.reshape(1).clone(), "max", group).reshape(())


def _reduced(name: str, x: ScaledTensor, reduction: str, *arguments: Any) -> ScaledTensor:
    """The payloads under the largest scale, added after a division by the root of their number."""
    if reduction not in _REDUCTIONS:
        raise NotImplementedError(f"{name} of scaled tensors by {reduction!r}: allowed are {', '.join(_REDUCTIONS)}")
    size = _size(arguments[-1])
    spread = root_of_count(size) if reduction in ("sum", "avg") else 1.0
    agreed = _agreed(x, arguments[-1])
    payload = on_the_wire(x, agreed, 1.0 / spread)
    values = _sent(name, payload, "sum" if reduction == "avg" else reduction, *arguments).to(torch.float32)
    values = values / size if reduction == "avg" else values
    scale, rest = _powers.product(agreed, spread)
    storage = x._payload.dtype
    return result(values, scale, rest, torch.float16 if storage in EIGHT_BITS else storage, x.dtype)


def all_reduce(x: ScaledTensor, reduction: str, group: Any) -> ScaledTensor:
    """The reduction over all ranks."""
    return _reduced("all_reduce", x, reduction, group)


def reduce_scatter(x: ScaledTensor, reduction: str, size: int, group: Any) -> ScaledTensor:
    """This rank's piece of the reduction."""
    return _reduced("reduce_scatter_tensor", x, reduction, size, group)


def all_gather(x: ScaledTensor, size: int, group: Any) -> ScaledTensor:
    """Every rank's payload under the largest scale, one after another."""
    agreed = _agreed(x, group)
    payload = on_the_wire(x, agreed)
    return wrap(_sent("all_gather_into_tensor", payload, size, group), agreed, x.dtype)


def broadcast(x: ScaledTensor, source: int, group: Any) -> ScaledTensor:
    """One rank's payload and scale."""
    bits = _sent("broadcast", x._payload.contiguous().reshape(-1).view(torch.uint8).clone(), source, group)
    scale = _sent("broadcast", x._scale.reshape(1).clone(), source, group).reshape(())
    return wrap(bits.view(x._payload.dtype).reshape(x.shape), scale, x.dtype)


def wait_tensor(x: Tensor) -> Tensor:
    """Nothing to wait for."""
    return x


if dist.is_available():
    _functional = torch.ops._c10d_functional
    implements(_functional.all_reduce.default, family="collectives")(all_reduce)
    implements(_functional.reduce_scatter_tensor.default, family="collectives")(reduce_scatter)
    implements(_functional.all_gather_into_tensor.default, family="collectives")(all_gather)
    implements(_functional.broadcast.default, family="collectives")(broadcast)
    implements(_functional.wait_tensor.default, family="collectives")(wait_tensor)
