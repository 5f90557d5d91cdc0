"""Adding at indices that may repeat: sums by sorted runs, in log2(count) steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import torch_operators
from ._derivation import beyond_exact, beyond_float64
from ._moves import moved

aten = torch_operators("aten")


def added_at(into: Any, index: Tensor, values: Any) -> Tensor:
    """into with values[i] added to its row index[i]; both have their rows first.

    Rows are sorted by where they go; then each adds the one 1, 2, 4, ... before it while that goes to the same place,
    so that the last of every run holds the run's sum.
    """
    count, rows = index.numel(), into.shape[0]
    if not count:
        return into + torch.zeros_like(into)
    order = index.argsort(stable=True)
    goal, sums = index[order], values[order]
    step = 1
    while step < count:
        same = goal[step:] == goal[:-step]
        if type(same) is Tensor and not bool(same.any()):
            break
        mask = same.reshape(-1, *[1] * (sums.dim() - 1))
        earlier = torch.where(mask, sums[:-step], torch.zeros_like(sums[:-step]))
        sums = torch.cat([sums[:step], sums[step:] + earlier])
        step *= 2
    last = torch.cat([goal[1:] != goal[:-1], torch.ones_like(goal[:1], dtype=torch.bool)])
    spare = sums.new_zeros((rows + 1, *sums.shape[1:]))
    gathered = spare.index_copy(0, torch.where(last, goal, rows), sums)[:rows]
    return into + gathered


def _wrapped(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).reshape(-1)


@beyond_exact(aten.index_add.default)
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor:
    """x with alpha times the source's slices added at an index along a dimension."""
    if x.dim() == 0:
        return x + source.sum() * alpha
    source = source if alpha == 1 else source * alpha
    return added_at(x.transpose(0, dim), _wrapped(index, x.shape[dim]), source.transpose(0, dim)).transpose(0, dim)


@beyond_exact(aten.scatter_add.default)
def scatter_add(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """x with the source's elements added where the index says along a dimension."""
    if x.dim() == 0:
        return x + source
    source = source[tuple(slice(0, size) for size in index.shape)]
    places = torch.arange(x.numel(), device=index.device, dtype=torch.int64).reshape(x.shape)
    at = places[tuple(slice(0, size if i != dim % x.dim() else None) for i, size in enumerate(index.shape))]
    return added_at(x.reshape(-1), at.gather(dim, index).reshape(-1), source.reshape(-1)).reshape(x.shape)


@beyond_exact(aten.scatter_reduce.two)
def scatter_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Sums and means; the others are refused."""
    if reduce not in ("sum", "mean") or not include_self:
        raise NotImplementedError(f"scatter_reduce {reduce!r} of such components: 'sum' and 'mean' with include_self")
    total = scatter_add(x, dim, index, source)
    if reduce == "sum":
        return total
    count = torch.ones(x.shape, dtype=torch.float64, device=index.device)
    return total / count.scatter_add(dim, index, torch.ones(index.shape, dtype=torch.float64, device=index.device))


@beyond_exact(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Any, indices: Sequence, values: Any, accumulate: bool = False) -> Tensor:
    """x with values written, or added, where the indices say."""
    if not isinstance(values, Tensor):
        values = torch.scalar_tensor(values, dtype=torch.float64, device=x.device)
    places = torch.arange(x.numel(), device=x.device, dtype=torch.int64).reshape(x.shape)
    at = aten.index.Tensor(places, indices)
    values = values.expand(at.shape).reshape(-1)
    if accumulate:
        return added_at(x.reshape(-1), at.reshape(-1), values).reshape(x.shape)
    return moved(aten.index_copy.default, (x.reshape(-1), 0, at.reshape(-1), values), (0, 3)).reshape(x.shape)


@beyond_exact(aten.put.default)
def put(x: Any, index: Tensor, source: Any, accumulate: bool = False) -> Tensor:
    """x with a source written, or added, at flat indices."""
    flat = _wrapped(index, x.numel())
    return index_put(x.reshape(-1), (flat,), source.reshape(-1), accumulate).reshape(x.shape)


@beyond_float64(aten.embedding_dense_backward.default)
def embedding_dense_backward(gradient: Any, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """The gradient's rows added where they were looked up."""
    index, rows = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(1), 0)
    if by_frequency:
        rows = rows / torch.bincount(index, minlength=count)[index].double().unsqueeze(1)
    return added_at(rows.new_zeros((count, rows.shape[1])), index, rows)


@beyond_exact(aten.unfold_backward.default)
def unfold_backward(gradient: Any, sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    """The windows' gradients added where they came from."""
    places = torch.arange(math.prod(sizes), dtype=torch.int64, device=gradient.device)
    places = places.reshape(list(sizes)).unfold(dim, size, step)
    blank = gradient.new_zeros((math.prod(sizes),))
    return added_at(blank, places.reshape(-1), gradient.reshape(-1)).reshape(list(sizes))
