"""Rules of sums and means: a sum of n terms is brought back by sqrt(n)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _powers
from ._bilinear import root_of_count
from ._families import result
from ._form import widened
from ._registry import implements
from ._scaled_tensor import ScaledTensor

aten = torch.ops.aten


def terms_of(x: Tensor, dims: Sequence[int] | int | None) -> int:
    """How many elements one result is the sum of."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return x.numel()
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod(x.shape[dim] for dim in dims) if x.dim() else 1


@implements(aten.sum.default, family="reduction")
def sum_all(x: ScaledTensor, *, dtype: Any = None) -> Tensor:
    """The sum of all elements."""
    return sum_over(x, None, dtype=dtype)


@implements(aten.sum.dim_IntList, family="reduction")
def sum_over(x: ScaledTensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """sum(p) / c under the scale s c, with c the power of two below the root of the number of terms."""
    spread = root_of_count(terms_of(x, dims))
    scale, rest = _powers.product(x._scale, spread)
    values = aten.sum.dim_IntList(widened(x), dims, keepdim) * (1.0 / spread)
    return result(values, scale, rest, x._payload.dtype, dtype or x.dtype)


@implements(aten.mean.default, family="reduction")
def mean_all(x: ScaledTensor, *, dtype: Any = None) -> Tensor:
    """The mean of all elements."""
    return mean_over(x, None, dtype=dtype)


@implements(aten.mean.dim, family="reduction")
def mean_over(x: ScaledTensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """mean(p) under the scale s."""
    dims = list(range(x.dim())) if dims is None else dims
    values = aten.mean.dim(widened(x), dims, keepdim)
    return result(values, x._scale.clone(), 1.0, x._payload.dtype, dtype or x.dtype)
