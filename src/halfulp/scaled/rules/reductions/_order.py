"""Rules of sorting, searching, counting and rounding: what depends on the order of values."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._operands import make_scaled
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import scale_one, value_of
from .._vocabulary import decoded, homogeneous, measured_scale, overloads

aten = torch_operators("aten")

homogeneous(
    *overloads(aten.sort, aten.topk, aten._unique2, aten._unique, aten.unique_dim, aten.unique_consecutive),
    *overloads(aten.unique_dim_consecutive),
    family="pass-through",
)
decoded(*overloads(aten.argsort, aten.searchsorted, aten.bucketize), family="comparison")
measured_scale(
    *overloads(aten.histc, aten.histogram, aten._histogramdd_bin_edges, aten._histogramdd_from_bin_cts),
    *overloads(aten._histogramdd_from_bin_tensors, aten.bincount),
    aten.round.decimals,
    family="order",
)


def _rounded(operator: torch._ops.OpOverload) -> None:
    def rounded(x: ScaledTensor) -> Tensor:
        values = operator(value_of(x))
        scale = _powers.maximum_scale(x._scale, scale_one(values))
        return make_scaled(
            _powers.times(values, _powers.ratio(scale_one(values), scale)), scale, x._payload.dtype, x.dtype
        )

    implements(operator, family="order")(rounded)


# Whole numbers are 0 or at least 1, so the scale is at least 1 too.
for _operator in (aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default):
    _rounded(_operator)
