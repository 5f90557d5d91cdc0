"""Adding and reducing at indices that may repeat: a segmented scan over sorted indices, in log2(count) steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ..._derivation import beyond_exact_float64, beyond_float64
from ..memory._data_movement import apply_to_components

aten = torch_operators("aten")


def add_rows(into: Any, index: Tensor, values: Any) -> Tensor:
    """Return `into` with values[i] added to its row index[i]; both have their rows first."""
    rows = into.shape[0]
    if not index.numel():
        return into + torch.zeros_like(into)
    goal, sums = _combine_runs(index, values, _plus_masked)
    spare = sums.new_zeros((rows + 1, *sums.shape[1:]))
    return into + spare.index_copy(0, _rows_of_run_ends(goal, rows), sums)[:rows]


def combine_rows(into: Any, index: Tensor, values: Any, combine: Callable, include_self: bool) -> Tensor:
    """Return `into` with values[i] combined into row index[i], without what that held unless include_self."""
    rows = into.shape[0]
    if not index.numel():
        return into.clone()
    goal, found = _combine_runs(index, values, lambda x, y, mask: torch.where(mask, combine(x, y), x))
    spare = torch.cat([into, into[:1]])
    found = spare.index_copy(0, _rows_of_run_ends(goal, rows), found)[:rows]
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


def _plus_masked(x: Any, y: Any, mask: Tensor) -> Tensor:
    return x + torch.where(mask, y, torch.zeros_like(y))


def _rows_of_run_ends(goal: Tensor, rows: int) -> Tensor:
    """Return the target row of each run's last row; the others go to a spare row behind all."""
    last = torch.cat([goal[1:] != goal[:-1], torch.ones_like(goal[:1], dtype=torch.bool)])
    return torch.where(last, goal, rows)


def _nonnegative(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).reshape(-1)


@beyond_exact_float64(aten.index_add.default)
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor:
    """x with alpha times the source's slices added at an index along a dimension."""
    if x.dim() == 0:
        return x + source.sum() * alpha
    source = source if alpha == 1 else source * alpha
    return add_rows(x.transpose(0, dim), _nonnegative(index, x.shape[dim]), source.transpose(0, dim)).transpose(0, dim)


@beyond_exact_float64(aten.scatter_add.default)
def scatter_add(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """x with the source's elements added where the index says along a dimension."""
    at, values = _scattered(x, dim, index, source)
    return add_rows(x.reshape(-1), at, values).reshape(x.shape)


def _scattered(x: Any, dim: int, index: Tensor, source: Any) -> tuple[Tensor, Any]:
    """Return indices into the flattened x, and the source's elements for them."""
    if x.dim() == 0:
        return index.reshape(-1), source.reshape(-1)
    source = source[tuple(slice(0, size) for size in index.shape)]
    places = torch.arange(x.numel(), device=index.device, dtype=torch.int64).reshape(x.shape)
    at = places[tuple(slice(0, size if i != dim % x.dim() else None) for i, size in enumerate(index.shape))]
    return at.gather(dim, index).reshape(-1), source.reshape(-1)


_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "amax": torch.maximum,
    "amin": torch.minimum,
}


@beyond_exact_float64(aten.scatter_reduce.two)
def scatter_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Sums, means, products and extremes where the index says along a dimension."""
    if reduce not in _COMBINE:
        raise ValueError(f"reduce={reduce!r}: allowed are {', '.join(_COMBINE)}")
    at, values = _scattered(x, dim, index, source)
    total = combine_rows(x.reshape(-1), at, values, _COMBINE[reduce], include_self)
    if reduce == "mean":
        count = torch.full((x.numel(),), float(include_self), dtype=torch.float64, device=index.device)
        total = total / count.index_add(0, at, torch.ones_like(at, dtype=torch.float64)).clamp(min=1)
    return total.reshape(x.shape)


@beyond_exact_float64(aten.index_reduce.default)
def index_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Combine the source's slices into x at an index along a dimension."""
    if x.dim() == 0:
        return scatter_reduce(x, 0, index.reshape(source.shape), source, reduce, include_self=include_self)
    shape = [-1 if i == dim % x.dim() else 1 for i in range(x.dim())]
    return scatter_reduce(x, dim, index.reshape(shape).expand(source.shape), source, reduce, include_self=include_self)


@beyond_exact_float64(aten.index_put.default, aten._unsafe_index_put.default)
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


@beyond_exact_float64(aten.put.default)
def put(x: Any, index: Tensor, source: Any, accumulate: bool = False) -> Tensor:
    """x with a source written, or added, at flat indices."""
    flat = _nonnegative(index, x.numel())
    return index_put(x.reshape(-1), (flat,), source.reshape(-1), accumulate).reshape(x.shape)


@beyond_float64(aten.embedding_dense_backward.default)
def embedding_dense_backward(gradient: Any, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """The gradient's rows added where they were looked up."""
    index, rows = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(1), 0)
    if by_frequency:
        rows = rows / torch.bincount(index, minlength=count)[index].double().unsqueeze(1)
    return add_rows(rows.new_zeros((count, rows.shape[1])), index, rows)


@beyond_exact_float64(aten.unfold_backward.default)
def unfold_backward(gradient: Any, sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    """The windows' gradients added where they came from."""
    places = torch.arange(math.prod(sizes), dtype=torch.int64, device=gradient.device)
    places = places.reshape(list(sizes)).unfold(dim, size, step)
    blank = gradient.new_zeros((math.prod(sizes),))
    return add_rows(blank, places.reshape(-1), gradient.reshape(-1)).reshape(list(sizes))
