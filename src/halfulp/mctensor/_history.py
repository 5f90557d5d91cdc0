"""The derivatives of encoding and decoding, backward and forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import under_transform, untraced
from ..subclass._in_backward import COMPONENTS


def with_history(x: Tensor, made: Any) -> Any:
    """Return `made`, the MCTensor that encodes x, with a graph through which gradients flow back, and tangents on."""
    transformed = under_transform()
    if not transformed and not (x.requires_grad and torch.is_grad_enabled()):
        return made
    chosen: type[torch.autograd.Function] = _TransformedEncode if transformed else _Encode
    connect: Callable[..., Any] = chosen.apply
    return connect(x, made)


def decoded_with_history(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value as a plain tensor, rounded once; gradients flow through it, and tangents."""
    decode: Callable[..., Tensor] = _TransformedDecode.apply if under_transform() else torch.ops.halfulp.decode
    return decode(x, dtype)


class _Encode(torch.autograd.Function):
    """Connect an MCTensor to the graph of the tensor that it encodes."""

    @staticmethod
    def forward(context: Any, x: Tensor, made: Any) -> Tensor:
        context.made = type(made)
        context.dtype = None if isinstance(x, context.made) else x.dtype
        context.form = len(made._parts), made.dtype, "none" if made._scale is None else "auto", made._gradients
        return made.detach()

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if context.dtype is None:
            return gradient, None
        return (gradient.decode(context.dtype) if hasattr(gradient, "decode") else gradient.to(context.dtype)), None


# Dynamo refuses Functions with a jvp: those are chosen only where one is needed.
class _TransformedEncode(_Encode):
    """The same in forward mode."""

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: object) -> Tensor:
        components, dtype, scale, gradients = context.form
        made: Tensor = context.made.encode(tangent, components, dtype, scale, gradients=gradients)
        return made


def remember_decoding(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Keep what the gradient of a decoding needs."""
    x, ctx.target = inputs
    ctx.kind, ctx.decoded = x.dtype, type(x)
    ctx.count = len(x._parts) if hasattr(x, "_parts") and x._gradients == COMPONENTS else 0


@untraced
def decoding_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    """Return the gradient of a decoded tensor, with components where it keeps such gradients."""
    if not context.count or isinstance(gradient, context.decoded):
        return gradient.to(context.kind), None
    return context.decoded.encode(gradient, context.count, context.kind, gradients=COMPONENTS), None


class _TransformedDecode(torch.autograd.Function):
    """Decoding for transforms of torch.func and forward mode, where an operator would lose the derivative."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        value: Tensor = torch.ops.halfulp.decode(x, dtype)
        return value

    setup_context = staticmethod(remember_decoding)

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return decoding_gradient(context, gradient)

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: object) -> Tensor:
        value: Tensor = tangent.decode(context.target) if hasattr(tangent, "decode") else tangent.to(context.target)
        return value
