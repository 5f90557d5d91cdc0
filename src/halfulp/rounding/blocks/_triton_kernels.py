"""Rounding in blocks by Triton: a launch per tensor, and one more where the tensor has a scale of its own."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch

from ...kernels import address
from ...kernels.triton._tensor_kernel import TensorKernel, is_aligned, is_ready
from .._kernel_constants import COUNT, Layout
from .._table import FIXED_KEY
from ._device_functions import TENSOR, UNIT
from ._reference import SMALLEST_NORMAL, blocks_by_reference
from ._table import Kind, fixed_rows, largest_table, rounding_table, words_of
from ._target import BlockTarget

# The words in memory of a tensor that has a scale of its own.
_SCALE, _UNIT, _DIVISOR, _LARGEST_ELEMENT = range(4)


def round_blocks_by_triton(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> bool:
    """Round contiguous x into out, which may be x; return False if there is no Triton kernel."""
    aligned = is_aligned((address(x), address(out)), x.numel())
    if not _is_ready(x, target, layout, aligned):
        return False
    _round(x, target, layout, key, out, aligned)
    return True


def _round(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor, aligned: bool) -> None:
    kind = Kind.of(x.dtype, target, layout)
    addresses, count, length = (address(x), address(out)), x.numel(), x.shape[-1] if x.dim() else 1
    kernel, memory = triton_kernel(x.dtype, kind, target.tensor_scale), None
    if target.tensor_scale:
        measure, memory = triton_measure(x.dtype, kind), _scale_words(target, x.device).clone()
        given = addresses, count, _arguments(measure, target, layout), (0,)
        measure.launch(x.device, *given, length=length, memory=address(memory), aligned=aligned)
        # As `tensor_scale` computes it; torch would multiply by the inverse of a number that is no tensor.
        torch.div(memory[_SCALE], memory[_DIVISOR], out=memory[_SCALE]).clamp_(min=SMALLEST_NORMAL)
        torch.mul(memory[_SCALE], memory[_LARGEST_ELEMENT], out=memory[_UNIT])
    at = 0 if memory is None else address(memory)
    given = addresses, count, _arguments(kernel, target, layout), (key,)
    kernel.launch(x.device, *given, length=length, memory=at, aligned=aligned)


@cache
def triton_kernel(dtype: torch.dtype, kind: Kind, tensor_scale: bool) -> TensorKernel:
    """Return the kernel that rounds."""
    in_memory = (2 * COUNT + TENSOR, 2 * COUNT + UNIT) if tensor_scale else ()
    return TensorKernel(rounding_table(dtype, kind), in_memory)


@cache
def triton_measure(dtype: torch.dtype, kind: Kind) -> TensorKernel:
    """Return the kernel that finds the largest of the finite blocks' largest magnitudes."""
    return TensorKernel(largest_table(dtype, kind))


@lru_cache(maxsize=1024)
def _arguments(kernel: TensorKernel, target: BlockTarget, layout: Layout) -> tuple[int, ...]:
    return kernel.arguments(words_of(target, layout, 1.0, target.element.max))


@lru_cache(maxsize=64)
def _scale_words(target: BlockTarget, device: torch.device) -> torch.Tensor:
    """A zero that takes the tensor's largest magnitude and becomes its scale, and what it is computed from."""
    numbers = [0.0, 0.0, target.element.max * target.scale.max, target.element.max]
    return torch.from_numpy(np.array(numbers, np.float32)).to(device)


def _is_ready(x: torch.Tensor, target: BlockTarget, layout: Layout, aligned: bool) -> bool:
    dtype, device, kind = x.dtype, x.device, Kind.of(x.dtype, target, layout)
    kernel = triton_kernel(dtype, kind, target.tensor_scale)
    ragged = kernel.is_ragged(x.shape[-1] if x.dim() else 1)
    rows = fixed_rows(dtype, 3 * target.block + 1 if ragged else 16 * target.block)

    def fast() -> list[torch.Tensor]:
        # Unaligned elements begin behind the start of memory of their own.
        memory = [torch.empty(rows.numel() + 1, dtype=dtype, device=device)[not aligned :] for _ in range(2)]
        here, there = (flat[: rows.numel()].view(rows.shape) for flat in memory)
        _round(here.copy_(rows), target, layout, FIXED_KEY, there, aligned)
        return [there.cpu()]

    key = dtype, kind, target.choice, target.tensor_scale, aligned, ragged
    name = f"quantize in blocks ({dtype})"
    return is_ready(name, key, device, fast, lambda: [blocks_by_reference(rows, target, FIXED_KEY)])
