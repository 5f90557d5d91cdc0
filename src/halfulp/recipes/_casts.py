"""Hooks that cast between modules of a narrow model: inputs to the dtype of the weights, or to float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .._messages import name_type
from ..gradients._functions import map_tensors, memoize_by_tensor
from ..subclass.models._float32_products import get_original_class


class ArgumentsWithCopies(dict):
    """Keyword arguments of a call, which carry copies of the caller's arguments to the hook after the call."""

    def __init__(self, kwargs: dict, given: Any, made: Any) -> None:
        super().__init__(kwargs)
        self.copies = [(copy, _get_items_by_key(copy)) for copy in _list_copied_values(given, made)]


def _list_copied_values(given: Any, made: Any) -> Iterator[Any]:
    """Yield every copy in nested arguments: tensors, lists, dicts and data classes."""
    if given is made:
        return
    if not isinstance(given, tuple):
        yield made
    if not isinstance(given, Tensor):
        now = _get_items_by_key(made)
        for key, item in _get_items_by_key(given).items():
            yield from _list_copied_values(item, now[key])


def _get_items_by_key(x: Any) -> dict:
    """Return the values in a list, tuple, dict or data class, by key; of a tensor one entry that a write replaces."""
    if isinstance(x, Tensor):
        return {x._version: None}
    if isinstance(x, dict):
        return dict(x)
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    declared = {field.name: getattr(x, field.name, None) for field in dataclasses.fields(x)}
    return declared | getattr(x, "__dict__", {})


_CAST_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Measured on the CPU, and as torch.autocast has it: with float32 weights these take narrow inputs and compute in
# float32; without weights they keep narrow means. layer_norm sums its weight's gradient in the narrow dtype.
_NORMS_TAKING_MIXED_DTYPES = (nn.modules.batchnorm._NormBase,)


class CastHook:
    """A hook that casts floating tensors; a class of its own, so that it is found again, copied and pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class CastInputsHook(CastHook):
    """A forward pre-hook that casts inputs, to a fixed dtype or first to that of the module's own parameters."""

    def __init__(self, dtype: torch.dtype, writes: bool, is_fixed: bool) -> None:
        super().__init__(dtype)
        # Whether the module may write into its arguments, which `RefuseWritesHook` finds.
        self.writes, self.is_fixed = writes, is_fixed

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Return the cast inputs, what is given twice as one tensor, or None where nothing changes."""
        own = () if self.is_fixed else module._parameters.values()
        dtype = [*(p.dtype for p in own if p is not None and p.dtype in _CAST_DTYPES), self.dtype][0]
        finds_writes = self.writes and not torch.compiler.is_compiling()
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            if args[0].dtype == dtype:
                return None
            if not finds_writes:
                return (cast_with_clamping(args[0], dtype),), kwargs
        once = memoize_by_tensor(lambda x: cast_with_clamping(x, dtype))
        cast_args, cast_kwargs = map_tensors(args, once, False), map_tensors(kwargs, once, False)
        if finds_writes:
            cast_kwargs = ArgumentsWithCopies(cast_kwargs, (args, kwargs), (cast_args, cast_kwargs))
        return cast_args, cast_kwargs


class RefuseCastParametersHook(CastHook):
    """A forward pre-hook of a module that is kept in float32: refuses parameters that something has cast since."""

    def __init__(self, name: str) -> None:
        super().__init__(torch.float32)
        self.name = name

    def __call__(self, module: nn.Module, args: tuple) -> None:
        """Check the dtypes of the module's parameters."""
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != torch.float32 and parameter.dtype in _CAST_DTYPES:
                raise TypeError(
                    f"parameter '{f'{self.name}.{key}'.lstrip('.')}' is {parameter.dtype}, but halfulp.convert keeps "
                    f"{name_type(module)} in float32: the model was cast as a whole afterwards, by model.to(dtype) or "
                    "a trainer's precision='bf16-true'; leave that out (precision='32-true'), as the model is "
                    "converted already, or call halfulp.revert(model) before it"
                )


class CastOutputsHook(CastHook):
    """A forward hook that casts a module's outputs, nested ones too."""

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Return the outputs, cast."""
        return map_tensors(output, lambda x: cast_with_clamping(x, self.dtype), False)


class RefuseWritesHook(CastHook):
    """A forward hook that refuses what a module wrote into cast copies of its caller's arguments."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Raise where the module wrote into a copy, which its caller does not see."""
        if torch.compiler.is_compiling() or not isinstance(kwargs, ArgumentsWithCopies):
            return
        for copy, before in kwargs.copies:
            now = _get_items_by_key(copy)
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in now):
                what = f"a tensor of {copy.dtype}" if isinstance(copy, Tensor) else name_type(copy)
                raise RuntimeError(
                    f"{name_type(module)} wrote into an argument, {what}, that it was given as a copy in the dtype of "
                    "its weights, so that its caller would not see it: make what it writes into in that dtype, or "
                    "return the result"
                )


