"""Gradients that accumulate in float32 beside 16-bit parameters."""

from __future__ import annotations

from typing import TypeVar

import torch

from .._torch_versions import HAS_GRADIENT_DTYPE, lacks
from ..subclass.models._module_parameters import check_module

Model = TypeVar("Model", bound=torch.nn.Module)
_NARROW = (torch.bfloat16, torch.float16)


def float32_gradients(model: Model, enabled: bool = True) -> Model:
    """Let the gradients of a model's bfloat16 and float16 parameters accumulate in float32.

    A bfloat16 sum over n microbatches loses what falls under half an ulp of it: 1% and more at n = 128. Backward still
    computes each gradient in the parameter's dtype; only the sum is wider, at 2 more bytes per parameter while it
    lives. The step of every optimizer here takes float32 gradients as they are, clipping included; torch.optim's
    fused and foreach steps want the parameter's dtype.

    The choice sits on the parameters and stays through optimizer steps, `zero_grad`, tied uses, activation
    checkpointing and `model.to`. It is lost where a parameter is made anew: by `copy.deepcopy`, pickle, or when a
    module replaces it; call this again there. DistributedDataParallel refuses such gradients (its buckets have the
    parameter's dtype), and FSDP has `MixedPrecisionPolicy(reduce_dtype=torch.float32)` of its own.

    Args:
        model: whose parameters are changed, in place; float32 ones stay as they are, and gradients that exist already
            are converted.
        enabled: False for gradients in the parameters' dtype again.

    Returns:
        The model.

    Raises:
        TypeError: no module.
        NotImplementedError: a torch without `Tensor.grad_dtype`.

    >>> import torch, halfulp as hu
    >>> model = hu.float32_gradients(torch.nn.Linear(2, 2).bfloat16())
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> model.weight.dtype, model.weight.grad.dtype
    (torch.bfloat16, torch.float32)
    """
    check_module(model, "float32_gradients")
    if not HAS_GRADIENT_DTYPE:
        raise lacks(
            "gradients wider than their parameter need Tensor.grad_dtype", "train float32 parameters under autocast"
        )
    for parameter in model.parameters():
        if parameter.dtype in _NARROW:
            dtype = torch.float32 if enabled else parameter.dtype
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)
    return model
