"""Rules of powers: payload and scale are raised alike, the scale so that it stays a power of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._derivation import run_on_values
from ..._operands import make_scaled, to_float32
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import make_result, power_of_scale
from .._vocabulary import homogeneous, measured_scale

aten = torch_operators("aten")

# Exponents whose torch kernels commute with powers of two bit for bit; others are computed by logarithms.
_EXACT_DEGREES = (1, 2, 3, -1, -2)


def sqrt_of_scale(scale: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return the square root of a scale as a power of two, and the factor, 1 or 2, for the payload under its root.

    sqrt(p 2^(2k + 1)) = sqrt(2 p) 2^k.
    """
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) - 127
    half = exponent >> 1
    under = (exponent - 2 * half + 1).to(torch.float32)
    value = _powers.concrete_value(under)
    return ((half + 127) << 23).view(torch.float32), under if value is None else value


@implements(aten.sqrt.default, family="power law")
def sqrt(x: ScaledTensor) -> Tensor:
    """sqrt(p) sqrt(s), for an odd power of two sqrt(2 p) sqrt(s / 2)."""
    scale, under = sqrt_of_scale(x._scale)
    return make_scaled(torch.sqrt(_powers.times(to_float32(x), under)), scale, x._payload.dtype, x.dtype)


@implements(aten.rsqrt.default, family="power law")
def rsqrt(x: ScaledTensor) -> Tensor:
    """1 / sqrt(p) under 1 / sqrt(s), likewise."""
    scale, under = sqrt_of_scale(x._scale)
    return make_scaled(torch.rsqrt(_powers.times(to_float32(x), under)), 1.0 / scale, x._payload.dtype, x.dtype)


@implements(aten.pow.Tensor_Scalar, family="power law")
def power_of_number(x: ScaledTensor, exponent: Any) -> Tensor:
    """p^n s^n for the exponents that torch computes without logarithms, roots included; else on values."""
    if exponent in (0.5, -0.5):
        return sqrt(x) if exponent > 0 else rsqrt(x)
    if exponent not in _EXACT_DEGREES:
        return run_on_values(aten.pow.Tensor_Scalar, x, exponent)
    scale, rest = power_of_scale(x._scale, int(exponent))
    return make_result(torch.pow(to_float32(x), exponent), scale, rest, x._payload.dtype, x.dtype)


homogeneous(aten.reciprocal.default, degree=-1, family="power law")
measured_scale(aten.pow.Tensor_Tensor, aten.pow.Scalar, family="power law")
