"""Rules of activations and their gradients: a gate is computed on values, the scale of what it gates stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ..._operands import first_scaled, operand, selectable_payload, to_float32
from ..._powers_of_two import ratio, times
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from ..._write import write
from .._constants import constants_under
from .._results import payloads_under, value_of, values_under
from .._vocabulary import gate, homogeneous, unit_scale

aten = torch_operators("aten")

gate(
    *(aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default, aten.elu.default),
    *(aten.celu.default, aten.softshrink.default, aten.hardshrink.default, aten.glu.default),
    family="gated",
)
homogeneous(aten.leaky_relu.default, family="pass-through")
gate(aten.softplus.default, family="gated", at_least_one=True)
unit_scale(aten.hardsigmoid.default, family="gated")
homogeneous(
    *(aten.gelu_backward.default, aten.silu_backward.default, aten.mish_backward.default),
    *(aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.hardtanh_backward.default),
    *(aten.leaky_relu_backward.default, aten.elu_backward.default, aten.softplus_backward.default),
    *(aten.softshrink_backward.default, aten.glu_backward.default, aten.log_sigmoid_backward.default),
    aten.rrelu_with_noise_backward.default,
    family="gated",
    grad_output=1,
)
homogeneous(aten.hardshrink_backward.default, family="gated", grad_out=1)
gate(aten._prelu_kernel.default, family="gated")


@implements(aten._prelu_kernel_backward.default, family="gated")
def prelu_backward(gradient: Any, x: Any, weight: Any) -> tuple[Tensor, Tensor]:
    """The gradient to x under gs, and to the slopes under gs xs."""
    like = first_scaled((gradient, x, weight))
    g, p = operand(gradient, like), operand(x, like)
    to_x, to_weight = aten._prelu_kernel_backward.default(to_float32(g), to_float32(p), value_of(weight))
    holder = gradient if isinstance(gradient, ScaledTensor) else like
    return payloads_under(to_x, [g._scale], [holder]), payloads_under(to_weight, [g._scale, p._scale], [holder])


@implements(aten.threshold_backward.default, family="gated")
def threshold_backward(gradient: Any, x: Any, threshold: Any) -> Tensor:
    """The gradient where x is above the threshold."""
    like = first_scaled((gradient, x))
    g = operand(gradient, like)
    holder = gradient if isinstance(gradient, ScaledTensor) else like
    compared = operand(x, like)
    pair = (selectable_payload(g), selectable_payload(compared) if threshold == 0 else value_of(x))
    pair = pair if pair[0].dtype == pair[1].dtype else (to_float32(g), pair[1].to(torch.float32))
    return payloads_under(aten.threshold_backward.default(*pair, threshold), [g._scale], [holder])


@implements(aten.threshold.default, family="gated")
def threshold(x: ScaledTensor, threshold: Any, value: Any) -> Tensor:
    """x where it is above the threshold, else a constant, under x's scale."""
    (constant,), scale = constants_under(x, value)
    payload = times(to_float32(x), ratio(x._scale, scale))
    return payloads_under(torch.where(value_of(x) <= threshold, constant, payload), [scale], [x])


@implements(aten.log_sigmoid_forward.default, family="gated")
def log_sigmoid_forward(x: ScaledTensor) -> tuple[Tensor, Tensor]:
    """log(sigmoid) under x's scale or 1, the larger; the buffer as values."""
    values, buffer = aten.log_sigmoid_forward.default(value_of(x))
    one = torch.ones_like(x._scale)
    return values_under(values, torch.maximum(x._scale, one), x._payload.dtype, x.dtype), buffer


@implements(aten.rrelu_with_noise_functional.default, family="gated")
def rrelu_functional(x: ScaledTensor, noise: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """x with random slopes below zero, under x's scale; the slopes."""
    slopes = value_of(noise).clone()
    y = aten.rrelu_with_noise.default(to_float32(x), slopes, *arguments, **options)
    return payloads_under(y, [x._scale], [x]), payloads_under(slopes, [], [x])


@implements(aten.rrelu_with_noise.default, family="gated")
def rrelu_with_noise(x: ScaledTensor, noise: Any, *arguments: Any, **options: Any) -> Tensor:
    """x with random slopes below zero, under x's scale; the slopes are written into the noise."""
    y, slopes = rrelu_functional(x, noise, *arguments, **options)
    write(noise, slopes)
    return y


@implements(aten.rrelu_with_noise_.default, family="gated")
def rrelu_with_noise_(x: ScaledTensor, noise: Any, *arguments: Any, **options: Any) -> Tensor:
    """As `rrelu_with_noise`, in place."""
    return write(x, rrelu_with_noise(x, noise, *arguments, **options))
