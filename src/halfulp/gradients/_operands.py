"""The operands of the product by which a gradient is passed on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ._products import name_of


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a product multiplies in backward, as sums over k of gradient[..., k] weight[k, ...].

    Attributes:
        gradient: Of the product's result, as stored; shape (..., K).
        weight: The other factor; shape (K, ...).
        fan: How many terms each sum has: K, times the kernel's size for convolutions.
    """

    gradient: Tensor
    weight: Tensor
    fan: int


def other_factor(function: Callable, args: tuple) -> tuple[Tensor, bool] | None:
    """The factor that a product multiplies a gradient by to pass it on, and whether the product is a convolution.

    Returns:
        The factor with the summed dimension first, without a gradient; None where there is no such factor, as in a
        fused attention or a recurrent layer.
    """
    name = name_of(function)
    tensors = [x for x in args if isinstance(x, Tensor) and x.dim() > 1]
    if len(tensors) < 2 or name not in _FACTORS:
        return None
    parameter = next((x for x in tensors if isinstance(x, torch.nn.Parameter)), tensors[1])
    weight = parameter.detach()
    if name.startswith("conv_transpose"):
        return weight.transpose(0, 1), True
    if name == "linear" or name.startswith("conv"):
        return weight, name.startswith("conv")
    return (weight.movedim(-1, 0) if parameter is not tensors[0] else weight), False


def operands(gradient: Tensor, weight: Tensor, convolution: bool) -> Operands:
    """Both factors with the summed dimension at the seam.

    Raises:
        ValueError: they have none in common.
    """
    if convolution:
        gradient = gradient.movedim(1, -1)
    if gradient.shape[-1] != weight.shape[0]:
        gradient = gradient.movedim(-2, -1)
    fan = weight.shape[0] * (math.prod(weight.shape[2:]) if convolution else 1)
    return Operands(gradient.detach(), weight, fan)


_FACTORS = {
    *("linear", "matmul", "__matmul__", "mm", "bmm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
