"""Rule of the gradient of weight normalisation, w = g v / |v|."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._operands import first_scaled, logical_of, operand, storage_of, to_float32
from ..._registry import implements
from .._results import make_result, power_of_scale

aten = torch_operators("aten")


@implements(aten._weight_norm_interface_backward.default, family="norm")
def weight_norm_backward(gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Tensor, Tensor]:
    """To v: g / |v| (gradient - v <gradient, v> / |v|^2); to g: <gradient, v> / |v|."""
    given = (gradient, v, g, norms)
    like = first_scaled(given)
    to_w, x, size, length = (operand(y, like) for y in given)
    # The norms are brought under v's scale, so that v / |v| needs none.
    n = _powers.times(to_float32(length), _powers.ratio(length._scale, x._scale))
    dims = [i for i in range(v.dim()) if i != dim % v.dim()]
    unit = to_float32(x) / n
    along = (to_float32(to_w) * unit).sum(dims, keepdim=True)
    to_v = to_float32(size) / n * (to_float32(to_w) - unit * along)
    storage, dtype = storage_of(given), logical_of(given)
    inverse, _ = power_of_scale(x._scale, -1)
    scale, rest = _powers.product(to_w._scale, size._scale, inverse)
    return make_result(to_v, scale, rest, storage, dtype), make_result(along, to_w._scale.clone(), 1.0, storage, dtype)
