"""Compiled rounding: a target's device functions, compiled once each, checked against the reference, run in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import cache, lru_cache

import numpy as np
import torch

from ..kernels import (
    IndexMap,
    address,
    check_bits,
    chunks,
    plain_address,
    require_same_bits,
    run_chunks,
    select_engine,
)
from ..kernels._engine import choose_engine, reference_in_this_thread
from ..kernels.vector._machine_function import address_of
from ..kernels.vector._table_loop import compile_table
from ._kernel_constants import WORD32, WORD64, constants, layout_for
from ._reference import by_reference
from ._table import FIXED_KEY, fixed_elements, rounding_table
from ._target import Target
from ._triton_kernels import round_by_triton


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
    if x.dtype != torch.float64 and layout_for(target) is WORD64:
        wide = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        _run(x.to(torch.float64).contiguous(), target, key, wide)
        out.copy_(wide)
    else:
        chosen = engine_for(x)
        if chosen == "llvm":
            _run_compiled(x, target, key, out)
        elif chosen == "reference" or not round_by_triton(x, target, key, out):
            out.copy_(by_reference(x, target, key))


def engine_for(x: torch.Tensor) -> str:
    """Return the engine that rounds a tensor: devices other than the CPU and CUDA have the reference alone."""
    return select_engine(x.device.type) if x.device.type in ("cpu", "cuda") else "reference"


def run_at_once(
    x: torch.Tensor, source: int, target: Target, key: int, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Round plain memory on the processor without torch's dispatcher, which takes longer than a small tensor.

    Args:
        x: plain.
        source: its address.
        target: of x's dtype.
        key: of the random bits.
        out: where the result goes; None for a new tensor.

    Returns:
        The result; None where the operator is needed: `out` is not plain or does not fit, another engine is chosen, or
        words are widened.
    """
    dtype = x.dtype
    if choose_engine("cpu")[0] != "llvm" or (dtype != torch.float64 and layout_for(target) is WORD64):
        return None
    made = torch.empty_like(x) if out is None else out
    goal, count = plain_address(made), x.numel()
    if not goal or made.dtype is not dtype or made.shape != x.shape or (made.requires_grad and out is not None):
        return None
    if made.is_inference() and not torch.is_inference_mode_enabled():
        return None
    if source != goal and abs(source - goal) < count * dtype.itemsize:
        return None
    kernel, _, words = _prepared(target, dtype)
    _call(kernel, words, source, goal, count, key)
    if out is not None:
        note_write(out)
    return made


def note_write(out: torch.Tensor) -> None:
    """Increment the version of a tensor whose memory a kernel has written, by which autograd and optimizers see it."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _run_compiled(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    if x.numel() == 0:
        return
    kernel, _, words = _prepared(target, x.dtype)
    _call(kernel, words, address(x), address(out), x.numel(), key)


@lru_cache(maxsize=1024)
def _prepared(target: Target, dtype: torch.dtype) -> tuple[Callable, np.ndarray, int]:
    """Return a target's kernel, checked, its array of constants and where that lies."""
    known = constants(target, WORD64 if dtype == torch.float64 else WORD32)
    kernel, words = _kernel(dtype, target.mode, known[:3]), address_of(known.words)
    check_kernel(kernel, words, dtype, target, known[:3])
    return kernel, known.words, words


@cache
def _kernel(dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool]) -> Callable:
    return compile_table(f"quantize_{kind[0]}", rounding_table(dtype, mode, kind))


def _call(kernel: Callable, words: int, source: int, goal: int, count: int, key: int) -> None:
    lengths, chunk_table = _table(count)
    numbers = array("Q", (source, goal, key, 0))
    pointers = numbers.buffer_info()[0]
    run_chunks(kernel, lengths, chunk_table, pointers, pointers + 24, words, pointers + 16, 0, 0)


def collide(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether x and out overlap partly."""
    a, b = address(x), address(out)
    return a != b and a < b + out.numel() * out.element_size() and b < a + x.numel() * x.element_size()


@lru_cache(maxsize=256)
def _table(numel: int) -> tuple[np.ndarray, int]:
    """Return the lengths of the chunks, a view of their table, and the table's address."""
    table = chunks(IndexMap.whole((numel,)), 0)
    return table[:, 2], address_of(table)


_checked: set = set()


def check_kernel(
    kernel: Callable, words: int, dtype: torch.dtype, target: Target, kind: tuple[str, bool, bool]
) -> None:
    """The canary: once per compiled kernel, its bits on fixed elements are the reference's."""
    if (dtype, target.mode, kind) in _checked:
        return
    x = fixed_elements(dtype)

    def fast() -> list[torch.Tensor]:
        out = torch.empty_like(x)
        _call(kernel, words, address(x), address(out), x.numel(), FIXED_KEY)
        return [out]

    check_bits(f"quantize ({dtype}, {kind[0]})", fast, lambda: [by_reference(x, target, FIXED_KEY)])
    _checked.add((dtype, target.mode, kind))
