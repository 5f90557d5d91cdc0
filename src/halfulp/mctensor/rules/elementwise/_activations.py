"""Rules of GELU, whose constants need more digits than torch's own formula has, and of the random leaky ReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ..._derivation import beyond_float64
from ..._registry import implements
from ..._write import write_value
from ._powers import PI, constant

aten = torch_operators("aten")

_CUBE = 0.044715


def _half_root(x: Tensor) -> Tensor:
    """1 / sqrt(2)."""
    return constant("0.5", x).sqrt()


@beyond_float64(aten.gelu.default)
def gelu(x: Any, *, approximate: str = "none") -> Tensor:
    """x Phi(x), or its approximation by tanh."""
    if approximate == "tanh":
        return x * (1 + torch.tanh(_inner(x)[0])) * 0.5
    return x * _normal(x) * 0.5


@beyond_float64(aten.gelu_backward.default)
def gelu_backward(gradient: Any, x: Any, *, approximate: str = "none") -> Tensor:
    """The gradient times Phi(x) + x phi(x), or times the derivative of the approximation by tanh."""
    if approximate == "tanh":
        inner, slope = _inner(x)
        bent = torch.tanh(inner)
        return gradient * ((1 + bent) + x * (1 - bent * bent) * slope) * 0.5
    density = (x * x * -0.5).exp() * (constant(PI, x) * 2).rsqrt()
    return gradient * (_normal(x) * 0.5 + x * density)


@implements(aten.rrelu_with_noise.default)
def rrelu_with_noise(
    x: Any, noise: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """x, below zero times a slope: drawn, and written into the noise, or the middle one."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slopes = torch.empty(x.shape, dtype=torch.float64, device=x.device).uniform_(lower, upper, generator=generator)
    slopes = torch.where(x > 0, 1.0, slopes).to(x.dtype)
    noise.copy_(slopes)
    return x * slopes


@implements(aten.rrelu_with_noise_.default)
def rrelu_with_noise_(x: Any, noise: Any, *arguments: Any, **options: Any) -> Tensor:
    """As `rrelu_with_noise`, in place."""
    return write_value(x, rrelu_with_noise(x, noise, *arguments, **options))


def _normal(x: Any) -> Tensor:
    """2 Phi(x) = 1 + erf(x / sqrt(2))."""
    return 1 + torch.erf(x * _half_root(x))


def _inner(x: Any) -> tuple[Tensor, Tensor]:
    """sqrt(2 / pi) (x + 0.044715 x^3), and its slope."""
    factor = (constant("2", x) / constant(PI, x)).sqrt()
    square = x * x
    return factor * (x + x * square * _CUBE), factor * (1 + square * _CUBE * 3)
