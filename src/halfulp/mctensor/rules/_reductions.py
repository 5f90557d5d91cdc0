"""Sums, products, norms and moments over dimensions, and sums at indices that may repeat."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import arithmetic
from ...arithmetic import MOST, PRECISION, Parts
from ...kernels import find_torch_operators
from ...subclass._in_backward import COMPONENTS, disable_result_rounding, gives_plain_gradient
from .._derivation import (
    choose_float64_or_rule,
    implements_beyond_exact_float64,
    implements_beyond_float64,
    refuse_operator,
)
from .._mctensor import MCTensor, implements
from .._result_type import (
    ResultType,
    count_float64_components,
    encode_plain_operands,
    make_result,
    result_type,
    run_function,
    to_components,
)
from .._write import write_value
from ._memory import apply_to_components

aten = find_torch_operators("aten")


def normalize_dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Return the dimensions as a list; none given means every one."""
    given = [dim] if isinstance(dim, int) else list(dim or ())
    for one in given:
        if not -max(x.dim(), 1) <= one < max(x.dim(), 1):
            raise IndexError(f"dimension {one} of a tensor of {x.dim()} dimensions")
    return sorted({one % max(x.dim(), 1) for one in given}) if given else list(range(x.dim()))


def run_reduction(function: Callable, x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Run one of arithmetic's reductions over any dimensions."""
    if dtype is not None and dtype not in PRECISION:
        raise TypeError(
            f"dtype={dtype} of a reduction: components are float16, bfloat16, float32 or float64; reduce x.decode()"
        )
    form = result_type((x,), dtype=dtype)
    dims = normalize_dims(x, dim) if x.dim() else []
    parts = to_components(x, form.device)
    if not dims:
        return make_result(tuple(part.clone() for part in parts), form)
    count = (
        1
        if gives_plain_gradient(form.gradients, form.has_gradient) and parts[0].dtype == form.dtype
        else _count_working_components(form, parts)
    )
    return make_result(function(parts, dims, count, keepdim), form)


def _count_working_components(form: ResultType, parts: Parts) -> int:
    """Return how many components of the operand's dtype hold the result."""
    if form.scaled:
        return count_float64_components(form)
    return max(form.components, len(parts))


for _function, _of_all, _of_some in (
    (arithmetic.total, aten.sum.default, aten.sum.dim_IntList),
    (arithmetic.average, aten.mean.default, aten.mean.dim),
    (arithmetic.product, aten.prod.default, aten.prod.dim_int),
):
    implements(_of_all)(lambda x, *, dtype=None, f=_function: run_reduction(f, x, None, False, dtype))
    implements(_of_some)(
        lambda x, dim, keepdim=False, *, dtype=None, f=_function: run_reduction(f, x, dim, keepdim, dtype)
    )


@implements(aten.nansum.default)
def nansum(x: MCTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Sums that leave NaN out."""
    return run_reduction(arithmetic.total, x.masked_fill(x.isnan(), 0), dim, keepdim, dtype)


@implements(aten.cumsum.default)
def cumsum(x: MCTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Running sums."""
    form = result_type((x,), dtype=dtype)
    parts = to_components(x, form.device)
    if not x.dim() or not x.numel():
        return make_result(tuple(part.clone() for part in parts), form)
    return make_result(arithmetic.running(parts, dim, _count_working_components(form, parts)), form)


@implements(aten.linalg_vector_norm.default)
def vector_norm(x: MCTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """(sum |x|^ord)^(1/ord), the largest for infinity, the count of others than 0 for 0.

    An infinite order is one of the elements, with all of its digits: its gradient asks which elements are equal to it.
    """
    if not math.isinf(ord):
        return choose_float64_or_rule(aten.linalg_vector_norm.default, _compute_finite_norm)(
            x, ord, dim, keepdim, dtype=dtype
        )
    size = (x if dtype is None else x.to(dtype)).abs()
    return (torch.amax if ord > 0 else torch.amin)(size, normalize_dims(x, dim), keepdim)


def _compute_finite_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = normalize_dims(x, dim)
    if ord == 2:
        return (x * x).sum(dims, keepdim).sqrt()
    if ord == 0:
        return (x != 0).sum(dims, keepdim) + torch.zeros_like(x.sum(dims, keepdim))
    size = x.abs()
    if ord == 1:
        return size.sum(dims, keepdim)
    form = ResultType(torch.float64, MOST, COMPONENTS, False, x.device)
    root = run_function("div", 1.0, torch.tensor(float(ord), dtype=torch.float64, device=x.device), form=form)
    return size.pow(ord).sum(dims, keepdim).pow(root)


implements(aten.norm.Scalar)(lambda x, p=2: torch.linalg.vector_norm(x, 2 if p is None else p))


@implements(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm_dim(x: MCTensor, p: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Norms over dimensions."""
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim or None, keepdim, dtype=dtype)


implements(aten.dist.default)(lambda a, b, p=2: torch.linalg.vector_norm(a - b, p))
# Their gradients ask which elements are equal to the result, which float64 must hold for that.
for _operator in (aten.scatter_reduce.two, aten.index_reduce.default, aten.median.default, aten.nanmedian.default):
    implements_beyond_exact_float64(_operator)(
        functools.partial(refuse_operator, _operator, "chooses elements in float64, which does not hold these,")
    )


@implements_beyond_float64(aten.var_mean.correction)
def var_mean(x: MCTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean of squares about the mean, over count - correction, and the mean."""
    dims = normalize_dims(x, dim)
    count = math.prod(x.shape[i] for i in dims)
    mean = x.mean(dims, keepdim=True)
    spread = x - mean
    free = max(count - (1 if correction is None else correction), 0)
    variance = (spread * spread).sum(dims, keepdim) / free
    return variance, mean if keepdim else mean.squeeze(dims)


implements_beyond_float64(aten.var.correction)(lambda x, *given, **options: var_mean(x, *given, **options)[0])


@implements(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, and the mean and the root's inverse that it took."""
    form = result_type((x, weight, bias, running_mean, running_variance))
    x, weight, bias, mean, variance = encode_plain_operands((x, weight, bias, running_mean, running_variance), form)
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
    if running is None:
        return
    result = run_function("addcmul", running, now - running, momentum, form=result_type((running, now)))
    if isinstance(running, MCTensor) or isinstance(result, MCTensor):
        write_value(running, result)
    else:
        running.copy_(result)


def add_rows(into: Any, index: Tensor, values: Any) -> Tensor:
    """Return `into` with values[i] added to its row index[i]; both have their rows first."""
    rows = into.shape[0]
    if not index.numel():
        return into + torch.zeros_like(into)
    goal, sums = _combine_runs(index, values, lambda x, y, mask: x + torch.where(mask, y, torch.zeros_like(y)))
    spare = sums.new_zeros((rows + 1, *sums.shape[1:]))
    return into + spare.index_copy(0, _find_rows_of_run_ends(goal, rows), sums)[:rows]


def _combine_runs(index: Tensor, values: Any, combine: Callable) -> tuple[Tensor, Any]:
    """Return sorted indices, and rows of which the last one of each index holds the combination of all of them.

    Each row takes in the one 1, 2, 4, ... before it while that has the same index.
    """
    order = index.argsort(stable=True)
    goal, found = index[order], values[order]
    step = 1
    while step < index.numel():
        same = goal[step:] == goal[:-step]
        if type(same) is Tensor and not bool(same.any()):
            break
        mask = same.reshape(-1, *[1] * (found.dim() - 1))
        found = torch.cat([found[:step], combine(found[step:], found[:-step], mask)])
        step *= 2
    return goal, found


def _find_rows_of_run_ends(goal: Tensor, rows: int) -> Tensor:
    """Return the target row of each run's last row; the others go to a spare row behind all."""
    last = torch.cat([goal[1:] != goal[:-1], torch.ones_like(goal[:1], dtype=torch.bool)])
    return torch.where(last, goal, rows)


def _make_indices_nonnegative(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).reshape(-1)


@implements_beyond_exact_float64(aten.index_add.default)
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor:
    """x with alpha times the source's slices added at an index along a dimension."""
    if x.dim() == 0:
        return x + source.sum() * alpha
    source = source if alpha == 1 else source * alpha
    return add_rows(
        x.transpose(0, dim), _make_indices_nonnegative(index, x.shape[dim]), source.transpose(0, dim)
    ).transpose(0, dim)


@implements_beyond_exact_float64(aten.scatter_add.default)
def scatter_add(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """x with the source's elements added where the index says along a dimension."""
    at, values = _flatten_scatter(x, dim, index, source)
    return add_rows(x.reshape(-1), at, values).reshape(x.shape)


def _flatten_scatter(x: Any, dim: int, index: Tensor, source: Any) -> tuple[Tensor, Any]:
    """Return indices into the flattened x, and the source's elements for them."""
    if x.dim() == 0:
        return index.reshape(-1), source.reshape(-1)
    source = source[tuple(slice(0, size) for size in index.shape)]
    places = torch.arange(x.numel(), device=index.device, dtype=torch.int64).reshape(x.shape)
    at = places[tuple(slice(0, size if i != dim % x.dim() else None) for i, size in enumerate(index.shape))]
    return at.gather(dim, index).reshape(-1), source.reshape(-1)


@implements_beyond_exact_float64(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Any, indices: Sequence, values: Any, accumulate: bool = False) -> Tensor:
    """Return x with values written, or accumulated, at the indices."""
    if not isinstance(values, Tensor):
        values = torch.scalar_tensor(values, dtype=torch.float64, device=x.device)
    places = torch.arange(x.numel(), device=x.device, dtype=torch.int64).reshape(x.shape)
    at = aten.index.Tensor(places, indices)
    values = values.expand(at.shape).reshape(-1)
    if accumulate:
        return add_rows(x.reshape(-1), at.reshape(-1), values).reshape(x.shape)
    return apply_to_components(aten.index_copy.default, (x.reshape(-1), 0, at.reshape(-1), values), (0, 3)).reshape(
        x.shape
    )
