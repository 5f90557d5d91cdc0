"""Operators that torch gives a number in the components' dtype: the same steps, with the float64 that was written.

Each takes an operator's arguments above autograd, and gives NotImplemented where torch's own steps keep the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...kernels import torch_operators
from .._mctensor import MCTensor
from .._plain_operands import encode_plain_operands, has_plain
from .._result_type import result_type

aten = torch_operators("aten")


def _with_components(steps: Callable) -> Callable:
    """Return steps that encode plain tensors first where an operand is an MCTensor, else give NotImplemented."""

    def own(*arguments: Any, **options: Any) -> Any:
        leaves = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
        if not any(isinstance(x, MCTensor) for x in leaves):
            return NotImplemented
        if has_plain(arguments, options):
            arguments, options = encode_plain_operands((arguments, options), result_type(leaves), with_gradients=True)
        return steps(*arguments, **options)

    return own


def _number_beside(value: Any, x: Any) -> Any:
    """Return a number as a tensor without dimensions that leaves x's dtype."""
    if not isinstance(x, MCTensor) or isinstance(value, complex):
        return NotImplemented
    if x.dim():
        return torch.scalar_tensor(value, dtype=torch.float64, device=x.device)
    return MCTensor.encode(value, len(x._parts), x.dtype, device=x.device)


def where_other(condition: Tensor, x: Any, other: Any) -> Any:
    """x, or a number."""
    number = _number_beside(other, x)
    return number if number is NotImplemented else torch.where(condition, x, number)


def where_self(condition: Tensor, number: Any, x: Any) -> Any:
    """A number, or x."""
    made = _number_beside(number, x)
    return made if made is NotImplemented else torch.where(condition, made, x)


def _quantile(operator: Any) -> Callable:
    def quantile(x: Any, q: float, dim: int | None = None, keepdim: bool = False, **options: Any) -> Any:
        if not isinstance(x, MCTensor):
            return NotImplemented
        at = MCTensor.encode(q, max(2, len(x._parts)), x.dtype, device=x.device)
        return operator(x, at, dim, keepdim, **options)

    return quantile


def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """x / sqrt(mean(x^2) + eps), times a weight."""
    if eps is None or list(x.shape[x.dim() - len(shape) :]) != list(shape):
        return NotImplemented
    mean = x.square().mean(list(range(-len(shape), 0)), keepdim=True)
    y = x * torch.rsqrt(mean + eps)
    return y if weight is None else y * weight


def cosine_similarity(a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The sum of a / max(|a|, eps) times b / max(|b|, eps), with the gradients that torch gives it."""
    a, b = torch.broadcast_tensors(a, b)
    return (_normalized(a, dim, eps) * _normalized(b, dim, eps)).sum(dim)


def _normalized(x: Tensor, dim: int, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(x, 2, dim, True).clone()
    with torch.no_grad():
        size.clamp_min_(eps)
    return x / size


OWN = {
    aten.where.ScalarOther: where_other,
    aten.where.ScalarSelf: where_self,
    aten.quantile.scalar: _quantile(aten.quantile.default),
    aten.nanquantile.scalar: _quantile(aten.nanquantile.default),
    aten.rms_norm.default: _with_components(rms_norm),
    aten.cosine_similarity.default: _with_components(cosine_similarity),
}
