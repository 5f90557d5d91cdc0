"""Rules of operators that make tensors: constants, and random numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import torch_operators
from .. import _powers_of_two as _powers
from .._operands import encode_values, make_scaled
from .._payloads import to_float32
from .._registry import EIGHT_BITS, LOGICALS, implements
from .._scaled_tensor import ScaledTensor, wrap
from .._write import write
from ._results import measured_like
from ._vocabulary import homogeneous, measured_scale, unit_scale

aten = torch_operators("aten")


def constant(x: ScaledTensor, plain: Tensor, value: float, storage: torch.dtype | None = None) -> Tensor:
    """Return a plain tensor of one number as it is, or of x's storage, or another, where its dtype is a logical one."""
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
    """Return zeros; their scale decides nothing."""
    options["dtype"] = options.get("dtype") or x.dtype
    plain = x._payload.new_empty_strided(size, stride, **options)
    if plain.dtype not in LOGICALS:
        return plain.zero_()
    payload = x._payload.new_empty_strided(size, stride, **(options | {"dtype": x._payload.dtype})).zero_()
    return wrap(payload, torch.full((), _powers.ZERO_SCALE, dtype=torch.float32, device=plain.device), plain.dtype)


homogeneous(aten.native_dropout.default, family="pass-through")
unit_scale(aten.bernoulli.default, aten.bernoulli.Tensor, aten.bernoulli.p, family="random")
unit_scale(aten.multinomial.default, family="random")
measured_scale(
    *(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.poisson.default),
    *(aten.binomial.default, aten._standard_gamma.default, aten._standard_gamma_grad.default),
    *(aten._sample_dirichlet.default, aten._dirichlet_grad.default),
    family="random",
)


@implements(aten.native_dropout_backward.default, family="random")
def native_dropout_backward(gradient: ScaledTensor, mask: Tensor, factor: float) -> Tensor:
    """Return the gradient where the mask is true, times a factor about 1."""
    values = aten.native_dropout_backward.default(to_float32(gradient), mask, factor)
    return make_scaled(values, gradient._scale.clone(), gradient._payload.dtype, gradient.dtype)


def _register_drawing(operator: OpOverload) -> None:
    """Register an operator that uses only the shape of its tensor."""

    def draw(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
        return measured_like(operator(torch.empty_like(x._payload, dtype=torch.float32), *arguments, **options), [x])

    implements(operator, family="random")(draw)


for _operator in (
    *(aten.uniform.default, aten.normal_functional.default, aten.exponential.default, aten.log_normal.default),
    *(aten.cauchy.default, aten.geometric.default, aten.random.default, aten.random.to, getattr(aten.random, "from")),
):
    _register_drawing(_operator)


@implements(aten.normal_.default, family="random")
def normal_(x: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    """Write normal numbers in place."""

    return write(x, aten.normal_functional.default(x, mean, std, generator=generator))


@implements(aten.bernoulli_.float, family="random")
def bernoulli_(x: Any, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """Write zeros and ones in place, drawn in the order of memory as torch draws them."""
    like = torch.empty_like(x._payload if isinstance(x, ScaledTensor) else x, dtype=torch.float32)
    return write(x, like.bernoulli_(p, generator=generator))


def _draw_like(operator: OpOverload) -> None:
    def like(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
        dtype = options.get("dtype") or x.dtype
        if dtype not in LOGICALS:
            return operator(torch.empty_like(x._payload, dtype=dtype), *arguments, **options)
        options["dtype"] = torch.float32
        values = operator(torch.empty_like(x._payload, dtype=torch.float32), *arguments, **options)
        return encode_values(values, x._payload.dtype, dtype=dtype)

    implements(operator, family="random")(like)


for _packet in (aten.rand_like, aten.randn_like, aten.randint_like):
    for _name in _packet.overloads():
        if not _name.endswith("out") and "Tensor" not in _name:
            _draw_like(getattr(_packet, _name))
