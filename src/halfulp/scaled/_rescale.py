"""Rescaling of payloads, and where in a model it is placed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels import define_operator, hide_own_frames_from_compiler, is_under_transform
from ..subclass._in_backward import make_differentiable
from ._operands import move_power_to_scale
from ._registry import implements
from ._scaled_tensor import ScaledTensor, measure_rms_scale

RescaleSide = Literal["forward", "gradient"]


def rescale(x: Tensor, side: RescaleSide = "forward") -> Tensor:
    """Return the values under a scale that brings the payload to a magnitude of about 1.

    The same values but for the smallest: what falls below the storage's smallest normal number under the new scale
    loses digits there, down to 0. With a float32 payload or within half of the storage's binades none does.

    payload / 2^k and scale * 2^k, with 2^k next to the root mean square of the payload's finite non-zero elements.
    Payloads that would leave the storage's range get a larger scale, and zeros keep theirs. The dynamic rescaling of
    "Scalify" (Balança et al., arXiv 2407.17353, section 3.3); it acts the same with and without autograd, eager and
    compiled. Plain tensors have no scale and come back as they are.

    Args:
        x: a tensor of any shape.
        side: "forward" rescales x, "gradient" the gradient that flows back through it.

    Returns:
        A tensor of x's shape, storage and dtype.

    Raises:
        TypeError: x is no tensor.
        ValueError: another side.

    >>> from halfulp.scaled import ScaledTensor
    >>> rescale(ScaledTensor(torch.tensor([1e-4, 3e-4]), 1.0))
    ScaledTensor([1.0000e-04, 3.0000e-04], scale=2^-12, payload=torch.float32)
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}")
    if side not in ("forward", "gradient"):
        raise ValueError(f"side={side!r}: allowed are 'forward' and 'gradient'")
    if not isinstance(x, ScaledTensor):
        return x
    gradient_side = _RescaleGradientWithJvp if is_under_transform() else _RescaleGradient
    run: Callable[[Tensor], Tensor] = _rescale_differentiably if side == "forward" else gradient_side.apply
    return run(x)


# An operator, so that compilers see one node and do not trace into payloads.
_rescale_operator = define_operator(
    "rescale_payload(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x)
)


@implements(_rescale_operator, family="rescaling")
def normalize_payload(x: ScaledTensor) -> ScaledTensor:
    """Return the values under the scale that brings the payload's root mean square next to 1."""
    if not x.numel():
        return x.clone()
    level = measure_rms_scale(x._payload, x._payload.dtype, scale_of_zeros=1.0)
    return move_power_to_scale(x._payload, x._scale, level, x._payload.dtype, x.dtype)


# The identity on values, in derivatives too.
_rescale_differentiably = make_differentiable(
    _rescale_operator,
    lambda ctx, inputs, output: None,
    lambda context, gradient: gradient,
    lambda context, tangent: tangent.clone(),
)


class _RescaleGradient(torch.autograd.Function):
    """The identity on values, which rescales the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @hide_own_frames_from_compiler
    def backward(context: Any, gradient: Tensor) -> Tensor:
        rescaled: Tensor = _rescale_differentiably(gradient)
        return rescaled


class _RescaleGradientWithJvp(_RescaleGradient):
    """The same in forward mode. Dynamo refuses Functions with a jvp, so that it is chosen only where one is needed."""

    @staticmethod
    def jvp(context: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


InputGradientRescaling = Literal["auto", "norms"] | None

_NORM_CLASS_PATTERN = re.compile("Norm(?![a-z])")


def find_rescaled_modules(model: nn.Module, rescale: InputGradientRescaling) -> list[nn.Module]:
    """Return the normalisation layers for "norms", by the names of their classes; modules that hold others are none."""
    if rescale not in (None, "norms"):
        raise ValueError(
            f"rescale={rescale!r}: allowed are 'auto', 'norms' and None; elsewhere call hu.rescale(x, 'gradient') or "
            "hu.rescale(x) in the model"
        )
    found = model.modules() if rescale else ()
    return [m for m in found if _NORM_CLASS_PATTERN.search(type(m).__name__) and not m._modules]


@hide_own_frames_from_compiler
def rescale_input_gradient(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Rescale the gradient of a module's first scaled input: a forward pre-hook."""
    given: dict[Any, Any] = {**dict(enumerate(arguments)), **options}
    places = [place for place, value in given.items() if isinstance(value, ScaledTensor)]
    if not places:
        return None
    given[places[0]] = rescale(given[places[0]], "gradient")
    return tuple(given[i] for i in range(len(arguments))), {name: given[name] for name in options}
