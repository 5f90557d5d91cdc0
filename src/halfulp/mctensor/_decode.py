"""The operator halfulp::decode behind MCTensor.decode, with its derivative; compilers keep it in their graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import define_operator, untraced
from ..subclass._in_backward import COMPONENTS
from ._mctensor import MCTensor, decoded
from ._registry import implements

decode = define_operator(
    "decode(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: x.to(dtype, copy=True),
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
)


@implements(decode)
def decode_components(x: MCTensor, dtype: torch.dtype) -> Tensor:
    """Return the value as a plain tensor of a dtype, rounded once."""
    return decoded(x, dtype)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x = inputs[0]
    ctx.kind = x.dtype
    ctx.count = len(x._parts) if isinstance(x, MCTensor) and x._gradients == COMPONENTS else 0


@untraced
def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    if not context.count or isinstance(gradient, MCTensor):
        return gradient.to(context.kind), None
    return MCTensor.encode(gradient, context.count, context.kind, gradients=COMPONENTS), None


torch.library.register_autograd("halfulp::decode", _backward, setup_context=_remember)
