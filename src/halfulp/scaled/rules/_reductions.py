"""Rules of reductions, sorting, pooling and losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...subclass._derivation import aten
from .._operands import encode_operand, encode_plain_tensor, find_scaled_tensor
from .._registry import LOGICAL_DTYPES, implements, implements_each
from .._scaled_tensor import ScaledTensor, decode_values, get_float32_payload
from ._vocabulary import (
    align_operands,
    convert_argument_to_float32,
    encode_results,
    homogeneous,
    make_scaled_results,
    round_root_to_power_of_two,
)


def count_summed_elements(x: Tensor, dims: Sequence[int] | int | None) -> int:
    """Return how many elements one result is the sum of."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return x.numel()
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod(x.shape[dim] for dim in dims) if x.dim() else 1


def choose_sum_divisor(x: Tensor, dims: Sequence[int] | int | None) -> float:
    """Return the power of two below the square root of the number of terms."""
    return round_root_to_power_of_two(count_summed_elements(x, dims))


def register_reduction(*operators: OpOverload) -> Callable[[Callable], Callable]:
    """Register a rule that computes in float32 for operators with dtype=, as a decorator."""
    # With dtype=float64 they compute in it, on exact values; the result is rounded once, to payloads under a measured
    # scale. With integers and complex numbers they are torch's own, on values, and their results plain.

    def register(rule: Callable) -> Callable:
        @implements_each(*operators, family="reduction")
        @functools.wraps(rule)
        def reduce(
            operator: OpOverload, x: ScaledTensor, *arguments: Any, dtype: torch.dtype | None = None, **options: Any
        ) -> Tensor:
            if dtype is None or dtype == x.dtype != torch.float64:
                return rule(x, *arguments, **options)
            if dtype == torch.float64:
                values = operator(decode_values(x, dtype), *arguments, dtype=dtype, **options)
                return encode_plain_tensor(values, x._payload.dtype)
            if dtype not in LOGICAL_DTYPES:
                return operator(decode_values(x), *arguments, dtype=dtype, **options)
            return aten._to_copy.default(rule(x, *arguments, **options), dtype=dtype)

        return rule

    return register


@register_reduction(aten.sum.default, aten.sum.dim_IntList)
def sum_over(x: ScaledTensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """sum(p) / c under the scale s c, with c the power of two below the root of the number of terms."""
    total = aten.sum.dim_IntList(get_float32_payload(x), dims, keepdim)
    return make_scaled_results(total, [x._scale], [x], choose_sum_divisor(x, dims))


@register_reduction(aten.mean.default, aten.mean.dim)
def mean_over(x: ScaledTensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """mean(p) under the scale s."""
    return make_scaled_results(aten.mean.dim(get_float32_payload(x), dims, keepdim), [x._scale], [x])


@register_reduction(aten.cumsum.default)
def cumsum(x: ScaledTensor, dim: int) -> Tensor:
    """Return running sums, divided by the power of two below the root of the longest."""
    return make_scaled_results(
        aten.cumsum.default(get_float32_payload(x), dim), [x._scale], [x], choose_sum_divisor(x, dim)
    )


@register_reduction(aten.prod.default, aten.prod.dim_int)
def prod(x: ScaledTensor, *where: Any) -> Tensor:
    """Return the product of values, in float64, where n powers of two do not leave the range; its scale measured."""
    return encode_results(torch.prod(decode_values(x, torch.float64), *where), [x])


@register_reduction(aten.cumprod.default)
def cumprod(x: ScaledTensor, dim: int) -> Tensor:
    """Return running products of values, in float64; their scale is measured."""
    return encode_results(aten.cumprod.default(decode_values(x, torch.float64), dim), [x])


@register_reduction(aten.linalg_vector_norm.default)
def vector_norm(x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False) -> Tensor:
    """norm(p) under the scale s; of order 0 a count under the scale 1."""
    order = 2.0 if order is None else float(order)
    count = count_summed_elements(x, dims)
    if order not in (0.0, 1.0, 2.0, math.inf, -math.inf):  # powers of payloads depend on how values are split
        values = aten.linalg_vector_norm.default(decode_values(x, torch.float64), order, dims, keepdim)
        return encode_results(values, [x])
    values = aten.linalg_vector_norm.default(get_float32_payload(x), order, dims, keepdim)
    terms = {0.0: count, 1.0: count * count, 2.0: count}.get(order, 1)
    return make_scaled_results(values, [x._scale] if order else [], [x], round_root_to_power_of_two(terms))


_UPSAMPLE_NAMES = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)
for _name in _UPSAMPLE_NAMES:
    homogeneous(getattr(aten, _name).default, family="pass-through")
    homogeneous(getattr(aten, f"{_name}_backward").default, family="pooling", grad_output=1)


MEAN_REDUCTION, SUM_REDUCTION = 1, 2


def _find_mean_gradient_factor(position: int, *arguments: Any, **options: Any) -> float:
    """Return the power of two near 1 / n by which the backward of a mean multiplies gradients; 1 for none."""
    # Its arguments are the gradient, the input, the target and others, among them the reduction at a position.
    reduction = arguments[position] if len(arguments) > position else options.get("reduction", MEAN_REDUCTION)
    count = arguments[2].numel()
    return 1.0 / round_root_to_power_of_two(count * count) if reduction == MEAN_REDUCTION else 1.0


@implements(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, family="loss")
def nll_loss_forward(x: Any, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the chosen log-probabilities under x's scale; the total weight is plain float32, as counts overflow."""
    operator = aten.nll_loss_forward.default if x.dim() < 3 else aten.nll_loss2d_forward.default
    p = encode_operand(x, find_scaled_tensor((x, weight)))
    y, total = operator(get_float32_payload(p), target, convert_argument_to_float32(weight), reduction, ignore_index)
    holders = [x] if isinstance(x, ScaledTensor) else [x, weight]
    divisor = round_root_to_power_of_two(target.numel()) if reduction == SUM_REDUCTION else 1.0
    return make_scaled_results(y, [p._scale], holders, divisor), total


@implements(aten.mse_loss_backward.default, family="loss")
def mse_loss_backward(gradient: Any, x: Any, target: Any, reduction: int) -> Tensor:
    """2 pg (px - pt) under gs s / n."""
    like = find_scaled_tensor((gradient, x, target))
    g = encode_operand(gradient, like)
    (a, b), scale, *_ = align_operands(*(encode_operand(t, like) for t in (x, target)))
    y = aten.mse_loss_backward.default(get_float32_payload(g), a, b, reduction)
    return make_scaled_results(
        y, [g._scale, scale], [like], _find_mean_gradient_factor(3, gradient, x, target, reduction)
    )


# By operator, the position of its argument `reduction`.
for _operator, _position in {
    aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3,
    aten.soft_margin_loss_backward.default: 3,
    aten.binary_cross_entropy_backward.default: 4,
    aten.multi_margin_loss_backward.default: 6,
    aten.multilabel_margin_loss_backward.default: 3,
    aten.nll_loss_backward.default: 4,
    aten.nll_loss2d_backward.default: 4,
}.items():
    homogeneous(_operator, family="loss", terms=functools.partial(_find_mean_gradient_factor, _position), grad_output=1)
