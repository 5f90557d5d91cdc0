"""Rounding in blocks by Triton: a launch per tensor, and one more where the tensor has a scale of its own."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ...kernels import address
from ...kernels.triton._launch import ready
from ...kernels.triton._tensor_kernel import TensorKernel, fixed_memory, is_aligned
from .._kernel_constants import COUNT, Layout
from .._table import FIXED_KEY
from ._device_functions import AMAX
from ._reference import blocks_by_reference
from ._table import Kind, fixed_rows, largest_table, rounding_table, words_of
from ._target import BlockTarget


class Plan(NamedTuple):
    """What rounding tensors of a dtype to a target takes.

    Attributes:
        kernel: rounds.
        constants: of the target, as arguments of its launch.
        measure: finds the largest of the finite blocks' largest magnitudes, where the tensor has a scale of its own.
        measured: the constants of that.
        kind: what tells apart the kernels, which differ in the choice of the scale too where it is a constant.
        name: of the kernel, for messages.
    """

    kernel: TensorKernel
    constants: tuple[int, ...]
    measure: TensorKernel | None
    measured: tuple[int, ...]
    kind: tuple[torch.dtype, Kind, int]
    name: str


def round_blocks_by_triton(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> bool:
    """Round contiguous x into out, which may be x; return False if there is no Triton kernel."""
    plan, device = plan_for(x.dtype, target, layout), x.device
    aligned, ragged = is_aligned((address(x), address(out)), x.numel()), plan.kernel.is_ragged(_length(x))
    found = ready(
        ("quantize in blocks", *plan.kind, aligned, ragged),
        plan.name,
        device,
        lambda: plan,
        lambda plan, device: [_fixed_by_triton(plan, device, aligned, ragged)],
        lambda: [blocks_by_reference(_fixed(plan, ragged), target, FIXED_KEY)],
    )
    if found is None:
        return False
    _round(plan, x, key, out, aligned)
    return True


@lru_cache(maxsize=1024)
def plan_for(dtype: torch.dtype, target: BlockTarget, layout: Layout) -> Plan:
    """Return the plan of a dtype and a target, in words of a layout."""
    words = words_of(target, layout, 1.0, target.element.max)
    kind = Kind.of(dtype, target, layout)._replace(under_amax=target.tensor_scale)
    kernel, measure = triton_kernel(dtype, kind), triton_measure(dtype, kind) if target.tensor_scale else None
    measured = () if measure is None else measure.arguments(words)
    told, name = (dtype, kind, target.choice), f"quantize in blocks of {dtype}"
    return Plan(kernel, kernel.arguments(words), measure, measured, told, name)


@cache
def triton_kernel(dtype: torch.dtype, kind: Kind) -> TensorKernel:
    """Return the kernel that rounds; the largest magnitude on which a tensor's scale depends lies in memory."""
    return TensorKernel(rounding_table(dtype, kind), (2 * COUNT + AMAX,) if kind.under_amax else ())


@cache
def triton_measure(dtype: torch.dtype, kind: Kind) -> TensorKernel:
    """Return the kernel that finds the largest of the finite blocks' largest magnitudes."""
    return TensorKernel(largest_table(dtype, kind))


def _round(plan: Plan, x: torch.Tensor, key: int, out: torch.Tensor, aligned: bool) -> None:
    device, count, length, at = x.device, x.numel(), _length(x), 0
    addresses = address(x), address(out)
    if plan.measure is not None:
        # The device alone reads it, so that nothing waits.
        amax = torch.zeros(1, dtype=torch.int32, device=device)
        at = address(amax)
        plan.measure.launch(device, addresses, count, plan.measured, (0,), length=length, memory=at, aligned=aligned)
    plan.kernel.launch(device, addresses, count, plan.constants, (key,), length=length, memory=at, aligned=aligned)


def _length(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _fixed(plan: Plan, ragged: bool) -> torch.Tensor:
    dtype, kind = plan.kind[:2]
    return fixed_rows(dtype, 3 * kind.block + 1 if ragged else 16 * kind.block)


def _fixed_by_triton(plan: Plan, device: torch.device, aligned: bool, ragged: bool) -> torch.Tensor:
    rows = _fixed(plan, ragged)
    here, there = (fixed_memory(rows, device, aligned) for _ in range(2))
    _round(plan, here, FIXED_KEY, there, aligned)
    return there.cpu()
