"""The rule of a product and a sum in one, which torch defines as its compiler is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._operands import keep_nonzero, make_scaled_to_fit, operand, to_float32
from ..._registry import LATER_RULES
from ..._scaled_tensor import ScaledTensor
from ..elementwise._aligned import add
from ._bilinear import is_symbolic, mul


def fma(a: Any, b: Any, c: Any) -> Tensor:
    """a b + c in c's storage: what dynamo makes of c.addcmul_(x, y, value=b), with a = x y, and of c.addcdiv_."""
    total: Any = add(c, mul(a, b)) if isinstance(b, Tensor) else add(c, a, alpha=b)
    if not isinstance(c, ScaledTensor):
        return total
    held = make_scaled_to_fit(to_float32(total), total._scale, c._payload.dtype, total.dtype)
    if isinstance(b, Tensor) or is_symbolic(b) or not b > 0:
        return held
    # A second moment, as in `addcmul`.
    product, before = to_float32(operand(a, c)), to_float32(c)
    return keep_nonzero(held, torch.where((before >= 0) & (product >= 0), torch.maximum(product, before), 0.0))


LATER_RULES["prims::fma"] = fma
