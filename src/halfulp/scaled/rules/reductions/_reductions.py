"""Rules of sums, means, norms, extrema and running sums: a sum of n terms is brought back by sqrt(n)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._dtypes import LOGICALS
from ..._operands import decode_values, encode_values, rms_scale, storage_of, to_float32
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import measured_like, payloads_under, sqrt_of_count, values_under
from .._vocabulary import gate, homogeneous

aten = torch_operators("aten")


def terms_of(x: Tensor, dims: Sequence[int] | int | None) -> int:
    """Return how many elements one result is the sum of."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return x.numel()
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod(x.shape[dim] for dim in dims) if x.dim() else 1


def sum_scale_of(x: Tensor, dims: Sequence[int] | int | None = None, *_: Any, **__: Any) -> float:
    """Return the power of two below the square root of the number of terms."""
    return sqrt_of_count(terms_of(x, dims))


def with_dtype(*operators: OpOverload) -> Callable[[Callable], Callable]:
    """Register a rule that computes in float32 for operators with dtype=, as a decorator.

    With dtype=float64 they compute in it, on exact values; the result is rounded once, to payloads under a measured
    scale. With integers and complex numbers they are torch's own, on values, and their results plain.
    """

    def register(rule: Callable) -> Callable:
        for operator in operators:
            implements(operator, family="reduction")(_with_dtype(operator, rule))
        return rule

    return register


def _with_dtype(operator: OpOverload, rule: Callable) -> Callable:
    def computed(x: ScaledTensor, *arguments: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if dtype is None or dtype == x.dtype != torch.float64:
            return rule(x, *arguments, **options)
        if dtype == torch.float64:
            values = operator(decode_values(x, dtype), *arguments, dtype=dtype, **options)
            return encode_values(values, x._payload.dtype)
        if dtype not in LOGICALS:
            return operator(decode_values(x), *arguments, dtype=dtype, **options)
        return aten._to_copy.default(rule(x, *arguments, **options), dtype=dtype)

    return computed


@with_dtype(aten.sum.default, aten.sum.dim_IntList)
def sum_over(x: ScaledTensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """sum(p) / c under the scale s c, with c the power of two below the root of the number of terms."""
    return payloads_under(aten.sum.dim_IntList(to_float32(x), dims, keepdim), [x._scale], [x], sum_scale_of(x, dims))


@with_dtype(aten.nansum.default)
def nansum(x: ScaledTensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Sum the elements that are numbers."""
    return payloads_under(aten.nansum.default(to_float32(x), dims, keepdim), [x._scale], [x], sum_scale_of(x, dims))


@with_dtype(aten.mean.default, aten.mean.dim)
def mean_over(x: ScaledTensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """mean(p) under the scale s."""
    return payloads_under(aten.mean.dim(to_float32(x), dims, keepdim), [x._scale], [x])


@with_dtype(aten.cumsum.default)
def cumsum(x: ScaledTensor, dim: int) -> Tensor:
    """Running sums, divided by the power of two below the root of the longest."""
    return payloads_under(aten.cumsum.default(to_float32(x), dim), [x._scale], [x], sum_scale_of(x, dim))


homogeneous(aten.trace.default, family="reduction", self=1)
homogeneous(aten.std.correction, family="reduction", self=1)


@implements(aten.var.correction, family="reduction")
def var(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
    """The variance: as its square under the scale s^2 leaves narrow payloads soon, under a measured one."""
    return make_squares(aten.var.correction(to_float32(x), *arguments, **options), x._scale, [x])


@implements(aten.var_mean.correction, family="reduction")
def var_mean(x: ScaledTensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The variance, and the mean under s."""
    variance, mean = aten.var_mean.correction(to_float32(x), *arguments, **options)
    return make_squares(variance, x._scale, [x]), payloads_under(mean, [x._scale], [x])


def make_squares(y: Tensor, scale: Tensor, holders: list[Any]) -> Tensor:
    """Return payloads of y s^2 as a tensor; a narrow one under the power of two next to its root mean square."""
    storage = storage_of(holders)
    if storage == torch.float32:
        return payloads_under(y, [scale, scale], holders)
    power = rms_scale(y, storage)
    return payloads_under(_powers.times(y, 1.0 / power), [scale, scale, power], holders)


homogeneous(aten.std_mean.correction, family="reduction", self=1)
homogeneous(
    *(aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default, aten.max.dim),
    *(aten.min.default, aten.min.dim, aten.median.default, aten.median.dim, aten.nanmedian.default),
    *(aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, aten.cummax.default, aten.cummin.default),
    *(aten.argmax.default, aten.argmin.default, aten.all.default, aten.all.dim, aten.all.dims),
    *(aten.any.default, aten.any.dim, aten.any.dims, aten.count_nonzero.default, aten.count_nonzero.dim_IntList),
    family="pass-through",
)
gate(aten.logsumexp.default, aten.logcumsumexp.default, family="reduction", at_least_one=True)


@with_dtype(aten.prod.default, aten.prod.dim_int)
def prod(x: ScaledTensor, *where: Any) -> Tensor:
    """The product of values, in float64, where n powers of two do not leave the range; its scale measured."""
    return measured_like(torch.prod(decode_values(x, torch.float64), *where), [x])


@with_dtype(aten.cumprod.default)
def cumprod(x: ScaledTensor, dim: int) -> Tensor:
    """Running products of values, in float64; their scale measured."""
    return measured_like(aten.cumprod.default(decode_values(x, torch.float64), dim), [x])


@with_dtype(aten.linalg_vector_norm.default)
def vector_norm(x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False) -> Tensor:
    """norm(p) under the scale s; of order 0 a count under the scale 1."""
    order = 2.0 if order is None else float(order)
    count = terms_of(x, dims)
    if order not in (0.0, 1.0, 2.0, math.inf, -math.inf):  # powers of payloads depend on how values are split
        values = aten.linalg_vector_norm.default(decode_values(x, torch.float32), order, dims, keepdim)
        return values_under(values, x._scale, x._payload.dtype, x.dtype)
    values = aten.linalg_vector_norm.default(to_float32(x), order, dims, keepdim)
    sum_scale = {0.0: sqrt_of_count(count), 1.0: sqrt_of_count(count * count), 2.0: sqrt_of_count(count)}.get(
        order, 1.0
    )
    return payloads_under(values, [x._scale] if order else [], [x], sum_scale)


@with_dtype(aten.norm.Scalar, aten.norm.ScalarOpt_dtype)
@with_dtype(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm(x: ScaledTensor, order: Any = 2, dims: Any = None, keepdim: bool = False) -> Tensor:
    """norm(p) under the scale s."""
    return vector_norm(x, order, dims, keepdim)
