"""Rescaling of payloads, and where in a model it is placed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels import define_operator, is_under_transform, untraced
from ..subclass.models._conversion import make_matcher
from . import _fused as fused
from . import _powers_of_two as _powers
from ._operands import move_level_to_scale
from ._registry import implements
from ._scaled_tensor import ScaledTensor

Statistic = Literal["rms", "max", "mean"]
Side = Literal["forward", "gradient", "both"]
STATISTICS = ("rms", "max", "mean")
SIDES = ("forward", "gradient", "both")
# Types whose payloads have squares and sums within float32's range.
_NARROW_RANGE_STORAGES = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def rescale(x: Tensor, by: Statistic = "rms", side: Side = "forward") -> Tensor:
    """Return the values under a scale that brings the payload to a magnitude of about 1.

    The same values but for the smallest: what falls below the storage's smallest normal number under the new scale
    loses digits there, down to 0. With a float32 payload or within half of the storage's binades none does.

    payload / 2^k and scale * 2^k, with 2^k next to the root mean square, the largest or the mean magnitude of the
    payload's finite non-zero elements. Payloads that would leave the storage's range get a larger scale, and zeros keep
    theirs. The dynamic rescaling of "Scalify" (Balança et al., arXiv 2407.17353, section 3.3); it acts the same with
    and without autograd, eager and compiled. Plain tensors have no scale and come back as they are.

    Args:
        x: a tensor of any shape.
        by: the statistic, "rms", "max" or "mean".
        side: "forward" rescales x, "gradient" the gradient that flows back through it, "both" both.

    Returns:
        A tensor of x's shape, storage and dtype.

    Raises:
        TypeError: x is no tensor.
        ValueError: another statistic or side.

    >>> from halfulp.scaled import ScaledTensor
    >>> rescale(ScaledTensor(torch.tensor([1e-4, 3e-4]), 1.0))
    ScaledTensor([1.0000e-04, 3.0000e-04], scale=2^-12, payload=torch.float32)
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}")
    if by not in STATISTICS:
        raise ValueError(f"by={by!r}: allowed are {', '.join(STATISTICS)}")
    if side not in SIDES:
        raise ValueError(f"side={side!r}: allowed are {', '.join(SIDES)}")
    chosen: type[torch.autograd.Function] = _RescaleUnderTransform if is_under_transform() else _RescaleFunction
    apply: Callable[..., Tensor] = chosen.apply
    return apply(x, by, side) if isinstance(x, ScaledTensor) else x


def measure_payload_power(payload: Tensor, by: Statistic) -> Tensor:
    """Return the power of two next to a statistic of the finite non-zero elements, or what the largest needs."""
    if by == "rms" and _powers.is_fused(payload):
        return fused.measure_level(payload, payload.dtype, 1.0)
    wide = payload.detach().to(torch.float32 if payload.dtype in _NARROW_RANGE_STORAGES else torch.float64)
    magnitudes = torch.nan_to_num(wide, 0.0, 0.0, 0.0).abs()
    amax = value = magnitudes.amax()
    count = magnitudes.count_nonzero().clamp(min=1)
    if by == "mean":
        value = magnitudes.sum() / count
    elif by == "rms":
        value = (magnitudes.square().sum() / count).sqrt()
    lowest = amax / torch.finfo(payload.dtype).max
    power = torch.maximum(_powers.round_to_power(value, "nearest"), _powers.round_to_power(lowest, "up"))
    return torch.where(amax == 0, torch.ones_like(power), power)


# An operator, so that compilers see one node and do not trace into payloads.
_rescale_operator = define_operator(
    "rescale_payload(Tensor x, str by) -> Tensor", lambda x, by: x.clone(), lambda x, by: torch.empty_like(x)
)


@implements(_rescale_operator, family="rescaling")
def bring_payload_to_one(x: ScaledTensor, by: Statistic = "rms") -> ScaledTensor:
    """Return the values under the scale that brings the payload's statistic next to 1."""
    if not x.numel():
        return x.clone()
    return move_level_to_scale(x._payload, x._scale, measure_payload_power(x._payload, by), x._payload.dtype, x.dtype)


# The identity on values, in second derivatives too.
torch.library.register_autograd("halfulp::rescale_payload", lambda context, gradient: (gradient, None))


class _RescaleFunction(torch.autograd.Function):
    """The identity on values, which rescales the result, its gradient, or both."""

    @staticmethod
    def forward(context: Any, x: Tensor, by: Statistic, side: Side) -> Tensor:
        context.by, context.side = by, side
        return x.view_as(x) if side == "gradient" else _rescale_operator(x, by)

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient if context.side == "forward" else _rescale_operator(gradient, context.by), None, None


class _RescaleUnderTransform(_RescaleFunction):
    """The same in forward mode. Dynamo refuses Functions with a jvp, so that it is chosen only where one is needed."""

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: object) -> Tensor:
        return tangent.view_as(tangent) if context.side == "gradient" else _rescale_operator(tangent, context.by)


RescalePlaces = Literal["auto", "norms"] | Iterable[str] | None

_NORM_CLASS_PATTERN = re.compile("Norm(?![a-z])")


def find_rescaled_modules(model: nn.Module, rescale: RescalePlaces) -> list[nn.Module]:
    """Return the modules at whose first scaled input the gradient is rescaled.

    Raises:
        ValueError: another word, or a name that matches no module.
    """
    if rescale is None:
        return []
    if rescale == "norms":  # by the class's name; modules that hold others are none
        return [m for m in model.modules() if _NORM_CLASS_PATTERN.search(type(m).__name__) and not m._modules]
    if isinstance(rescale, (str, Mapping)):
        raise ValueError(
            f"rescale={rescale!r}: allowed are 'auto', 'norms', None and names of modules, at whose inputs gradients "
            "are rescaled; for values call hu.rescale(x) in the model"
        )
    named = dict(model.named_modules())
    matches = make_matcher(list(rescale), list(named), what="rescale", of="module")
    return [module for name, module in named.items() if matches(module, name)]


@untraced
def rescale_input_gradient(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Rescale the gradient of a module's first scaled input: a forward pre-hook."""
    given: dict[int | str, Any] = dict(enumerate(arguments)) | options
    place = next((place for place, value in given.items() if isinstance(value, ScaledTensor)), None)
    if place is None:
        return None
    given[place] = rescale(given[place], side="gradient")
    return tuple(given[i] for i in range(len(arguments))), {name: given[name] for name in options}
