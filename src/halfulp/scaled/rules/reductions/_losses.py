"""Rules of losses and of softmax's gradients: a mean over n elements sends back gradients under the scale 1 / n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import present, torch_operators
from ..._operands import first_scaled, operand, to_float32
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import align, payloads_under, sqrt_of_count, value_of
from .._vocabulary import homogeneous, measured_scale
from ._reductions import make_squares

aten = torch_operators("aten")
MEAN, SUM = 1, 2


def _spread(count: int, reduction: int) -> float:
    return sqrt_of_count(count) if reduction == SUM else 1.0


def _mean_divisor(count: int, reduction: int) -> float:
    """Return the power of two near the factor by which a mean divides gradients."""
    return 1.0 / sqrt_of_count(count * count) if reduction == MEAN else 1.0


homogeneous(aten._log_softmax_backward_data.default, family="loss", grad_output=1)
homogeneous(aten._softmax_backward_data.default, family="loss", grad_output=1)


@implements(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, family="loss")
def nll_loss_forward(x: Any, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The chosen log-probabilities under x's scale; the total weight plain in float32, as counts leave narrow types."""
    operator = aten.nll_loss_forward.default if x.dim() < 3 else aten.nll_loss2d_forward.default
    p = operand(x, first_scaled((x, weight)))
    y, total = operator(to_float32(p), target, value_of(weight), reduction, ignore_index)
    holders = [x] if isinstance(x, ScaledTensor) else [x, weight]
    return payloads_under(y, [p._scale], holders, _spread(target.numel(), reduction)), total


def _nll_backward(operator: OpOverload) -> None:
    def backward(
        gradient: Any, x: Any, target: Tensor, weight: Any, reduction: int, ignore_index: int, total: Any
    ) -> Tensor:
        like = first_scaled((gradient, x, weight, total))
        g = operand(gradient, like)
        shape_of = to_float32(x) if isinstance(x, ScaledTensor) else x.to(torch.float32)
        y = operator(to_float32(g), shape_of, target, value_of(weight), reduction, ignore_index, value_of(total))
        return payloads_under(y, [g._scale], [_holder(gradient, like)], _mean_divisor(target.numel(), reduction))

    implements(operator, family="loss")(backward)


_nll_backward(aten.nll_loss_backward.default)
_nll_backward(aten.nll_loss2d_backward.default)


def _holder(gradient: Any, like: ScaledTensor) -> ScaledTensor:
    return gradient if isinstance(gradient, ScaledTensor) else like


@implements(aten.mse_loss.default, family="loss")
def mse_loss(x: Any, target: Any, reduction: int = MEAN) -> Tensor:
    """(px - pt)^2 under the scale s^2."""
    (a, b), scale, *_ = align(x, target)
    y = aten.mse_loss.default(a, b, reduction)
    return make_squares(y, scale, [x, target])


@implements(aten.mse_loss_backward.default, family="loss")
def mse_loss_backward(gradient: Any, x: Any, target: Any, reduction: int) -> Tensor:
    """2 pg (px - pt) under gs s / n."""
    like = first_scaled((gradient, x, target))
    g = operand(gradient, like)
    (a, b), scale, *_ = align(*(operand(t, like) for t in (x, target)))
    y = aten.mse_loss_backward.default(to_float32(g), a, b, reduction)
    return payloads_under(y, [g._scale, scale], [_holder(gradient, like)], _mean_divisor(a.numel(), reduction))


def _backward_on_values(*operators: OpOverload) -> None:
    """Register operators whose result is linear in the incoming gradient, the rest by value: under gs / n."""
    for operator in present(operators):
        implements(operator, family="loss")(_of_values(operator))


def _of_values(operator: OpOverload) -> Callable:
    names = [argument.name for argument in operator._schema.arguments]
    at = names.index("reduction")

    def backward(gradient: Any, *arguments: Any, **options: Any) -> Tensor:
        like = first_scaled((gradient, *arguments, *options.values()))
        g = operand(gradient, like)
        rest = [value_of(x) for x in arguments]
        y = operator(to_float32(g), *rest, **{name: value_of(x) for name, x in options.items()})
        reduction = arguments[at - 1] if len(arguments) >= at else options.get("reduction", MEAN)
        return payloads_under(y, [g._scale], [_holder(gradient, like)], _mean_divisor(arguments[0].numel(), reduction))

    return backward


_backward_on_values(
    *(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default, aten.soft_margin_loss_backward.default),
    *(aten.binary_cross_entropy_backward.default, aten.multi_margin_loss_backward.default),
    aten.multilabel_margin_loss_backward.default,
)


measured_scale(
    *(aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default),
    *(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default),
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default),
    family="loss",
)
