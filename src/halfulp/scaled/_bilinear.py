"""Rules of products: payloads multiply, scales multiply, and a sum over K terms is brought back by sqrt(K)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import _powers
from ._families import result
from ._form import EIGHT_BITS, first_scaled, logical_of, operand, storage_of, widened
from ._registry import implements
from ._scaled_tensor import ScaledTensor

aten = torch.ops.aten


def root_of_count(count: int) -> float:
    """The power of two below the square root of a number of terms.

    By comparing, not by a logarithm, so that a symbolic size is held to a range and not to a value.
    """
    power = 1
    while count >= 4 * power * power:
        power *= 2
    return float(power)


def product_storage(operands: tuple) -> torch.dtype:
    """Products of eight-bit payloads are stored in float16, as accumulators that are read once."""
    storage = storage_of(operands)
    return torch.float16 if storage in EIGHT_BITS else storage


def matrix_product(operator: OpOverload, a: Any, b: Any, terms: int) -> ScaledTensor:
    """op(pa, pb) / c under the scale sa sb c, with c the power of two below sqrt(terms)."""
    like = first_scaled((a, b))
    x, y = operand(a, like), operand(b, like)
    spread = root_of_count(terms)
    scale, rest = _powers.product(x._scale, y._scale, spread)
    left, right = widened(x), widened(y)
    values = operator(left, right) * (1.0 / spread)
    return result(values, scale, rest, product_storage((a, b)), logical_of((a, b)))


def _product_of(operator: OpOverload) -> None:
    def product(a: Any, b: Any) -> ScaledTensor:
        return matrix_product(operator, a, b, a.shape[-1])

    implements(operator, family="bilinear")(product)


for _operator in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default):
    _product_of(_operator)


@implements(aten.mul.Tensor, aten.mul.Scalar, family="bilinear")
def mul(a: Any, b: Any) -> ScaledTensor:
    """pa pb under the scale sa sb."""
    like = first_scaled((a, b))
    x, y = operand(a, like), operand(b, like)
    scale, rest = _powers.product(x._scale, y._scale)
    return result(widened(x) * widened(y), scale, rest, storage_of((a, b)), logical_of((a, b)))


@implements(aten.addmm.default, family="bilinear")
def addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """bias + a b."""
    total = torch.mm(a, b)
    total = total if alpha == 1 else total * alpha
    return total + (bias if beta == 1 else bias * beta)
