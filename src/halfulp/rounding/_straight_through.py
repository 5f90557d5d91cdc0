"""Rounding inside a model, of values, of gradients, or both, with the gradient of the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..formats._block import get_format_or_block
from ..kernels import is_under_transform
from ._modes import Nearest, Rounding, Stochastic, get_rounding
from ._quantize import AnyFormat, check_tensor, encode_target, quantize
from ._random_bits import mix64

_BACKWARD_STREAM = 0x6261636B


class _StraightThrough(torch.autograd.Function):
    """y = round(x), dL/dx = round(dL/dy); the derivative of either rounding counts as 1."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        forward: AnyFormat | None,
        backward: AnyFormat | None,
        rounding: Rounding,
        backward_rounding: Rounding,
        overflow: str | None,
        counter: int,
    ) -> torch.Tensor:
        return x.view_as(x) if forward is None else quantize(x, forward, rounding, overflow=overflow, counter=counter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, _, backward, _, backward_rounding, overflow, counter = inputs
        ctx.backward_choice = (backward, backward_rounding, overflow, counter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        format, rounding, overflow, counter = ctx.backward_choice
        if format is not None:
            gradient = _choose_function()(gradient, format, None, rounding, rounding, overflow, counter)
        return gradient, None, None, None, None, None, None


class _TransformedStraightThrough(_StraightThrough):
    """`_StraightThrough` for transforms of torch.func and forward mode, which torch.compile refuses."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *rest: object) -> torch.Tensor:
        """Return the tangent unchanged: the derivative of rounding counts as 1."""
        return tangent.view_as(tangent)


def _choose_function() -> Callable[..., torch.Tensor]:
    chosen: type[torch.autograd.Function] = _TransformedStraightThrough if is_under_transform() else _StraightThrough
    return chosen.apply


def straight_through(
    x: torch.Tensor,
    forward: AnyFormat | None = None,
    backward: AnyFormat | None = None,
    rounding: Rounding | str = Nearest(),  # noqa: B008  frozen
    *,
    backward_rounding: Rounding | str | None = None,
    overflow: str | None = None,
    counter: int = 0,
) -> torch.Tensor:
    """x rounded to `forward`, whose gradient is rounded to `backward`; the derivative of rounding counts as 1.

    The forward value is that of `quantize` with and without autograd, eager and compiled. A second derivative passes
    the same way: what backward rounded has derivative 1 too, and is not rounded again. Under activation
    checkpointing `Stochastic()` replays the bits of the first forward pass.

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape.
        forward: the format of the value, or None to leave it.
        backward: the format of the gradient, or None to leave it.
        rounding: the mode of both.
        backward_rounding: another mode for the gradient.
        overflow: as in `quantize`, for both.
        counter: as in `quantize`. With a fixed seed the gradient draws other bits than the value.

    Raises:
        TypeError, ValueError: as `quantize`; also for the gradient's format, already in the forward pass.

    >>> x = torch.tensor([0.3, 1.7], requires_grad=True)
    >>> y = straight_through(x, forward="e2m1fn", backward="e5m2")
    >>> (y * torch.tensor([1.1, 2.2])).sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.5, 1.5], [1.0, 2.0])
    """
    check_tensor(x)
    rounding = get_rounding(rounding)
    backward_rounding = rounding if backward_rounding is None else get_rounding(backward_rounding)
    if isinstance(backward_rounding, Stochastic) and backward_rounding.seed is not None:
        # Other random bits than the values'.
        backward_rounding = Stochastic(mix64(backward_rounding.signed_seed, _BACKWARD_STREAM))
    if backward is not None:
        encode_target(get_format_or_block(backward), backward_rounding, overflow, x.dtype)
    if forward is None and backward is None:
        return x
    return _choose_function()(x, forward, backward, rounding, backward_rounding, overflow, counter)


class StraightThrough(nn.Module):
    """`straight_through` as a layer.

    >>> layer = nn.Sequential(nn.Linear(4, 4), StraightThrough("bf16", backward="e5m2", rounding="stochastic"))
    >>> layer[1]
    StraightThrough(forward=bf16, backward=e5m2, rounding=stochastic)
    """

    def __init__(
        self,
        forward: AnyFormat | None = None,
        backward: AnyFormat | None = None,
        rounding: Rounding | str = Nearest(),  # noqa: B008  frozen
        *,
        backward_rounding: Rounding | str | None = None,
        overflow: str | None = None,
    ) -> None:
        super().__init__()
        self.forward_format: AnyFormat | None = forward
        self.backward_format: AnyFormat | None = backward
        self.rounding: Rounding = get_rounding(rounding)
        self.backward_rounding: Rounding | None = None if backward_rounding is None else get_rounding(backward_rounding)
        self.overflow = overflow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round x, and later its gradient."""
        return straight_through(
            x,
            self.forward_format,
            self.backward_format,
            self.rounding,
            backward_rounding=self.backward_rounding,
            overflow=self.overflow,
        )

    def extra_repr(self) -> str:
        """Return the formats and roundings of both directions."""
        forward, backward = (getattr(f, "name", None) or f for f in (self.forward_format, self.backward_format))
        return f"forward={forward}, backward={backward}, rounding={self.rounding.name}"
