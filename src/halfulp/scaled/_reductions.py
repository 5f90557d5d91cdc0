"""Rules of sums, means, norms, extrema and running sums: a sum of n terms is brought back by sqrt(n)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _powers
from ._bilinear import root_of_count
from ._degrees import by_degree, held_under, keeping, measured_like, under
from ._families import linear
from ._form import decoded, measured_scale, storage_of, widened
from ._registry import implements
from ._scaled_tensor import ScaledTensor

aten = torch.ops.aten


def terms_of(x: Tensor, dims: Sequence[int] | int | None) -> int:
    """How many elements one result is the sum of."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return x.numel()
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod(x.shape[dim] for dim in dims) if x.dim() else 1


def spread_of(x: Tensor, dims: Sequence[int] | int | None = None, *_: Any, **__: Any) -> float:
    """The power of two below the root of the number of terms."""
    return root_of_count(terms_of(x, dims))


def in_dtype(y: Any, dtype: torch.dtype | None) -> Any:
    """A result in the dtype that was asked for."""
    return y if dtype is None or dtype == y.dtype else torch.ops.aten._to_copy.default(y, dtype=dtype)


@implements(aten.sum.default, family="reduction")
def sum_all(x: ScaledTensor, *, dtype: Any = None) -> Tensor:
    """The sum of all elements."""
    return sum_over(x, None, dtype=dtype)


@implements(aten.sum.dim_IntList, family="reduction")
def sum_over(x: ScaledTensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """sum(p) / c under the scale s c, with c the power of two below the root of the number of terms."""
    values = aten.sum.dim_IntList(widened(x), dims, keepdim)
    return in_dtype(under(values, [x._scale], [x], spread_of(x, dims)), dtype)


@implements(aten.nansum.default, family="reduction")
def nansum(x: ScaledTensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum of what is a number."""
    values = aten.nansum.default(widened(x), dims, keepdim)
    return in_dtype(under(values, [x._scale], [x], spread_of(x, dims)), dtype)


@implements(aten.mean.default, family="reduction")
def mean_all(x: ScaledTensor, *, dtype: Any = None) -> Tensor:
    """The mean of all elements."""
    return in_dtype(under(aten.mean.default(widened(x)), [x._scale], [x]), dtype)


@implements(aten.mean.dim, family="reduction")
def mean_over(x: ScaledTensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """mean(p) under the scale s."""
    return in_dtype(under(aten.mean.dim(widened(x), dims, keepdim), [x._scale], [x]), dtype)


@implements(aten.cumsum.default, family="reduction")
def cumsum(x: ScaledTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Running sums, divided by the power of two below the root of the longest."""
    values = aten.cumsum.default(widened(x), dim)
    return in_dtype(under(values, [x._scale], [x], spread_of(x, dim)), dtype)


by_degree(aten.trace.default, family="reduction", self=1)
by_degree(aten.std.correction, family="reduction", self=1)


@implements(aten.var.correction, family="reduction")
def var(x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
    """The variance: as its square under the scale s^2 leaves narrow payloads soon, under a measured one."""
    return squared(aten.var.correction(widened(x), *arguments, **options), x._scale, [x])


@implements(aten.var_mean.correction, family="reduction")
def var_mean(x: ScaledTensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The variance, and the mean under s."""
    variance, mean = aten.var_mean.correction(widened(x), *arguments, **options)
    return squared(variance, x._scale, [x]), under(mean, [x._scale], [x])


def squared(y: Tensor, scale: Tensor, holders: list[Any]) -> Tensor:
    """Payloads that stand for y s^2; a narrow one under the power of two that is next to its root mean square."""
    storage = storage_of(holders)
    if storage == torch.float32:
        return under(y, [scale, scale], holders)
    power = measured_scale(y, storage)
    return under(_powers.times(y, 1.0 / power), [scale, scale, power], holders)


by_degree(aten.std_mean.correction, family="reduction", self=1)
linear(
    *(aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default, aten.max.dim),
    *(aten.min.default, aten.min.dim, aten.median.default, aten.median.dim, aten.nanmedian.default),
    *(aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, aten.cummax.default, aten.cummin.default),
    *(aten.argmax.default, aten.argmin.default, aten.all.default, aten.all.dim, aten.all.dims),
    *(aten.any.default, aten.any.dim, aten.any.dims, aten.count_nonzero.default, aten.count_nonzero.dim_IntList),
)
keeping(aten.logsumexp.default, aten.logcumsumexp.default, family="reduction", least=True)


@implements(aten.prod.default, aten.prod.dim_int, family="reduction")
def prod(x: ScaledTensor, *where: Any, dtype: Any = None, **options: Any) -> Tensor:
    """The product of values, in float64, where n powers of two do not leave the range; its scale measured."""
    values = torch.prod(decoded(x, torch.float64), *where, **options)
    return in_dtype(measured_like(values, [x]), dtype)


@implements(aten.cumprod.default, family="reduction")
def cumprod(x: ScaledTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Running products of values, in float64; their scale measured."""
    return in_dtype(measured_like(aten.cumprod.default(decoded(x, torch.float64), dim), [x]), dtype)


def _norm(x: ScaledTensor, order: Any, dims: Any, keepdim: bool, dtype: Any) -> Tensor:
    order = 2.0 if order is None else float(order)
    count = terms_of(x, dims)
    if order not in (0.0, 1.0, 2.0, math.inf, -math.inf):  # powers of payloads depend on how values are split
        values = aten.linalg_vector_norm.default(decoded(x, torch.float32), order, dims, keepdim)
        return in_dtype(held_under(values, x._scale, x._payload.dtype, x.dtype), dtype)
    values = aten.linalg_vector_norm.default(widened(x), order, dims, keepdim)
    spread = {0.0: root_of_count(count), 1.0: root_of_count(count * count), 2.0: root_of_count(count)}.get(order, 1.0)
    return in_dtype(under(values, [x._scale] if order else [], [x], spread), dtype)


@implements(aten.linalg_vector_norm.default, family="reduction")
def vector_norm(x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """norm(p) under the scale s; of order 0 a count under the scale 1."""
    return _norm(x, order, dims, keepdim, dtype)


@implements(aten.norm.Scalar, aten.norm.ScalarOpt_dtype, family="reduction")
def norm(x: ScaledTensor, order: Any = 2, *, dtype: Any = None) -> Tensor:
    """norm(p) under the scale s."""
    return _norm(x, order, None, False, dtype)


@implements(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, family="reduction")
def norm_over(x: ScaledTensor, order: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """norm(p) under the scale s."""
    return _norm(x, order, dims, keepdim, dtype)
