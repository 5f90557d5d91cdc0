"""Sorting, extremes and medians along a dimension, by value: stable sorts by one component after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import torch_operators
from .._mctensor import MCTensor, implements
from ._comparison import map_components

aten = torch_operators("aten")


def permutation(x: MCTensor, dim: int, descending: bool) -> Tensor:
    """Return the stable order of values: sorted by the last component first, and by the first one at last."""
    order: Any = None
    for part in reversed(x._parts):
        seen = part if order is None else part.gather(dim, order)
        step = torch.sort(seen, dim=dim, descending=descending, stable=True).indices
        order = step if order is None else order.gather(dim, step)
    return order


def _gather(x: MCTensor, dim: int, order: Tensor) -> Tensor:
    return map_components(x, lambda part: part.gather(dim, order))


@implements(aten.sort.default, aten.sort.stable)
def sort(x: MCTensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return values in order, and where they were."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    names = ("dim", "descending") if not options.keys() & {"stable"} and len(arguments) < 3 else ("stable", "dim")
    given = {"dim": -1, "descending": False} | dict(zip(names, arguments)) | options
    order = permutation(x, given["dim"], given["descending"])
    return _gather(x, given["dim"], order), order


@implements(aten.argsort.stable)
def argsort(x: MCTensor, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Tensor:
    """Return the indices that sort the values."""
    return sort(x, dim=dim, descending=descending)[1]


@implements(aten.topk.default)
def topk(x: MCTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest or smallest, in order."""
    values, order = sort(x, dim=dim, descending=largest)
    if x.dim() == 0:
        return values, order
    if not 0 <= k <= x.shape[dim]:
        raise RuntimeError(f"topk with k={k} of {x.shape[dim]} elements")
    return values.narrow(dim, 0, k).clone(), order.narrow(dim, 0, k)


