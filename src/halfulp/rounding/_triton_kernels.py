"""Rounding by Triton: one launch per tensor, from the same device functions as the processor's kernels."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ..kernels import address
from ..kernels.triton._launch import ready
from ..kernels.triton._tensor_kernel import VECTOR, TensorKernel, fixed_memory, is_aligned
from ._kernel_constants import WORD32, WORD64, constants
from ._reference import by_reference
from ._table import FIXED_KEY, fixed_elements, rounding_table
from ._target import Target


class Plan(NamedTuple):
    """What rounding tensors of a dtype to a target takes.

    Attributes:
        kernel: serves all targets of its kind.
        constants: of the target, as arguments of a launch.
        kind: of the kernel: dtype, mode, and the path, plainness and saturation of `Constants`.
        name: of the kernel, for messages.
    """

    kernel: TensorKernel
    constants: tuple[int, ...]
    kind: tuple[torch.dtype, int, str, bool, bool]
    name: str


def round_by_triton(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> bool:
    """Round x into out, as `run` takes them; return False if there is no Triton kernel."""
    count = x.numel()
    if count == 0:
        return True
    plan, addresses, device = plan_for(x.dtype, target), (address(x), address(out)), x.device
    aligned = is_aligned(addresses, count)
    kernel = ready(
        ("quantize", *plan.kind, aligned),
        plan.name,
        device,
        lambda: plan.kernel,
        lambda kernel, device: [_fixed_by_triton(kernel, plan, device, aligned)],
        lambda: [by_reference(_fixed(x.dtype, aligned), target, FIXED_KEY)],
    )
    if kernel is None:
        return False
    kernel.launch(device, addresses, count, plan.constants, (key,), aligned=aligned)
    return True


@lru_cache(maxsize=1024)
def plan_for(dtype: torch.dtype, target: Target) -> Plan:
    """Return the plan of a dtype and a target."""
    known = constants(target, WORD64 if dtype == torch.float64 else WORD32)
    kernel = triton_kernel(dtype, target.mode, known[:3])
    kind, name = (dtype, target.mode, *known[:3]), f"quantize of {dtype}"
    return Plan(kernel, kernel.arguments(known.words), kind, name)


@cache
def triton_kernel(dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool]) -> TensorKernel:
    """Return the kernel of a dtype, a mode, and the path, plainness and saturation of `Constants`."""
    return TensorKernel(rounding_table(dtype, mode, kind))


def _fixed(dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    fixed = fixed_elements(dtype)
    return fixed[: fixed.numel() // VECTOR * VECTOR] if aligned else fixed


def _fixed_by_triton(kernel: TensorKernel, plan: Plan, device: torch.device, aligned: bool) -> torch.Tensor:
    x = _fixed(plan.kind[0], aligned)
    here, there = (fixed_memory(x, device, aligned) for _ in range(2))
    kernel.launch(device, (address(here), address(there)), x.numel(), plan.constants, (FIXED_KEY,), aligned=aligned)
    return there.cpu()
