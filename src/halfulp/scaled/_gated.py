"""Rules of activations and their gradients: a gate is computed on values, the scale of what it gates stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._families import result
from ._form import first_scaled, logical_of, operand, storage_of, widened
from ._registry import implements

aten = torch.ops.aten


@implements(aten.threshold_backward.default, family="gated")
def threshold_backward(gradient: Any, x: Any, threshold: Any) -> Tensor:
    """The gradient where x is above the threshold."""
    like = first_scaled((gradient, x))
    g, x = operand(gradient, like), operand(x, like)
    if threshold != 0:
        raise NotImplementedError("threshold_backward with another threshold than 0")
    values = aten.threshold_backward.default(widened(g), widened(x), 0)
    return result(
        values, g._scale.clone(), 1.0, storage_of((gradient,)) if g is gradient else storage_of((x,)), g.dtype
    )
