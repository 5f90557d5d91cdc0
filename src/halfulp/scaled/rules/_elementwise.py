"""Rules of functions of one element, and of comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...subclass._derivation import aten, parse_operators
from .. import _powers_of_two as _powers
from .._derivation import run_on_decoded_values
from .._operands import choose_storage, encode_plain_tensor, promote_dtypes, wrap_rounded_payload
from .._registry import FULL_RANGE_STORAGES, implements, implements_each
from .._scaled_tensor import ScaledTensor, get_float32_payload
from .._write import write_values
from ._vocabulary import convert_argument_to_float32, make_unit_scale, raise_scale_to_degree, wrap_rule_payload

_LINEAR_NEAR_ZERO_OPERATORS = parse_operators("""
    tanh sin asin atan asinh atanh erf log1p expm1 sinh tan erfinv frac special_bessel_j1 special_i1e special_i1
    special_modified_bessel_i1
""")


@implements_each(
    *_LINEAR_NEAR_ZERO_OPERATORS, aten.exp.default, aten.exp2.default, aten.cosh.default, family="unit output"
)
def compute_function_of_values(operator: OpOverload, x: ScaledTensor) -> Tensor:
    """f(p s) in float32 under 1, under min(s, 1) where f(x) is about x near 0, or what the largest result needs."""
    values = operator(convert_argument_to_float32(x))
    if operator not in _LINEAR_NEAR_ZERO_OPERATORS:
        scale = make_unit_scale(values)
    elif (own := _powers.read_scale(x._scale)) is None:
        scale = torch.clamp(x._scale, max=1.0)
    else:
        scale = torch.tensor(min(own, 1.0), dtype=torch.float32, device="cpu")
    storage = x._payload.dtype
    if storage not in FULL_RANGE_STORAGES and values.numel():
        largest = torch.where(values.isfinite(), values, 0.0).abs().amax()
        needed = _powers.round_to_power(largest / torch.finfo(storage).max, "up")
        scale = _powers.take_largest_scale(scale, needed)
    payload = _powers.multiply_by_power(values, _powers.divide_scales(make_unit_scale(values), scale))
    return wrap_rounded_payload(payload, scale.clone(), storage, x.dtype)


# Exponents whose torch kernels commute with powers of two bit for bit; others are computed by logarithms.
_EXACT_POWERS = (1, 2, 3, -1, -2)


def take_root_of_scale(scale: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return a power of two and a factor, 1 or 2, of the payload under the root: sqrt(p 2^(2k + 1)) = sqrt(2 p) 2^k."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) - 127
    half = exponent >> 1
    under = (exponent - 2 * half + 1).to(torch.float32)
    value = _powers.read_scale(under)
    return ((half + 127) << 23).view(torch.float32), under if value is None else value


@implements_each(aten.sqrt.default, aten.rsqrt.default, family="power law")
def take_root(operator: OpOverload, x: ScaledTensor) -> Tensor:
    """sqrt(p) sqrt(s), for an odd power of two sqrt(2 p) sqrt(s / 2); likewise 1 / sqrt(p) under 1 / sqrt(s)."""
    scale, under = take_root_of_scale(x._scale)
    payload = operator(_powers.multiply_by_power(get_float32_payload(x), under))
    scale = scale if operator is aten.sqrt.default else 1.0 / scale
    return wrap_rounded_payload(payload, scale, x._payload.dtype, x.dtype)


@implements(aten.pow.Tensor_Scalar, family="power law")
def pow_tensor_scalar(x: ScaledTensor, exponent: Any) -> Tensor:
    """p^n s^n for the exponents that torch computes without logarithms, roots included; else on values."""
    if exponent in (0.5, -0.5):
        return take_root(aten.sqrt.default if exponent > 0 else aten.rsqrt.default, x)
    if exponent not in _EXACT_POWERS:
        return run_on_decoded_values(aten.pow.Tensor_Scalar, x, exponent)
    scale, rest = raise_scale_to_degree(x._scale, int(exponent))
    return wrap_rule_payload(torch.pow(get_float32_payload(x), exponent), scale, rest, x._payload.dtype, x.dtype)


@implements(aten.rrelu_with_noise.default, family="gated")
def rrelu_with_noise(x: ScaledTensor, noise: Any, *arguments: Any, **options: Any) -> Tensor:
    """x with random slopes below zero; the slopes are written into the noise."""
    y, slopes = aten.rrelu_with_noise_functional.default(x, noise, *arguments, **options)
    write_values(noise, slopes)
    return y


@implements(aten.rrelu_with_noise_.default, family="gated")
def rrelu_with_noise_(x: ScaledTensor, noise: Any, *arguments: Any, **options: Any) -> Tensor:
    """As `rrelu_with_noise`, in place."""
    return write_values(x, rrelu_with_noise(x, noise, *arguments, **options))


@implements(*parse_operators("_ctc_loss_backward.*"), family="special")
def ctc_loss_backward(
    gradient: Any, x: Any, targets: Tensor, lengths: Any, target_lengths: Any, loss: Any, alpha: Any, *options: Any
) -> Tensor:
    """Return the gradient from a loss and path sums computed again: rounded, large logarithms are wrong by factors."""
    given = (gradient, x)
    values = convert_argument_to_float32(x)
    operator = aten._ctc_loss.Tensor if isinstance(lengths, Tensor) else aten._ctc_loss.default
    backward = aten._ctc_loss_backward.Tensor if isinstance(lengths, Tensor) else aten._ctc_loss_backward.default
    loss, alpha = operator(values, targets, lengths, target_lengths, *options)
    found = backward(
        convert_argument_to_float32(gradient), values, targets, lengths, target_lengths, loss, alpha, *options
    )
    return encode_plain_tensor(found, choose_storage(given), dtype=promote_dtypes(given))
