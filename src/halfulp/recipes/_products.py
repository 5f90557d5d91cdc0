"""Which modules multiply, and in what: eight-bit products, products whose gradients are rounded."""

from __future__ import annotations

import torch
from torch import nn

from ..scaled._float8 import SIDE
from ..scaled.model._scalify import eight_bit_forward

_LAYERS = (
    *(nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd),
    *(nn.RNNBase, nn.RNNCellBase),
)


def eight_bit_products(module: nn.Module) -> tuple[str | None, str]:
    """Return what a module gets of ``matmul="fp8"``, and why not all.

    >>> eight_bit_products(nn.Linear(32, 10))
    ('fp8 products', '32 x 10: units take multiples of 16, else fp8 is emulated')
    >>> eight_bit_products(nn.Conv2d(3, 8, 3))
    (None, 'fp8 is for products of linear layers')
    """
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None, "MultiheadAttention multiplies by it without calling it"
    if eight_bit_forward(module) is None:
        if isinstance(module, nn.Linear):
            return None, "a forward of its own"
        return None, "fp8 is for products of linear layers" if isinstance(module, _LAYERS) else _no_product(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    sides = [module.in_features, module.out_features] if isinstance(module, nn.Linear) else list(weight.shape)
    if all(side % SIDE == 0 for side in sides):
        return "fp8 products", ""
    return "fp8 products", f"{sides[0]} x {sides[1]}: units take multiples of {SIDE}, else fp8 is emulated"


def rounded_gradients(module: nn.Module, format: str) -> tuple[str | None, str]:
    """Return what a module gets of a ``gradient_format``, and why not.

    >>> rounded_gradients(nn.Linear(3, 2), "fp16"), rounded_gradients(nn.LayerNorm(3), "fp16")
    (('gradients in fp16', ''), (None, 'no product'))
    """
    if isinstance(module, _LAYERS):
        return f"gradients in {format}", ""
    return None, _no_product(module)


def _no_product(module: nn.Module) -> str:
    """What to say of a module that is no layer of torch's that multiplies."""
    return "no product" if type(module).__module__.startswith("torch.nn.") else "only where its forward multiplies"
