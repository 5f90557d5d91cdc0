"""Sums, products, norms and moments over dimensions, and sums at indices that may repeat."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import arithmetic
from ...arithmetic import MAX_COMPONENTS, PRECISION_BY_DTYPE, Parts
from ...arithmetic._exact_sums import normalize_dims
from ...subclass._derivation import aten
from ...subclass._in_backward import COMPONENTS_GRADIENTS_MODE, disable_result_rounding, wants_plain_result
from .._derivation import (
    implements_beyond_exact_float64,
    implements_beyond_float64,
    prefer_float64,
    refuse_mctensor_operator,
)
from .._mctensor import MCTensor, implements
from .._result_type import (
    ResultType,
    count_float64_components,
    encode_plain_operands,
    make_result,
    result_type,
    run_pointwise_function,
    to_components,
)
from ._memory import insert_elements


def run_reduction(function: Callable, x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Run one of arithmetic's reductions over any dimensions."""
    if dtype is not None and dtype not in PRECISION_BY_DTYPE:
        raise TypeError(
            f"dtype={dtype} of a reduction: components are float16, bfloat16, float32 or float64; reduce x.decode()"
        )
    form = result_type((x,), dtype=dtype)
    parts = to_components(x, form.device)
    if not x.dim():
        return make_result(tuple(part.clone() for part in parts), form)
    is_plain = wants_plain_result(form.gradients, form.has_gradient) and parts[0].dtype == form.dtype
    count = 1 if is_plain else _count_working_components(form, parts)
    return make_result(function(parts, dim, count, keepdim), form)


def _count_working_components(form: ResultType, parts: Parts) -> int:
    """Return how many components of the operand's dtype hold the result."""
    return count_float64_components(form) if form.is_scaled else max(form.components, len(parts))


for _function, _of_all, _of_some in (
    (arithmetic.total, aten.sum.default, aten.sum.dim_IntList),
    (arithmetic.average, aten.mean.default, aten.mean.dim),
    (arithmetic.product, aten.prod.default, aten.prod.dim_int),
):
    implements(_of_all)(lambda x, *, dtype=None, f=_function: run_reduction(f, x, None, False, dtype))
    implements(_of_some)(
        lambda x, dim, keepdim=False, *, dtype=None, f=_function: run_reduction(f, x, dim, keepdim, dtype)
    )


implements(aten.nansum.default)(
    lambda x, dim=None, keepdim=False, *, dtype=None: run_reduction(
        arithmetic.total, x.masked_fill(x.isnan(), 0), dim, keepdim, dtype
    )
)


