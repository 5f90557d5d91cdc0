"""The input boundary: a scaled function encodes plain arguments, a scaled model gives plain inputs plain gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...kernels import define_operator, untraced
from ...subclass.models._hooks import remove_hooks
from .._dtypes import LOGICALS
from .._operands import encode_values
from .._registry import implements
from .._scaled_tensor import ScaledTensor

# `like` makes the result a scaled tensor, in compiled graphs too: operators of plain tensors give plain ones.
_encode_like = define_operator(
    "scaled_like(Tensor x, Tensor like, ScalarType storage) -> Tensor",
    lambda x, like, storage: x.clone(),
    lambda x, like, storage: torch.empty_like(x),
)


@implements(_encode_like, family="creation")
def scaled_like(x: Tensor, like: ScaledTensor, storage: torch.dtype) -> ScaledTensor:
    """Encode a plain tensor as payload x scale, the scale measured."""
    made = encode_values(x, storage)
    return made.clone() if made._payload is x else made


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


@untraced
def _backward(context: Any, gradient: Tensor) -> tuple:
    plain = gradient.decode(context.dtype) if isinstance(gradient, ScaledTensor) else gradient
    return plain, None, None


torch.library.register_autograd("halfulp::scaled_like", _backward, setup_context=_remember)


def encode_arguments(arguments: Any, storage: torch.dtype, like: ScaledTensor) -> Any:
    """Encode plain floating tensors, however nested; leave anything else unchanged."""

    encode = functools.partial(ScaledTensor.encode, home=like.home)

    # Compilers do not trace autograd functions that make tensor subclasses; operators lack forward-mode derivatives.
    def entered(x: Any) -> Any:
        if not _is_plain_float(x):
            return x
        return _encode_like(x, like, storage) if torch.compiler.is_compiling() else encode(x, storage)

    return tree_map(entered, arguments)


def _is_plain_float(x: Any) -> bool:
    if not isinstance(x, Tensor) or isinstance(x, ScaledTensor) or x.dtype not in LOGICALS:
        return False
    if x.layout != torch.strided:
        raise ValueError(f"an argument has layout {x.layout}: scaled tensors are dense, x.to_dense()")
    return True


class _PlainInput(torch.autograd.Function):
    """The identity with a plain gradient: what computed a plain input is differentiated in its own dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(context: Any, inputs: tuple, output: Tensor) -> None:
        context.dtype = inputs[0].dtype

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _backward(context, gradient)[0]

    @staticmethod
    def jvp(context: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


# The same as an operator for compilers, which do not trace autograd functions whose gradients change class.
_plain_input = define_operator("plain_input(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x))
torch.library.register_autograd(
    "halfulp::plain_input", lambda context, gradient: _backward(context, gradient)[0], setup_context=_remember
)


def install(model: nn.Module) -> None:
    """Give plain inputs of a model that require gradients plain ones, by a forward pre-hook."""
    if _keep_gradients_plain not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_keep_gradients_plain, with_kwargs=True)


def remove(model: nn.Module) -> None:
    """Remove the hooks of `install` from a model and its modules."""
    remove_hooks(model.modules(), lambda hook: hook is _keep_gradients_plain)


@untraced
def _keep_gradients_plain(module: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
    def entered(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided and _is_plain_float(x):
            return _plain_input(x) if torch.compiler.is_compiling() else _PlainInput.apply(x)
        return x

    return tree_map(entered, (arguments, options))
