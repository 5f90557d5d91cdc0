"""Rules of operators that make tensors like another: zeros of any scale, constants under their own power of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _powers
from ._form import LOGICALS
from ._registry import implements
from ._scaled_tensor import ScaledTensor, wrap

aten = torch.ops.aten


def constant(x: ScaledTensor, shape: Any, value: float, options: dict) -> Tensor:
    """A tensor of one number: of x's storage where the dtype is a logical one, else plain."""
    dtype = options.get("dtype") or x.dtype
    device = options.get("device") or x.device
    if dtype not in LOGICALS:
        return torch.full(shape, value, dtype=dtype, device=device)
    finite = value == value and abs(value) != float("inf")
    power = _powers.power_of(abs(value)) if value and finite else (1.0 if value else _powers.ANY)
    payload = torch.full(shape, value / power if finite else value, dtype=torch.float32, device=device)
    scale = torch.full((), power, dtype=torch.float32, device=device)
    return wrap(payload.to(x._payload.dtype), scale, dtype)


@implements(aten.zeros_like.default, family="creation")
def zeros_like(x: ScaledTensor, **options: Any) -> Tensor:
    """Zeros of any scale."""
    return constant(x, x.shape, 0.0, options)


@implements(aten.ones_like.default, family="creation")
def ones_like(x: ScaledTensor, **options: Any) -> Tensor:
    """Ones under the scale 1."""
    return constant(x, x.shape, 1.0, options)


@implements(aten.full_like.default, family="creation")
def full_like(x: ScaledTensor, value: Any, **options: Any) -> Tensor:
    """One number under its own power of two."""
    return constant(x, x.shape, float(value), options)


@implements(aten.new_zeros.default, family="creation")
def new_zeros(x: ScaledTensor, size: Any, **options: Any) -> Tensor:
    """Zeros of any scale."""
    return constant(x, size, 0.0, options)


@implements(aten.new_ones.default, family="creation")
def new_ones(x: ScaledTensor, size: Any, **options: Any) -> Tensor:
    """Ones under the scale 1."""
    return constant(x, size, 1.0, options)


@implements(aten.new_full.default, family="creation")
def new_full(x: ScaledTensor, size: Any, value: Any, **options: Any) -> Tensor:
    """One number under its own power of two."""
    return constant(x, size, float(value), options)


@implements(aten.empty_like.default, family="creation")
def empty_like(x: ScaledTensor, **options: Any) -> Tensor:
    """Zeros of any scale: what is not written must not be read."""
    return constant(x, x.shape, 0.0, options)


@implements(aten.new_empty.default, family="creation")
def new_empty(x: ScaledTensor, size: Any, **options: Any) -> Tensor:
    """Zeros of any scale: what is not written must not be read."""
    return constant(x, size, 0.0, options)
