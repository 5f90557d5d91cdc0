"""Hooks that cast between modules of a narrow model: inputs to the dtype of the weights, or to float32."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from ..gradients._pytree import map_tensors

_PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Measured on the CPU, and as torch.autocast has it: with float32 weights these take narrow inputs and compute in
# float32; without weights they keep narrow means. layer_norm sums its weight's gradient in the narrow dtype.
_MIXED = (nn.modules.batchnorm._NormBase,)


class _Cast:
    """A hook that casts floating tensors; a class of its own, so that it is found again, copied and pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def inputs(self, args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict] | None:
        """Positional and keyword inputs, cast; None where nothing changes."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return None if args[0].dtype == dtype else ((cast(args[0], dtype),), kwargs)
        return map_tensors(args, lambda x: cast(x, dtype), False), map_tensors(kwargs, lambda x: cast(x, dtype), False)


class CastInputs(_Cast):
    """A forward pre-hook that casts inputs to the dtype of the module's own parameters."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """A forward pre-hook."""
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in _PLAIN:
                return self.inputs(args, kwargs, parameter.dtype)
        return self.inputs(args, kwargs, self.dtype)


class WidenInputs(_Cast):
    """A forward pre-hook of a module that is kept in float32: casts its inputs to float32."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """A forward pre-hook."""
        return self.inputs(args, kwargs, self.dtype)


class CastOutputs(_Cast):
    """A forward hook that casts a module's outputs, nested ones too."""

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """A forward hook."""
        return map_tensors(output, lambda x: cast(x, self.dtype), False)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain floating tensor in another dtype; any other tensor as it is."""
    return x.to(dtype) if x.dtype in _PLAIN and x.dtype != dtype else x


def install(model: nn.Module, islands: set[str], dtype: torch.dtype) -> None:
    """Install the hooks: modules get inputs in their dtype, and the model returns float32.

    Args:
        model: whose parameters are narrow, but for those inside islands.
        islands: qualified names of modules that compute in float32, no one inside another.
        dtype: of what islands hand on.
    """
    for name, module in model.named_modules():
        if name in islands:
            if not isinstance(module, _MIXED) or module.weight is None:
                module.register_forward_pre_hook(WidenInputs(torch.float32), with_kwargs=True)
            if module is not model:
                module.register_forward_hook(CastOutputs(dtype))
        elif not inside(name, islands) and _has_weights(module) and _multiplies(module):
            module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    model.register_forward_hook(CastOutputs(torch.float32))


def install_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what the model's modules with parameters are given to a wider dtype, in which they keep all digits."""
    for module in model.modules():
        if _has_weights(module):
            module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)


def remove(model: nn.Module) -> None:
    """Remove every hook of this file from a model."""
    for module in model.modules():
        for hooks, options in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Cast)]:
                del hooks[key]
                options.pop(key, None)


def inside(name: str, islands: Container[str]) -> bool:
    """Return whether a module is one of some modules, or lies in one."""
    parts = name.split(".") if name else []
    return any(".".join(parts[:k]) in islands for k in range(len(parts) + 1))


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module holds parameters, or computes its weights from parameters of other modules."""
    return any(x is not None for x in module._parameters.values()) or hasattr(module, "parametrizations")


def _multiplies(module: nn.Module) -> bool:
    """Whether a module multiplies its inputs by its own weights, for which torch wants one dtype.

    A layer, with no weights below it, does. So does a composite that owns a weight by that name (MultiheadAttention's
    ``in_proj_weight``). One that owns a class token or a table of positions adds it, which type promotion settles, and
    passes times and masks on; were it to multiply, torch would raise.
    """
    below = (child for name, child in module.named_children() if name != "parametrizations")
    own = [*(name for name, x in module._parameters.items() if x is not None), *getattr(module, "parametrizations", ())]
    return any("weight" in name for name in own) or not any(True for child in below for _ in child.parameters())
