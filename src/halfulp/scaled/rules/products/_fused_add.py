"""The rule of a product and a sum in one, which torch defines as its compiler is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._operands import made_to_fit, never_vanished, operand, widened
from ..._registry import LATER_RULES
from ..._scaled_tensor import ScaledTensor
from ..elementwise._aligned import add
from ._bilinear import is_symbolic, mul


def fma(a: Any, b: Any, c: Any) -> Tensor:
    """a b + c in c's storage: what dynamo makes of c.addcmul_(x, y, value=b), with a = x y, and of c.addcdiv_."""
    total = add(c, mul(a, b)) if isinstance(b, Tensor) else add(c, a, alpha=b)
    if not isinstance(c, ScaledTensor):
        return total
    held = made_to_fit(widened(total), total._scale, c._payload.dtype, total.dtype)
    if isinstance(b, Tensor) or is_symbolic(b) or not b > 0:
        return held
    # A second moment, as in `addcmul`.
    product, before = widened(operand(a, c)), widened(c)
    return never_vanished(held, torch.where((before >= 0) & (product >= 0), torch.maximum(product, before), 0.0))


LATER_RULES["prims::fma"] = fma
