"""Rules of convolutions: products of payloads, each sum of n terms brought back by sqrt(n)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._operands import first_scaled, logical_of, make_scaled_to_fit, multiplicand, to_float32
from ..._plain_addends import addend, large_elements, saturated
from ..._registry import implements
from .._results import make_result, sqrt_of_count
from ._bilinear import product_over, product_storage

aten = torch_operators("aten")


@implements(aten.convolution.default, family="bilinear")
def convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> Tensor:
    """conv(px, pw) / c under the scale sx sw c with c next below the root of the terms of a sum; a bias joins it.

    All powers of two go into the weight and the bias, so that the result is written once.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    like = first_scaled(given)
    x, weight = multiplicand(x, like), multiplicand(weight, like)
    sum_scale = sqrt_of_count(_terms(weight, transposed, groups=rest[-1], of_output=True))
    scale, _ = _powers.product(x._scale, weight._scale, sum_scale)
    start, large = None, None
    if bias is not None:
        large = large_elements(bias, like)
        large = large if large is None else large.reshape(-1, *[1] * (weight.dim() - 2))
        bias = addend(bias, like)
        scale = _powers.maximum_scale(scale, bias._scale)
        start = _powers.times(to_float32(bias), product_over(bias._scale, scale=scale))
    kernel = _powers.times(to_float32(weight), product_over(x._scale, weight._scale, scale=scale))
    values = aten.convolution.default(to_float32(x), kernel, start, stride, padding, dilation, transposed, *rest)
    storage = product_storage(given)
    return make_scaled_to_fit(saturated(values, scale, storage, large), scale, storage, logical_of(given))


@implements(aten.convolution_backward.default, family="bilinear")
def convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any) -> tuple[Tensor | None, ...]:
    """The gradients of the input, the weight and the bias, those that are asked for."""
    given = (gradient, x, weight)
    like = first_scaled(given)
    gradient, x, weight = (multiplicand(tensor, like) for tensor in given)
    payloads = [to_float32(tensor) for tensor in (gradient, x, weight)]
    *_, transposed, _, groups, wanted = rest
    values = aten.convolution_backward.default(*payloads, *rest)
    places = gradient.shape[0] * math.prod(gradient.shape[2:])
    inputs = x.shape[0] * math.prod(x.shape[2:]) if transposed else places
    counts = (_terms(weight, transposed, groups, of_output=False), inputs, places)
    others = ((weight._scale,), (x._scale,), ())
    dtypes = (x.dtype, weight.dtype, gradient.dtype)
    storage = product_storage(given)
    return tuple(
        _brought_back(y, (gradient._scale, *other), count, storage, dtype) if ask else None
        for y, other, count, dtype, ask in zip(values, others, counts, dtypes, wanted)
    )


def _terms(weight: Tensor, transposed: bool, groups: int, of_output: bool) -> int:
    """How many products an element of the output, or of the input's gradient, is the sum of."""
    window = math.prod(weight.shape[2:])
    # A weight is [out, in / groups, ...], that of a transposed convolution [in, out / groups, ...].
    if transposed == of_output:
        return weight.shape[0] // groups * window
    return weight.shape[1] * window


def _brought_back(values: Tensor, scales: tuple, count: int, storage: torch.dtype, dtype: torch.dtype) -> Tensor:
    sum_scale = sqrt_of_count(count)
    scale, rest = _powers.product(*scales, sum_scale)
    return make_result(values * (1.0 / sum_scale), scale, rest, storage, dtype)


@implements(aten.conv_tbc.default, family="bilinear")
def conv_tbc(x: Any, weight: Any, bias: Any, pad: int = 0) -> Tensor:
    """A convolution over time of [time, batch, channel], its weight [window, in, out]."""
    y = aten.convolution.default(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, [1], [pad], [1], False, [0], 1)
    return y.permute(2, 0, 1)


@implements(aten.conv_tbc_backward.default, family="bilinear")
def conv_tbc_backward(gradient: Any, x: Any, weight: Any, bias: Any, pad: int) -> tuple[Tensor, ...]:
    """The gradients of the input, the weight and the bias."""
    tensors = (gradient.permute(1, 2, 0), x.permute(1, 2, 0), weight.permute(2, 1, 0))
    rest = (list(bias.shape), [1], [pad], [1], False, [0], 1, [True] * 3)
    of_x, of_weight, of_bias = aten.convolution_backward.default(*tensors, *rest)
    return of_x.permute(2, 0, 1), of_weight.permute(2, 1, 0), of_bias
