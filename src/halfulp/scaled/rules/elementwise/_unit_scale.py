"""Rules of functions whose results have magnitudes about 1: computed on values, under the scale 1 or near it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import present, torch_operators
from ... import _powers_of_two as _powers
from ..._operands import make_scaled, to_float32
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import scale_one, value_of
from .._vocabulary import homogeneous, unit_scale

aten = torch_operators("aten")


def values_to_fit(values: Tensor, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    """Return float32 values under a scale, or under the larger one that the largest finite value needs."""
    if storage not in (torch.float32, torch.bfloat16) and values.numel():
        largest = torch.where(values.isfinite(), values, 0.0).abs().amax()
        needed = _powers.round_to_power(largest / torch.finfo(storage).max, "up")
        scale = _powers.maximum_scale(scale, needed)
    return make_scaled(_powers.times(values, _powers.ratio(scale_one(values), scale)), scale.clone(), storage, dtype)


def zero_at_zero(*operators: OpOverload) -> None:
    """Register functions with f(0) = 0 and a slope there: tanh, erf, log1p.

    op(p s) computed on values in float32. Its scale is s where that is below 1, as f(x) is about x there and would
    vanish under the scale 1; else 1, or what the largest result needs.
    """
    for operator in present(operators):
        implements(operator, family="unit output")(_rule_of_zero_at_zero(operator))


def _rule_of_zero_at_zero(operator: OpOverload) -> Callable:
    def compute(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
        values = operator(value_of(x), *arguments, **options)
        own = _powers.concrete_value(x._scale)
        least = None if own is None else torch.tensor(min(own, 1.0), dtype=torch.float32, device="cpu")
        scale = torch.clamp(x._scale, max=1.0) if least is None else least
        return values_to_fit(values, scale, x._payload.dtype, x.dtype)

    return compute


def growing(*operators: OpOverload) -> None:
    """Register functions that are about 1 around 0 and leave every range elsewhere: exp, cosh.

    op(p s) computed on values in float32, under the scale 1 or what the largest finite result needs.
    """
    for operator in present(operators):
        implements(operator, family="unit output")(_rule_of_growing(operator))


def _rule_of_growing(operator: OpOverload) -> Callable:
    def compute(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
        values = operator(value_of(x), *arguments, **options)
        return values_to_fit(values, scale_one(values), x._payload.dtype, x.dtype)

    return compute


growing(aten.exp.default, aten.exp2.default, aten.cosh.default)
zero_at_zero(
    *(aten.tanh.default, aten.sin.default, aten.asin.default, aten.atan.default, aten.asinh.default),
    *(aten.atanh.default, aten.erf.default, aten.log1p.default, aten.expm1.default, aten.sinh.default),
    *(aten.tan.default, aten.erfinv.default, aten.frac.default, aten.special_bessel_j1.default),
    *(aten.special_i1e.default, aten.special_i1.default, aten.special_modified_bessel_i1.default),
)
unit_scale(
    *(aten.sigmoid.default, aten._softmax.default, aten._log_softmax.default, aten.cos.default),
    *(aten.log.default, aten.log2.default, aten.log10.default, aten.acos.default, aten.acosh.default),
    *(aten.erfc.default, aten.sinc.default, aten.logit.default, aten.atan2.default, aten.angle.default),
    *(aten.special_ndtri.default, aten.special_i0e.default, aten.special_bessel_j0.default),
    *(aten.special_spherical_bessel_j0.default, aten.igamma.default, aten.igammac.default, aten.frexp.Tensor),
    family="unit output",
)
homogeneous(
    *(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.logit_backward.default),
    family="unit output",
    grad_output=1,
)


@implements(aten.sign.default, aten.sgn.default, family="unit output")
def sign(x: ScaledTensor) -> Tensor:
    """-1, 0 or 1, of the payload, under the scale 1."""
    values = torch.sign(to_float32(x))
    return make_scaled(values, scale_one(values), x._payload.dtype, x.dtype)
