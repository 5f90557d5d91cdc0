"""Checks that a step can read and write the memory of a parameter, its gradient and its states."""

from __future__ import annotations

from typing import cast

import torch

from ...kernels import has_own_memory, overlaps_itself, plain
from ...kernels._plain_memory import refuse
from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from ..parameters._parameter_plan import ParameterPlan
from ..stores._float8 import PAYLOADS
from ..stores._storage import STORES, Store


def check_parameter(parameter: torch.Tensor, part: torch.Tensor, name: str) -> None:
    """Refuse a parameter whose numbers no step here can write.

    Memory that is still to come (the meta device) is looked at when it steps, by `check_memory`.

    Args:
        parameter: as the user gave it.
        part: the tensor in which its numbers lie: a shard, a payload, or itself.
        name: for the message.

    Raises:
        TypeError: a tensor class that keeps its numbers in other tensors, a sparse, quantized or nested tensor.
    """
    if part.is_meta or has_own_memory(part):
        return
    if torch.nn.parameter.is_lazy(parameter):
        return
    dense = part.layout is torch.strided and not part.is_quantized and not part.is_nested
    if dense and type(part) in (torch.Tensor, torch.nn.Parameter):
        return
    refuse(part, f"parameter {name}", "torch.optim's optimizers step what such a class allows")


def check_memory(plan: ParameterPlan, gradient: torch.Tensor) -> None:
    """Check every tensor whose address a step's kernel is given.

    Raises:
        TypeError: a parameter or state without plain memory: fake, on the meta device, freed.
        ValueError: a parameter whose elements share memory, a state with gaps, or tensors on several devices.
    """
    own = len(plan.parts) - len(plan.auxiliary_tensors)
    named = [("parameter", part) for part in plan.parts[:own]]
    named += [(f"state {key!r} of parameter", tensor) for key, tensor in plan.tensors.items()]
    for what, tensor in named:
        if not has_own_memory(tensor) or (tensor.is_neg() and tensor.is_contiguous()):
            refuse(tensor, f"{what} {plan.name}")
        if tensor.device != gradient.device:
            raise ValueError(
                f"{what} {plan.name} is on {tensor.device} and the gradient on {gradient.device}: move them to one "
                "device, and make the optimizer after moving the model"
            )
    for what, tensor in named[own:]:
        if not tensor.is_contiguous():
            raise ValueError(f"{what} {plan.name} is a view with gaps or of another order: store state.contiguous()")
    if overlaps_itself(named[0][1]):
        raise ValueError(
            f"parameter {plan.name} is expanded: several of its elements are one number in memory, so it has no step "
            "of its own: make it by .clone(), or train what it was expanded from"
        )


def gradient_memory(
    gradient: torch.Tensor, parameter: torch.Tensor, name: str
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """A gradient as plain memory, and its scale, which only a scaled parameter's step takes, and which is not read.

    Raises:
        TypeError: a tensor class whose memory is not its values.
    """
    if isinstance(gradient, ScaledTensor):
        if isinstance(parameter, ScaledTensor):
            return plain_gradient(cast("ScaledTensor", gradient.detach()).payload, name), gradient.scale.detach()
        gradient = cast("ScaledTensor", gradient.detach()).decode()
    elif isinstance(gradient, MCTensor):
        gradient = cast("MCTensor", gradient.detach()).decode(torch.float32)
    if gradient.layout is not torch.strided:
        return gradient, 1.0  # refused, or kept sparse, where its dtype is looked at
    return plain_gradient(gradient, name), 1.0


def plain_gradient(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """Return a gradient as plain memory, or raise TypeError by its parameter's name, which is put into words then."""
    try:
        return plain(gradient)
    except TypeError:
        pass
    return plain(gradient, f"the gradient of {name}")


def gradient_store(gradient: torch.Tensor, parameter: torch.Tensor, name: str) -> Store:
    """The store that a gradient's numbers are read by.

    Raises:
        ValueError: a sparse gradient, or one of another dtype.
    """
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"parameter {name} has a sparse gradient: give its Embedding sparse=False, or use "
            "hu.optim.wrap(torch.optim.SparseAdam, ...)"
        )
    if isinstance(parameter, ScaledTensor) and gradient.dtype in PAYLOADS:
        return PAYLOADS[gradient.dtype]
    if gradient.dtype not in STORES:
        raise ValueError(f"the gradient of {name} is {gradient.dtype}: allowed are bfloat16, float16 and float32")
    return STORES[gradient.dtype]
