"""Rounding by kernels, of the processor and of Triton, compared with the reference before their first use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..kernels import (
    SERIAL_BELOW,
    IndexMap,
    address,
    check_bits,
    chunks,
    require_same_bits,
    run_chunks,
    select_engine,
)
from ..kernels._engine import reference_in_this_thread
from ..kernels._subnormals import flushes
from ..kernels._table import ALIGNMENT
from ..kernels.triton._launch import ready
from ..kernels.triton._tensor_kernel import VECTOR, TensorKernel, fixed_memory, is_aligned
from ..kernels.vector._machine_function import Kernel, address_of
from ..kernels.vector._table_loop import compile_row
from ._table import FIXED_KEY, by_reference, fixed_elements, rounding_table
from ._target import WORD32, WORD64, Target, constants, layout_for


class TritonPlan(NamedTuple):
    """The kernel that rounds tensors of a dtype to a target, and all of its kind, with the target's constants.

    Its kind is the dtype, the mode, and the path, plainness and saturation of `Constants`.
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
        lambda: [by_reference(_fixed_elements(x.dtype, aligned), target, FIXED_KEY)],
    )
    if kernel is None:
        return False
    kernel.launch(device, addresses, count, plan.constants, (key,), aligned=aligned)
    return True


@lru_cache(maxsize=1024)
def plan_for(dtype: torch.dtype, target: Target) -> TritonPlan:
    """Return the plan of a dtype and a target."""
    known = constants(target, WORD64 if dtype == torch.float64 else WORD32)
    kernel = triton_kernel(dtype, target.mode, known[:3])
    kind, name = (dtype, target.mode, *known[:3]), f"quantize of {dtype}"
    return TritonPlan(kernel, kernel.arguments(known.words), kind, name)


@cache
def triton_kernel(dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool]) -> TensorKernel:
    """Return the kernel of a dtype, a mode, and the path, plainness and saturation of `Constants`."""
    return TensorKernel(rounding_table(dtype, mode, kind))


