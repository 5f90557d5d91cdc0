"""Rules of operators that make tensors like another: zeros of any scale, constants under their own power of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._dtypes import EIGHT_BITS, LOGICALS
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor, wrap
from ..._write import write

aten = torch_operators("aten")


def constant(x: ScaledTensor, plain: Tensor, value: float, storage: torch.dtype | None = None) -> Tensor:
    """A plain tensor of one number as it is, or of x's storage, or another, where its dtype is a logical one."""
    if plain.dtype not in LOGICALS:
        return plain.fill_(value)
    storage = storage or x._payload.dtype
    finite = value == value and abs(value) != float("inf")
    # An infinity has the scale of zeros, so that it decides no other scale.
    power = _powers.power_of(abs(value)) if value and finite else (1.0 if value != value else _powers.ZERO_SCALE)
    mantissa = value / power if finite else value
    if power == _powers.LARGEST:  # the next number above float32's largest would be infinity
        mantissa = math.copysign(min(abs(mantissa), 2 - torch.finfo(storage).eps), mantissa)
    payload = torch.empty_like(plain, dtype=storage).fill_(mantissa)
    scale = torch.full((), power, dtype=torch.float32, device=plain.device)
    return wrap(payload, scale, plain.dtype)


def _storage_like(x: ScaledTensor) -> torch.dtype:
    """Return x's storage, or float16 beside an eight-bit parameter.

    Tensors made like a parameter are mostly moments of torch.optim, which divides by their roots: eight bits cannot
    hold squares.
    """
    is_narrow = x._payload.dtype in EIGHT_BITS and getattr(x, "_is_param", False)
    return torch.float16 if is_narrow else x._payload.dtype


def _like(operator: OpOverload, value: float | None) -> None:
    """Register operators that make a tensor of x's shape, with x's memory format."""

    def like(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
        number = float(arguments[0] if value is None else value)
        options["dtype"] = options.get("dtype") or x.dtype
        return constant(x, torch.empty_like(x._payload, **options), number, _storage_like(x))

    implements(operator, family="creation")(like)


def _new(operator: OpOverload, value: float | None) -> None:
    """Register operators that make a tensor of another shape, with x's dtype and device."""

    def new(x: ScaledTensor, size: Any, *arguments: Any, **options: Any) -> Tensor:
        number = float(arguments[0] if value is None else value)
        options["dtype"] = options.get("dtype") or x.dtype
        return constant(x, x._payload.new_empty(size, **options), number)

    implements(operator, family="creation")(new)


# Empty tensors hold zeros of any scale: elements that are never written must not be read.
_like(aten.zeros_like.default, 0.0)
_like(aten.ones_like.default, 1.0)
_like(aten.full_like.default, None)
_like(aten.empty_like.default, 0.0)
_new(aten.new_zeros.default, 0.0)
_new(aten.new_ones.default, 1.0)
_new(aten.new_full.default, None)
_new(aten.new_empty.default, 0.0)


@implements(aten.eye.out, aten.eye.m_out, family="creation")
def eye_out(*sizes: int, out: Tensor) -> Tensor:
    """Write ones into the diagonal, zeros elsewhere."""
    return write(out, torch.eye(*sizes, dtype=torch.float32, device=out.device))


@implements(aten.new_empty_strided.default, family="creation")
def new_empty_strided(x: ScaledTensor, size: Any, stride: Any, **options: Any) -> Tensor:
    """Zeros, whose scale decides nothing."""
    options["dtype"] = options.get("dtype") or x.dtype
    plain = x._payload.new_empty_strided(size, stride, **options)
    if plain.dtype not in LOGICALS:
        return plain.zero_()
    payload = x._payload.new_empty_strided(size, stride, **(options | {"dtype": x._payload.dtype})).zero_()
    return wrap(payload, torch.full((), _powers.ZERO_SCALE, dtype=torch.float32, device=plain.device), plain.dtype)
