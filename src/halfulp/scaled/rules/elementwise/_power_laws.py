"""Rules of powers: payload and scale are raised alike, the scale so that it stays a power of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._derivation import on_values
from ..._operands import made, widened
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._families import measured, of_degree, power, result

aten = torch_operators("aten")

# Exponents of which torch has kernels that commute with powers of two bit for bit; others it takes by logarithms.
_EXACT_DEGREES = (1, 2, 3, -1, -2)


def root(scale: Tensor) -> tuple[Tensor, Tensor | float]:
    """The square root of a scale as a power of two, and the factor, 1 or 2, that the payload takes under its root.

    sqrt(p 2^(2k + 1)) = sqrt(2 p) 2^k.
    """
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) - 127
    half = exponent >> 1
    under = (exponent - 2 * half + 1).to(torch.float32)
    value = _powers.known(under)
    return ((half + 127) << 23).view(torch.float32), under if value is None else value


@implements(aten.sqrt.default, family="power law")
def sqrt(x: ScaledTensor) -> Tensor:
    """sqrt(p) sqrt(s), for an odd power of two sqrt(2 p) sqrt(s / 2)."""
    scale, under = root(x._scale)
    return made(torch.sqrt(_powers.times(widened(x), under)), scale, x._payload.dtype, x.dtype)


@implements(aten.rsqrt.default, family="power law")
def rsqrt(x: ScaledTensor) -> Tensor:
    """1 / sqrt(p) under 1 / sqrt(s), likewise."""
    scale, under = root(x._scale)
    return made(torch.rsqrt(_powers.times(widened(x), under)), 1.0 / scale, x._payload.dtype, x.dtype)


@implements(aten.pow.Tensor_Scalar, family="power law")
def power_of_number(x: ScaledTensor, exponent: Any) -> Tensor:
    """p^n s^n for the exponents that torch computes without logarithms, roots included; else on values."""
    if exponent in (0.5, -0.5):
        return sqrt(x) if exponent > 0 else rsqrt(x)
    if exponent not in _EXACT_DEGREES:
        return on_values(aten.pow.Tensor_Scalar, x, exponent)
    scale, rest = power(x._scale, int(exponent))
    return result(torch.pow(widened(x), exponent), scale, rest, x._payload.dtype, x.dtype)


of_degree(-1, aten.reciprocal.default)
measured(aten.pow.Tensor_Tensor, aten.pow.Scalar, family="power law")