def _fixed_elements(dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    fixed = fixed_elements(dtype)
    return fixed[: fixed.numel() // VECTOR * VECTOR] if aligned else fixed


def _fixed_by_triton(kernel: TensorKernel, plan: TritonPlan, device: torch.device, aligned: bool) -> torch.Tensor:
    x = _fixed_elements(plan.kind[0], aligned)
    here, there = (fixed_memory(x, device, aligned) for _ in range(2))
    kernel.launch(device, (address(here), address(there)), x.numel(), plan.constants, (FIXED_KEY,), aligned=aligned)
    return there.cpu()


def run(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    """Round x into out (which may be x): contiguous tensors of one dtype and shape, or equally strided dense ones.

    Raises:
        NotImplementedError: the device does not round as the CPU does.
    """
    if x.device.type != "cpu":
        check_device(x, target, lambda elements, out: _run(elements, target, FIXED_KEY, out))
    _run(x, target, key, out)


def check_device(x: torch.Tensor, target: Hashable, round_into: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Raise NotImplementedError if the device of x rounds fixed elements of x's dtype otherwise than the CPU."""

    def rounded(device: torch.device) -> list[torch.Tensor]:
        elements = fixed_elements(x.dtype).to(device)
        out = torch.empty_like(elements)
        with reference_in_this_thread():  # what is asked is whether plain torch rounds there as here
            round_into(elements, out)
        return [out.cpu()]

    require_same_bits(x.device, f"quantize of {x.dtype}", (x.dtype, target), rounded, "Give x.cpu()")


def _run(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    if is_widened(target, x.dtype):
        wide = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        _run(x.to(torch.float64).contiguous(), target, key, wide)
        out.copy_(wide)
    else:
        chosen = engine_for(x)
        if chosen == "llvm":
            _run_kernel(x, target, key, out)
        elif chosen == "reference" or not round_by_triton(x, target, key, out):
            out.copy_(by_reference(x, target, key))


def is_widened(target: Target, dtype: torch.dtype) -> bool:
    """Return whether tensors of a narrower dtype are rounded as float64."""
    return dtype != torch.float64 and layout_for(target) is WORD64


class Plan(NamedTuple):
    """A target's kernel for tensors of a dtype, checked, its constants with their address, and an element's bytes."""

    target: Target
    dtype: torch.dtype
    kernel: Kernel
    words: np.ndarray
    at: int
    size: int


# Bytes of a result from which on it fits in no cache beside its input: stored past them it takes a fifth less time.
STREAMED = 1 << 24


def engine_for(x: torch.Tensor) -> str:
    """Return the engine that rounds a tensor: devices other than the CPU and CUDA have the reference alone."""
    return select_engine(x.device.type) if x.device.type in ("cpu", "cuda") else "reference"


def note_write(out: torch.Tensor) -> None:
    """Increment a tensor's version after a kernel wrote its memory, so that autograd and optimizers notice."""
    if not out.is_inference():
        increment_version((out,))


def _run_kernel(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    if x.numel() == 0:
        return
    round_memory(prepare(target, x.dtype), address(x), address(out), x.numel(), key)


@lru_cache(maxsize=1024)
def prepare(target: Target, dtype: torch.dtype, streams: bool = False) -> Plan:
    """Return the plan of rounding tensors of a dtype by a compiled kernel; it may store past the caches."""
    known = constants(target, WORD64 if dtype == torch.float64 else WORD32)
    kernel = _kernel(dtype, target.mode, known[:3], streams)
    plan = Plan(target, dtype, kernel, known.words, address_of(known.words), dtype.itemsize)
    _check(plan, (dtype, target.mode, *known[:3], streams))
    return plan


@cache
def _kernel(dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool], streams: bool) -> Kernel:
    return compile_row(f"quantize_{kind[0]}", rounding_table(dtype, mode, kind, streams))


def round_memory(plan: Plan, source: int, goal: int, count: int, key: int) -> None:
    """Round so many elements from one address to another."""
    if count * plan.size >= STREAMED and goal != source and goal % ALIGNMENT == 0:
        plan = prepare(plan.target, plan.dtype, True)
    _launch(plan, source, goal, count, key)


def _launch(plan: Plan, source: int, goal: int, count: int, key: int) -> None:
    number, lengths, table = _table(count)
    kernel, key = plan.kernel, key - (key >> 63 << 64)
    if (count < SERIAL_BELOW or torch.get_num_threads() == 1) and not flushes():
        kernel.run(kernel.pack(0, number, table, plan.at, 0, key, source, goal))
    else:
        run_chunks(kernel, lengths, table, plan.at, 0, key, source, goal)


def collide(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether x and out overlap partly."""
    a, b = address(x), address(out)
    return a != b and a < b + out.numel() * out.element_size() and b < a + x.numel() * x.element_size()


@lru_cache(maxsize=256)
def _table(numel: int) -> tuple[int, np.ndarray, int]:
    """Return the number of chunks, their lengths, a view of their table, and the table's address."""
    table = chunks(IndexMap.whole((numel,)), 0)
    return len(table), table[:, 2], address_of(table)


increment_version = torch._C._increment_version  # torch.autograd.graph's, which first asks what it was given
_checked: set = set()


def _check(plan: Plan, kind: tuple[Hashable, ...]) -> None:
    """Compare a compiled kernel's bits on fixed elements with the reference's, once per kind of kernel (a canary)."""
    if kind in _checked:
        return
    x = fixed_elements(plan.dtype)

    def fast() -> list[torch.Tensor]:
        out = torch.empty_like(x)
        _launch(plan, address(x), address(out), x.numel(), FIXED_KEY)
        return [out]

    check_bits(f"quantize ({plan.dtype}, {kind[2]})", fast, lambda: [by_reference(x, plan.target, FIXED_KEY)])
    _checked.add(kind)