def cast_with_clamping(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a plain floating tensor in another dtype, finite where it is finite; any other tensor as it is.

    A mask of `torch.finfo(torch.float32).min` becomes the dtype's own: minus infinity would make masked rows NaN.
    """
    if x.dtype not in _CAST_DTYPES or x.dtype == dtype:
        return x
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # where tensors have the version counter of writes
            y = x.to(dtype)
    else:
        y = x.to(dtype)
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(x.dtype).max:
        with torch.no_grad():
            given, made = _get_strided_values(x), _get_strided_values(y)
            is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
            is_plain = not is_traced and not torch._C._are_functorch_transforms_active() and type(made) is Tensor
            # Its numbers can be read without a device synchronisation, a graph break or an error.
            is_cheap = is_plain and made.device.type == "cpu" and not torch._C._len_torch_dispatch_stack()
            if not is_cheap or not math.isfinite(made.sum(dtype=torch.float32)):
                made.copy_(torch.where(given.isinf(), made, made.clamp(-largest, largest)))
    return y


def _get_strided_values(x: Tensor) -> Tensor:
    """Return the strided tensor that stores a nested or sparse one's elements."""
    if x.layout == torch.sparse_coo:
        return x._values()
    return x.values() if x.is_nested or x.layout != torch.strided else x


def install_cast_hooks(model: nn.Module, float32_modules: Container[str], dtype: torch.dtype) -> None:
    """Install the hooks: inputs in a module's dtype, outputs of float32 ones in another, the model's in float32."""
    for name, module in model.named_modules():
        if is_inside_modules(name, float32_modules) and any(x is not None for x in module._parameters.values()):
            module.register_forward_pre_hook(RefuseCastParametersHook(name))
        if name in float32_modules:
            if not isinstance(module, _NORMS_TAKING_MIXED_DTYPES) or module.weight is None:
                install_input_cast_hooks(module, torch.float32, is_fixed=True)
            if module is not model:
                module.register_forward_hook(CastOutputsHook(dtype))
        elif is_inside_modules(name, float32_modules):
            continue
        elif isinstance(module, ParametrizationList):
            for parametrization in module:
                install_input_cast_hooks(parametrization, torch.float32, is_fixed=True)
            module.register_forward_hook(CastOutputsHook(dtype))
        elif isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            install_input_cast_hooks(module, torch.float32, is_fixed=True)
            for layer in filter(has_weights, module.modules()):
                layer.register_forward_hook(CastOutputsHook(torch.float32))
        elif isinstance(module, _NORMS_TAKING_MIXED_DTYPES) or _multiplies_by_weights(module):
            install_input_cast_hooks(module, dtype)
    model.register_forward_hook(CastOutputsHook(torch.float32))


def install_input_cast_hooks(module: nn.Module, dtype: torch.dtype, is_fixed: bool = False) -> None:
    """Install the hooks that cast what a module is given; torch's own modules write into none of it."""
    writes = not get_original_class(module).__module__.startswith("torch.nn.")
    module.register_forward_pre_hook(CastInputsHook(dtype, writes, is_fixed), with_kwargs=True)
    if writes:
        module.register_forward_hook(RefuseWritesHook(dtype), with_kwargs=True)


def is_inside_modules(name: str, outer: Container[str]) -> bool:
    """Return whether a module is one of some modules, or lies in one."""
    parts = name.split(".") if name else []
    return any(".".join(parts[:k]) in outer for k in range(len(parts) + 1))


def has_weights(module: nn.Module) -> bool:
    """Return whether a module holds parameters, or computes its weights from parameters of other modules."""
    return any(x is not None for x in module._parameters.values()) or hasattr(module, "parametrizations")


def _multiplies_by_weights(module: nn.Module) -> bool:
    """Return whether a module multiplies its inputs by its own weights, for which torch wants one dtype.

    A layer does, with no weights below it, and a composite that owns a weight by that name (``in_proj_weight``). One
    that owns a class token or a table of positions adds it, which type promotion settles.
    """
    below = (child for name, child in module.named_children() if name != "parametrizations")
    own = [*(name for name, x in module._parameters.items() if x is not None), *getattr(module, "parametrizations", ())]
    is_layer = has_weights(module) and not any(True for child in below for _ in child.parameters())
    return is_layer or any("weight" in name for name in own)
