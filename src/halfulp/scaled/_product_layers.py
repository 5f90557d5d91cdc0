"""Layers of products: their float32 input is brought home before autograd saves it, so that the narrow copy is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ._promotion import brought_home, is_wide
from ._scaled_tensor import ScaledTensor

_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


class _BringHome(torch.autograd.Function):
    """The identity on values but for rounding them to the home; gradients pass as they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: ScaledTensor) -> ScaledTensor:
        return brought_home(x)

    @staticmethod
    def setup_context(context: Any, inputs: tuple, output: ScaledTensor) -> None:
        pass

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(context: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


def install(model: nn.Module) -> None:
    """Let the layers of products that have scaled parameters with a home bring their inputs home."""
    for module in model.modules():
        if _is_product(module) and any(_has_home(p) for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_bring_inputs_home, with_kwargs=True)


def remove(model: nn.Module) -> None:
    """Take back what `install` did."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _bring_inputs_home:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _is_product(module: nn.Module) -> bool:
    # transformers' layer of GPT-2, known by name: the library is not imported for it.
    return isinstance(module, _LAYERS) or type(module).__name__ == "Conv1D"


def _has_home(parameter: Tensor) -> bool:
    return isinstance(parameter, ScaledTensor) and parameter.home is not None


def _bring_inputs_home(module: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
    """A forward pre-hook. Compilers choose themselves what to keep, and the products' rules do the same there."""
    if torch.compiler.is_compiling() or not any(map(is_wide, (*arguments, *options.values()))):
        return None
    entered = _entering()
    return tuple(map(entered, arguments)), {name: entered(x) for name, x in options.items()}


def _entering() -> Callable[[Any], Any]:
    """One result for one tensor: attention asks whether query, key and value are the same."""
    found: dict[int, Tensor] = {}

    def entered(x: Any) -> Any:
        if not is_wide(x):
            return x
        if id(x) not in found:
            found[id(x)] = _BringHome.apply(x)
        return found[id(x)]

    return entered
