"""Rounding in blocks by Triton: a launch per tensor, and one more where the tensor has a scale of its own."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ...kernels import address
from ...kernels.triton._tensor_kernel import TensorKernel, fixed_memory, is_aligned, is_ready
from .._kernel_constants import COUNT, Layout
from .._table import FIXED_KEY
from ._device_functions import TENSOR, UNIT
from ._reference import SMALLEST_NORMAL, blocks_by_reference
from ._table import Kind, fixed_rows, largest_table, rounding_table, words_of
from ._target import BlockTarget

# The words in memory of a tensor that has a scale of its own.
_SCALE, _UNIT, _DIVISOR, _LARGEST_ELEMENT = range(4)


class Plan(NamedTuple):
    """What rounding tensors of a dtype to a target takes.

    Attributes:
        kernel: rounds.
        constants: of the target, as arguments of its launch.
        measure: finds the largest of the finite blocks' largest magnitudes, where the tensor has a scale of its own.
        measured: the constants of that.
        kind: what tells apart the kernels.
    """

    kernel: TensorKernel
    constants: tuple[int, ...]
    measure: TensorKernel | None
    measured: tuple[int, ...]
    kind: tuple[torch.dtype, Kind, int, bool]


def round_blocks_by_triton(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> bool:
    """Round contiguous x into out, which may be x; return False if there is no Triton kernel."""
    plan, device = plan_for(x.dtype, target, layout), x.device
    aligned, ragged = is_aligned((address(x), address(out)), x.numel()), plan.kernel.is_ragged(_length(x))
    if not is_ready(
        "quantize in blocks",
        (*plan.kind, aligned, ragged),
        device,
        lambda: [_fixed_by_triton(plan, target, device, aligned, ragged)],
        lambda: [blocks_by_reference(_fixed(plan, ragged), target, FIXED_KEY)],
    ):
        return False
    _round(plan, x, target, key, out, aligned)
    return True


@lru_cache(maxsize=1024)
def plan_for(dtype: torch.dtype, target: BlockTarget, layout: Layout) -> Plan:
    """Return the plan of a dtype and a target, in words of a layout."""
    kind, words = Kind.of(dtype, target, layout), words_of(target, layout, 1.0, target.element.max)
    kernel = triton_kernel(dtype, kind, target.tensor_scale)
    measure = triton_measure(dtype, kind) if target.tensor_scale else None
    measured = () if measure is None else measure.arguments(words)
    told = (dtype, kind, target.choice, target.tensor_scale)
    return Plan(kernel, kernel.arguments(words), measure, measured, told)


@cache
def triton_kernel(dtype: torch.dtype, kind: Kind, tensor_scale: bool) -> TensorKernel:
    """Return the kernel that rounds; a tensor's own scale, and its product with the largest element, lie in memory."""
    return TensorKernel(rounding_table(dtype, kind), (2 * COUNT + TENSOR, 2 * COUNT + UNIT) if tensor_scale else ())


@cache
def triton_measure(dtype: torch.dtype, kind: Kind) -> TensorKernel:
    """Return the kernel that finds the largest of the finite blocks' largest magnitudes."""
    return TensorKernel(largest_table(dtype, kind))


def _round(plan: Plan, x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor, aligned: bool) -> None:
    addresses, count, length, memory = (address(x), address(out)), x.numel(), _length(x), None
    if plan.measure is not None:
        memory = _scale_words(target, x.device).clone()
        plan.measure.launch(
            x.device, addresses, count, plan.measured, (0,), length=length, memory=address(memory), aligned=aligned
        )
        # As `tensor_scale` computes it; torch would multiply by the inverse of a divisor that is no tensor.
        torch.div(memory[_SCALE], memory[_DIVISOR], out=memory[_SCALE]).clamp_(min=SMALLEST_NORMAL)
        torch.mul(memory[_SCALE], memory[_LARGEST_ELEMENT], out=memory[_UNIT])
    at = 0 if memory is None else address(memory)
    plan.kernel.launch(x.device, addresses, count, plan.constants, (key,), length=length, memory=at, aligned=aligned)


@lru_cache(maxsize=64)
def _scale_words(target: BlockTarget, device: torch.device) -> torch.Tensor:
    """A zero that takes the tensor's largest magnitude and becomes its scale, and what it is computed from."""
    numbers = [0.0, 0.0, target.element.max * target.scale.max, target.element.max]
    return torch.from_numpy(np.array(numbers, np.float32)).to(device)


def _length(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _fixed(plan: Plan, ragged: bool) -> torch.Tensor:
    dtype, kind = plan.kind[:2]
    return fixed_rows(dtype, 3 * kind.block + 1 if ragged else 16 * kind.block)


def _fixed_by_triton(
    plan: Plan, target: BlockTarget, device: torch.device, aligned: bool, ragged: bool
) -> torch.Tensor:
    rows = _fixed(plan, ragged)
    here, there = (fixed_memory(rows, device, aligned) for _ in range(2))
    _round(plan, here, target, FIXED_KEY, there, aligned)
    return there.cpu()
