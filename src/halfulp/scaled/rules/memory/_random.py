"""Rules of random operators: drawn in float32 by torch's own generators, so that they draw what plain tensors draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ..._dtypes import LOGICALS
from ..._operands import encode_values, make_scaled, to_float32
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from ..._write import write
from .._results import measured_like
from .._vocabulary import homogeneous, measured_scale, unit_scale

aten = torch_operators("aten")

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
    """The gradient where the mask is true, times a factor about 1."""
    values = aten.native_dropout_backward.default(to_float32(gradient), mask, factor)
    return make_scaled(values, gradient._scale.clone(), gradient._payload.dtype, gradient.dtype)


def _drawn(operator: OpOverload) -> None:
    """Register an operator that uses only the shape of its tensor."""

    def draw(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
        return measured_like(operator(torch.empty_like(x._payload, dtype=torch.float32), *arguments, **options), [x])

    implements(operator, family="random")(draw)


for _operator in (
    *(aten.uniform.default, aten.normal_functional.default, aten.exponential.default, aten.log_normal.default),
    *(aten.cauchy.default, aten.geometric.default, aten.random.default, aten.random.to, getattr(aten.random, "from")),
):
    _drawn(_operator)


@implements(aten.normal_.default, family="random")
def normal_(x: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    """Normal numbers written in place."""

    return write(x, aten.normal_functional.default(x, mean, std, generator=generator))


@implements(aten.bernoulli_.float, family="random")
def bernoulli_(x: Any, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """Zeros and ones written in place, drawn in the order of the memory as torch draws them."""
    like = torch.empty_like(x._payload if isinstance(x, ScaledTensor) else x, dtype=torch.float32)
    return write(x, like.bernoulli_(p, generator=generator))


def _like(operator: OpOverload) -> None:
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
            _like(getattr(_packet, _name))
