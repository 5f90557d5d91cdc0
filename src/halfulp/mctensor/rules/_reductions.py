"""Sums, products, norms and moments over dimensions, and sums at indices that may repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import arithmetic
from ...arithmetic import MOST, PRECISION, Parts, exact_partial, exact_round
from ...kernels import torch_operators
from ...subclass._in_backward import COMPONENTS, gives_plain_gradient
from .._derivation import choose_float64_or_rule, implements_beyond_exact_float64, implements_beyond_float64
from .._mctensor import MCTensor, implements
from .._result_type import (
    ResultType,
    choose_working_type,
    count_float64_components,
    make_result,
    result_type,
    run_function,
    to_components,
)
from ._memory import apply_to_components

aten = torch_operators("aten")


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


@implements_beyond_float64(aten.cumprod.default)
def cumprod(x: MCTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Running products, in log2(length) steps: each multiplies by what lies twice as far back."""
    products: Tensor = x if dtype is None else x.to(dtype)
    step, count = 1, x.shape[dim] if x.dim() else 1
    while step < count:
        later = products.narrow(dim, step, count - step) * products.narrow(dim, 0, count - step)
        products = torch.cat([products.narrow(dim, 0, step), later], dim)
        step *= 2
    return products.clone() if step == 1 else products


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
implements_beyond_float64(aten.std.correction)(lambda x, *given, **options: var_mean(x, *given, **options)[0].sqrt())


@implements_beyond_float64(aten.std_mean.correction)
def std_mean(x: MCTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the standard deviation and the mean."""
    variance, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


@implements_beyond_float64(aten.logsumexp.default)
def logsumexp(x: MCTensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))), from the largest."""
    dims = normalize_dims(x, dim)
    largest = x.amax(dims, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    result = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return result if keepdim else result.squeeze(dims)


implements(aten.trace.default)(lambda x: torch.diagonal(x).sum())
implements(aten.dist.default)(lambda a, b, p=2: torch.linalg.vector_norm(a - b, p))

halfulp_operators = torch_operators("halfulp")


@implements(halfulp_operators.exact_sum.default)
def exact_sum(x: Any, dim: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Return the sum of all components."""
    return _round_accumulators(exact_partial_sum(x, None, dim), x.shape, dim, keepdim, result_type((x,), dtype))


@implements(halfulp_operators.exact_dot.default)
def exact_dot(a: Any, b: Any, dim: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Return the sum of all products of components."""
    return _round_accumulators(exact_partial_sum(a, b, dim), a.shape, dim, keepdim, result_type((a, b), dtype))


@implements(halfulp_operators.exact_partial.default)
def exact_partial_sum(a: Any, b: Any, dim: list[int]) -> Tensor:
    """Return the accumulator's integers."""
    device = result_type((a, b)).device
    left = to_components(a, device)
    right: list = [None] if b is None else list(to_components(b, device))
    words = [exact_partial(x, y, dim) for x in left for y in right]
    # A NaN or an infinity is one in the first components; in the others it would count a second time.
    return torch.stack(words).sum(0)


def _round_accumulators(words: Tensor, shape: torch.Size, dim: list[int], keepdim: bool, form: ResultType) -> Tensor:
    count, dtype = choose_working_type(form)
    parts: list[Tensor] = []
    for _ in range(count):
        part = exact_round(words, dtype)
        parts.append(torch.where(parts[0].isfinite(), part, 0.0) if parts else part)
        words = words + exact_partial(-part.unsqueeze(-1), dim=-1)
    kept: Parts = tuple(parts)
    if keepdim:
        kept = tuple(part.reshape([1 if d in dim else size for d, size in enumerate(shape)]) for part in kept)
    return make_result(kept, form)


def add_rows(into: Any, index: Tensor, values: Any) -> Tensor:
    """Return `into` with values[i] added to its row index[i]; both have their rows first."""
    rows = into.shape[0]
    if not index.numel():
        return into + torch.zeros_like(into)
    goal, sums = _combine_runs(index, values, lambda x, y, mask: x + torch.where(mask, y, torch.zeros_like(y)))
    spare = sums.new_zeros((rows + 1, *sums.shape[1:]))
    return into + spare.index_copy(0, _find_rows_of_run_ends(goal, rows), sums)[:rows]


def combine_rows(into: Any, index: Tensor, values: Any, combine: Callable, include_self: bool) -> Tensor:
    """Return `into` with values[i] combined into row index[i], without what that held unless include_self."""
    rows = into.shape[0]
    if not index.numel():
        return into.clone()
    goal, found = _combine_runs(index, values, lambda x, y, mask: torch.where(mask, combine(x, y), x))
    spare = torch.cat([into, into[:1]])
    found = spare.index_copy(0, _find_rows_of_run_ends(goal, rows), found)[:rows]
    if not include_self:
        return found
    met = torch.zeros(rows, dtype=torch.bool, device=index.device).index_fill(0, index, True)
    return torch.where(met.reshape(-1, *[1] * (into.dim() - 1)), combine(into, found), into)


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


_COMBINING_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "amax": torch.maximum,
    "amin": torch.minimum,
}


@implements_beyond_exact_float64(aten.scatter_reduce.two)
def scatter_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Sums, means, products and extremes where the index says along a dimension."""
    if reduce not in _COMBINING_FUNCTIONS:
        raise ValueError(f"reduce={reduce!r}: allowed are {', '.join(_COMBINING_FUNCTIONS)}")
    at, values = _flatten_scatter(x, dim, index, source)
    total = combine_rows(x.reshape(-1), at, values, _COMBINING_FUNCTIONS[reduce], include_self)
    if reduce == "mean":
        count = torch.full((x.numel(),), float(include_self), dtype=torch.float64, device=index.device)
        total = total / count.index_add(0, at, torch.ones_like(at, dtype=torch.float64)).clamp(min=1)
    return total.reshape(x.shape)


@implements_beyond_exact_float64(aten.index_reduce.default)
def index_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Combine the source's slices into x at an index along a dimension."""
    if x.dim() == 0:
        return scatter_reduce(x, 0, index.reshape(source.shape), source, reduce, include_self=include_self)
    shape = [-1 if i == dim % x.dim() else 1 for i in range(x.dim())]
    return scatter_reduce(x, dim, index.reshape(shape).expand(source.shape), source, reduce, include_self=include_self)


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


@implements_beyond_exact_float64(aten.put.default)
def put(x: Any, index: Tensor, source: Any, accumulate: bool = False) -> Tensor:
    """x with a source written, or added, at flat indices."""
    flat = _make_indices_nonnegative(index, x.numel())
    return index_put(x.reshape(-1), (flat,), source.reshape(-1), accumulate).reshape(x.shape)


@implements_beyond_float64(aten.embedding_dense_backward.default)
def embedding_dense_backward(gradient: Any, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """Return the gradient's rows added where they were looked up."""
    index, rows = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(1), 0)
    if by_frequency:
        rows = rows / torch.bincount(index, minlength=count)[index].double().unsqueeze(1)
    return add_rows(rows.new_zeros((count, rows.shape[1])), index, rows)


@implements_beyond_exact_float64(aten.unfold_backward.default)
def unfold_backward(gradient: Any, sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    """Return the windows' gradients added where they came from."""
    places = torch.arange(math.prod(sizes), dtype=torch.int64, device=gradient.device)
    places = places.reshape(list(sizes)).unfold(dim, size, step)
    blank = gradient.new_zeros((math.prod(sizes),))
    return add_rows(blank, places.reshape(-1), gradient.reshape(-1)).reshape(list(sizes))
