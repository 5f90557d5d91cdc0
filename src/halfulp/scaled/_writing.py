"""Writing in place: payload and scale where all of the memory is written, else under the scale that views share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import torch_operators
from . import _powers
from ._form import narrowed, operand, plain, widened
from ._registry import implements
from ._scaled_tensor import ScaledTensor


@implements(torch_operators("aten").copy_.default, family="writing")
def copy_(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor of any kind into x."""
    return write(x, value)


def write(x: Tensor, value: Any) -> Tensor:
    """Copy a tensor of any kind or a number into x; its views see it.

    A scaled tensor that owns all of its memory takes the value's scale. One that is a part of other memory keeps the
    scale, unless there are only zeros of any scale.

    Raises:
        RuntimeError: the value's shape does not broadcast to x's.
        ValueError: a finite value is out of the payload's range under the scale that must be kept; x is as it was.
    """
    if not isinstance(x, ScaledTensor):
        return x.copy_(plain(value))
    value = operand(value, x)
    if value.shape != x.shape and torch.broadcast_shapes(value.shape, x.shape) != x.shape:
        raise RuntimeError(f"a value of shape {list(value.shape)} for a tensor of shape {list(x.shape)}")
    if covers_memory(x):
        payload, scale = widened(value), value._scale
    else:
        scale = _kept(x._scale, value._scale)
        factor = _powers.ratio(value._scale, scale)
        payload = _powers.times(widened(value), factor)
        if isinstance(factor, float) and factor > _powers.LARGEST:  # which `times` does not multiply by
            payload = widened(value)
            payload = payload.masked_fill(payload != 0, torch.inf)
        _check_fits(x, payload, value)
    x._payload.copy_(narrowed(payload, x._payload.dtype))
    x._scale.copy_(scale)
    return x


def covers_memory(x: ScaledTensor) -> bool:
    """Whether x is all of its memory, so that no view holds elements that x does not."""
    payload = x._payload
    if type(payload) is not Tensor:
        return not x._is_view() and not payload._is_view()
    return payload.numel() * payload.element_size() == payload.untyped_storage().nbytes()


def _kept(own: Tensor, other: Tensor) -> Tensor:
    """The scale of memory of which a part is written: its own, or the other if it holds only zeros of any scale."""
    value = _powers.known(own)
    if value is None:
        return torch.where(own == _powers.ANY, other, own)
    return other if value == _powers.ANY else own


def _check_fits(x: ScaledTensor, payload: Tensor, value: ScaledTensor) -> None:
    if not payload.numel() or (not _powers.in_sight(payload) and x._payload.dtype in (torch.float32, torch.bfloat16)):
        return
    too_large = ((payload.abs() > torch.finfo(x._payload.dtype).max) & widened(value).isfinite()).any()
    if not _powers.in_sight(payload):
        torch._assert_async(
            ~too_large,
            f"a value is out of {x._payload.dtype}'s range under the scale of the memory it is written into: write "
            "into x.clone(), or give the whole tensor a larger scale first, x.with_scale(...)",
        )
    elif bool(too_large):
        raise ValueError(
            f"a value is out of {x._payload.dtype}'s range under the scale {x._scale.item():g}, which this tensor "
            "shares with the memory it is a view of: it is as it was. Write into x.clone(), or give the whole tensor a "
            "larger scale first, x.with_scale(...)"
        )