@implements(aten.kthvalue.default)
def kthvalue(x: MCTensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k-th smallest."""
    return _kth_in_order(x, dim, keepdim, lambda order: order.narrow(dim, k - 1, 1))


@implements(aten.median.dim)
def median_dim(x: MCTensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower of the middle values; NaN if any is."""
    count = x.shape[dim] if x.dim() else 1
    missing = x._parts[0].isnan().sum(dim, keepdim=True) > 0

    def middle(order: Tensor) -> Tensor:
        return torch.where(missing, order.narrow(dim, count - 1, 1), order.narrow(dim, (count - 1) // 2, 1))

    return _kth_in_order(x, dim, keepdim, middle)


@implements(aten.median.default)
def median(x: MCTensor) -> Tensor:
    """Return the lower of the middle values of all."""
    flat: Any = x.reshape(-1)
    return median_dim(flat, 0)[0]


@implements(aten.nanmedian.dim)
def nanmedian_dim(x: MCTensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower median of the values that are no NaN; NaN, which sorts last, where all are."""
    numbers = (~x._parts[0].isnan()).sum(dim, keepdim=True)
    return _kth_in_order(x, dim, keepdim, lambda order: order.gather(dim, ((numbers - 1) // 2).clamp(min=0)))


@implements(aten.nanmedian.default)
def nanmedian(x: MCTensor) -> Tensor:
    """Return the lower of the middle values of all that are numbers."""
    flat: Any = x.reshape(-1)
    return nanmedian_dim(flat, 0)[0]


def _kth_in_order(x: MCTensor, dim: int, keepdim: bool, pick: Any) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    at = pick(permutation(x, dim, False))
    values = _gather(x, dim, at)
    return (values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim))


def _first_extreme(x: MCTensor, dim: int, sign: int) -> Tensor:
    """Return the first index of the extreme along a dimension, keepdim=True; NaN is more extreme than any number."""
    candidates: Any = None
    for part in x._parts:
        part = part if sign > 0 else torch.where(part.isnan(), part, -part)
        seen = part if candidates is None else part.masked_fill(~candidates, -torch.inf)
        top = seen.amax(dim, keepdim=True)
        here = (seen == top) | seen.isnan()
        candidates = here if candidates is None else candidates & here
    return candidates.to(torch.uint8).argmax(dim, keepdim=True)


def _extreme_along(x: MCTensor, dim: int, keepdim: bool, sign: int) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    if not x.shape[dim]:
        raise IndexError(f"no largest or smallest of no elements along dimension {dim} of {tuple(x.shape)}")
    at = _first_extreme(x, dim, sign)
    values = _gather(x, dim, at)
    return (values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim))


@implements(aten.max.dim)
def max_dim(x: MCTensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest values along a dimension, and where."""
    return _extreme_along(x, dim, keepdim, 1)


@implements(aten.min.dim)
def min_dim(x: MCTensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest values along a dimension, and where."""
    return _extreme_along(x, dim, keepdim, -1)


@implements(aten.max.default)
def max_all(x: MCTensor) -> Tensor:
    """Return the largest value."""
    return _extreme_along(_nonempty(x), 0, False, 1)[0]


@implements(aten.min.default)
def min_all(x: MCTensor) -> Tensor:
    """Return the smallest value."""
    return _extreme_along(_nonempty(x), 0, False, -1)[0]


def _nonempty(x: MCTensor) -> Any:
    if not x.numel():
        raise RuntimeError("no largest or smallest of no elements: give a dimension that has some")
    return x.reshape(-1)


@implements(aten.argmax.default)
def argmax(x: MCTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the largest value."""
    return _index_of_extreme(x, dim, keepdim, 1)


@implements(aten.argmin.default)
def argmin(x: MCTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the smallest value."""
    return _index_of_extreme(x, dim, keepdim, -1)


def _index_of_extreme(x: MCTensor, dim: int | None, keepdim: bool, sign: int) -> Tensor:
    if dim is None:
        at = _extreme_along(_nonempty(x), 0, False, sign)[1]
        return at.reshape([1] * x.dim()) if keepdim else at
    return _extreme_along(x, dim, keepdim, sign)[1]


@implements(aten.amax.default)
def amax(x: MCTensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """Return the largest values over several dimensions."""
    return _extreme_over(x, dim, keepdim, 1)


@implements(aten.amin.default)
def amin(x: MCTensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """Return the smallest values over several dimensions."""
    return _extreme_over(x, dim, keepdim, -1)


@implements(aten.aminmax.default)
def aminmax(x: MCTensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum."""
    dims = () if dim is None else (dim,)
    return _extreme_over(x, dims, keepdim, -1), _extreme_over(x, dims, keepdim, 1)


def _extreme_over(x: MCTensor, dims: Any, keepdim: bool, sign: int) -> Tensor:
    dims = [dims] if isinstance(dims, int) else list(dims)
    wanted = sorted({dim % max(x.dim(), 1) for dim in dims} or range(x.dim()))
    if not x.dim():
        return x.clone()
    values: Any = x
    for dim in wanted:
        values = _extreme_along(values, dim, True, sign)[0]
    return values if keepdim else values.squeeze(wanted)


def _running(x: MCTensor, dim: int, sign: int) -> tuple[Tensor, Tensor]:
    """Return the running extreme, in log2(length) steps: each looks twice as far back."""
    at = torch.arange(x.shape[dim] if x.dim() else 1, device=x.device, dtype=torch.int64)
    shape = [1] * x.dim()
    if not x.dim():
        return x.clone(), at[0]
    shape[dim] = -1
    at = at.reshape(shape).expand(x.shape).contiguous()
    step, count = 1, x.shape[dim]
    while step < count:
        before, here = at.narrow(dim, 0, count - step), at.narrow(dim, step, count - step)
        pair = _stack_pair(x, dim, before, here)
        keep = torch.where(_first_extreme(pair, 0, sign)[0] == 0, before, here)
        later = _later_of_equal(pair, before, here, keep)
        at = torch.cat([at.narrow(dim, 0, step), later], dim)
        step *= 2
    return _gather(x, dim, at), at


def _stack_pair(x: MCTensor, dim: int, before: Tensor, here: Tensor) -> Any:
    return torch.stack([_gather(x, dim, before), _gather(x, dim, here)])


def _later_of_equal(pair: MCTensor, before: Tensor, here: Tensor, keep: Tensor) -> Tensor:
    """torch gives the last of equal values."""
    return torch.where(pair[0] == pair[1], here, keep)


@implements(aten.cummax.default)
def cummax(x: MCTensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the largest value so far, and where."""
    return _running(x, dim, 1)


@implements(aten.cummin.default)
def cummin(x: MCTensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the smallest value so far, and where."""
    return _running(x, dim, -1)
