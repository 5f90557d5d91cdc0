"""The door of a scaled function: plain floating arguments, however nested, become scaled ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..kernels import define_operator
from ._form import LOGICALS, encoded
from ._registry import implements
from ._scaled_tensor import ScaledTensor

# `like` is what makes a scaled tensor of the result, also for compilers: operators of plain tensors give plain ones.
_enter = define_operator(
    "scaled_like(Tensor x, Tensor like, ScalarType storage) -> Tensor",
    lambda x, like, storage: x.clone(),
    lambda x, like, storage: torch.empty_like(x),
)


@implements(_enter, family="creation")
def scaled_like(x: Tensor, like: ScaledTensor, storage: torch.dtype) -> ScaledTensor:
    """A plain tensor as payload x scale, the scale measured."""
    made = encoded(x, storage)
    return made.clone() if made._payload is x else made


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _backward(context: Any, gradient: Tensor) -> tuple:
    plain = gradient.decode(context.dtype) if isinstance(gradient, ScaledTensor) else gradient
    return plain, None, None


torch.library.register_autograd("halfulp::scaled_like", _backward, setup_context=_remember)


def wrapped(arguments: Any, storage: torch.dtype, like: ScaledTensor) -> Any:
    """Plain floating tensors, however nested, as scaled ones; whatever else as it is."""

    # Compilers do not enter autograd functions that make tensor subclasses; operators have no forward-mode derivatives.
    def entered(x: Any) -> Any:
        if not _is_plain_float(x):
            return x
        return _enter(x, like, storage) if torch.compiler.is_compiling() else ScaledTensor.encode(x, storage)

    return tree_map(entered, arguments)


def _is_plain_float(x: Any) -> bool:
    if not isinstance(x, Tensor) or isinstance(x, ScaledTensor) or x.dtype not in LOGICALS:
        return False
    if x.layout != torch.strided:
        raise ValueError(f"an argument has layout {x.layout}: scaled tensors are dense, x.to_dense()")
    return True