@implements(aten.cumsum.default)
def cumsum(x: MCTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Running sums."""
    form = result_type((x,), dtype=dtype)
    parts = to_components(x, form.device)
    if not x.dim() or not x.numel():
        return make_result(tuple(part.clone() for part in parts), form)
    return make_result(arithmetic.running_sum(parts, dim, _count_working_components(form, parts)), form)


@implements(aten.linalg_vector_norm.default)
def vector_norm(x: MCTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """(sum |x|^ord)^(1/ord), the largest for infinity, the count of others than 0 for 0."""
    if not math.isinf(ord):
        return _compute_finite_order_norm(x, ord, dim, keepdim, dtype=dtype)
    # One of the elements, with all of its digits: the gradient asks which elements are equal to it.
    size = (x if dtype is None else x.to(dtype)).abs()
    return (torch.amax if ord > 0 else torch.amin)(size, normalize_dims(x.dim(), dim), keepdim)


def _sum_powers_and_take_root(x: Tensor, ord: Any, dim: Any, keepdim: bool, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = normalize_dims(x.dim(), dim)
    if ord == 2:
        return (x * x).sum(dims, keepdim).sqrt()
    if ord == 0:
        return (x != 0).sum(dims, keepdim) + torch.zeros_like(x.sum(dims, keepdim))
    size = x.abs()
    if ord == 1:
        return size.sum(dims, keepdim)
    form = ResultType(torch.float64, MAX_COMPONENTS, COMPONENTS_GRADIENTS_MODE, False, x.device)
    root = run_pointwise_function("div", 1.0, torch.tensor(float(ord), dtype=torch.float64, device=x.device), form=form)
    return size.pow(ord).sum(dims, keepdim).pow(root)


_compute_finite_order_norm = prefer_float64(aten.linalg_vector_norm.default, _sum_powers_and_take_root)
implements(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)(
    lambda x, p=2, dim=None, keepdim=False, *, dtype=None: torch.linalg.vector_norm(
        x, 2 if p is None else p, dim or None, keepdim, dtype=dtype
    )
)
implements(aten.dist.default)(lambda a, b, p=2: torch.linalg.vector_norm(a - b, p))
# Their gradients ask which elements are equal to the result, which float64 must hold for that.
for _operator in (aten.scatter_reduce.two, aten.index_reduce.default, aten.median.default, aten.nanmedian.default):
    implements_beyond_exact_float64(_operator)(
        functools.partial(
            refuse_mctensor_operator, _operator, "chooses elements in float64, which does not hold these,"
        )
    )


@implements_beyond_float64(aten.var_mean.correction)
def var_mean(x: MCTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean of squares about the mean, over count - correction, and the mean."""
    dims = normalize_dims(x.dim(), dim)
    count = math.prod(x.shape[i] for i in dims)
    mean = x.mean(dims, keepdim=True)
    spread = x - mean
    free = max(count - (1 if correction is None else correction), 0)
    variance = (spread * spread).sum(dims, keepdim) / free
    return variance, mean if keepdim else mean.squeeze(dims)


implements_beyond_float64(aten.var.correction)(lambda x, *given, **options: var_mean(x, *given, **options)[0])


@implements(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, and the mean and the root's inverse that it took."""
    *values, training, momentum, eps = operands
    running_mean, running_variance = values[3:]
    x, weight, bias, mean, variance = encode_plain_operands(tuple(values), result_type(values))
    with disable_result_rounding():
        if training:
            dims = [i for i in range(x.dim()) if i != 1]
            variance, mean = torch.var_mean(x, dims, correction=0)
            _update_running_statistic(running_mean, mean, momentum)
            count = x.numel() // max(x.shape[1], 1)
            _update_running_statistic(running_variance, variance * count / max(count - 1, 1), momentum)
        inverse = (variance + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        out = (x - mean.reshape(shape)) * inverse.reshape(shape)
        out = out if weight is None else out * weight.reshape(shape)
        out = out if bias is None else out + bias.reshape(shape)
    return (out, mean, inverse) if training else (out, x.new_empty((0,)), x.new_empty((0,)))


def _update_running_statistic(running: Any, now: Any, momentum: float) -> None:
    """Update a running statistic in place: running + momentum (now - running)."""
    if running is not None:
        result = run_pointwise_function("addcmul", running, now - running, momentum, form=result_type((running, now)))
        running.copy_(result)


def add_rows_at_indices(into: Any, index: Tensor, values: Any) -> Tensor:
    """Return `into` with values[i] added to its row index[i]; both have their rows first."""
    rows = into.shape[0]
    if not index.numel():
        return into + torch.zeros_like(into)
    order = index.argsort(stable=True)
    goal, sums = index[order], values[order]
    step = 1
    # Each row takes in the one 1, 2, 4, ... before it while that has the same index: an index's last row has all.
    while step < index.numel():
        same = goal[step:] == goal[:-step]
        if type(same) is Tensor and not bool(same.any()):
            break
        mask, before = same.reshape(-1, *[1] * (sums.dim() - 1)), sums[:-step]
        sums = torch.cat([sums[:step], sums[step:] + torch.where(mask, before, torch.zeros_like(before))])
        step *= 2
    last = torch.cat([goal[1:] != goal[:-1], torch.ones_like(goal[:1], dtype=torch.bool)])
    # The other rows go to a spare one behind all.
    spare = sums.new_zeros((rows + 1, *sums.shape[1:]))
    return into + spare.index_copy(0, torch.where(last, goal, rows), sums)[:rows]


@implements_beyond_exact_float64(aten.index_add.default)
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor:
    """x with alpha times the source's slices added at an index along a dimension."""
    if x.dim() == 0:
        return x + source.sum() * alpha
    source = source if alpha == 1 else source * alpha
    places = torch.arange(x.shape[dim], device=index.device, dtype=torch.int64)
    rows = places.index_select(0, index.reshape(-1))  # refuses what is out of range, as torch does
    return add_rows_at_indices(x.transpose(0, dim), rows, source.transpose(0, dim)).transpose(0, dim)


@implements_beyond_exact_float64(aten.scatter_add.default)
def scatter_add(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """x with the source's elements added where the index says along a dimension."""
    if x.dim():
        source = source[tuple(slice(0, size) for size in index.shape)]
        flat = torch.arange(x.numel(), device=index.device, dtype=torch.int64).reshape(x.shape)
        at = flat[tuple(slice(0, size if i != dim % x.dim() else None) for i, size in enumerate(index.shape))]
        index = at.gather(dim, index)
    return add_rows_at_indices(x.reshape(-1), index.reshape(-1), source.reshape(-1)).reshape(x.shape)


@implements_beyond_exact_float64(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Any, indices: Sequence, values: Any, accumulate: bool = False) -> Tensor:
    """Return x with values written, or accumulated, at the indices."""
    if not isinstance(values, Tensor):
        values = torch.scalar_tensor(values, dtype=torch.float64, device=x.device)
    flat = torch.arange(x.numel(), device=x.device, dtype=torch.int64).reshape(x.shape)
    at = aten.index.Tensor(flat, indices)
    values, at = values.expand(at.shape).reshape(-1), at.reshape(-1)
    if accumulate:
        return add_rows_at_indices(x.reshape(-1), at, values).reshape(x.shape)
    return insert_elements(aten.index_copy.default, x.reshape(-1), 0, at, values).reshape(x.shape)
