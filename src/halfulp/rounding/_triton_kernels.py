"""Rounding by Triton: one launch per tensor, from the same device functions as the processor's kernels."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from ..kernels import address
from ..kernels.triton._tensor_kernel import TensorKernel, is_aligned, is_ready
from ._kernel_constants import WORD32, WORD64, Layout, constants
from ._reference import by_reference
from ._table import FIXED_KEY, fixed_elements, rounding_table
from ._target import Target

Kind = tuple[str, bool, bool]


def round_by_triton(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> bool:
    """Round x into out, as `run` takes them; return False if there is no Triton kernel."""
    count = x.numel()
    if count == 0:
        return True
    layout = WORD64 if x.dtype == torch.float64 else WORD32
    kind = constants(target, layout)[:3]
    addresses = address(x), address(out)
    aligned = is_aligned(addresses, count)
    kernel = triton_kernel(x.dtype, target.mode, kind)
    if not _is_ready(kernel, x.dtype, target, kind, x.device, aligned):
        return False
    kernel.launch(x.device, addresses, count, _arguments(kernel, target, layout), (key,), aligned=aligned)
    return True


@cache
def triton_kernel(dtype: torch.dtype, mode: int, kind: Kind) -> TensorKernel:
    """Return the kernel of a dtype, a mode, and the path, plainness and saturation of `Constants`."""
    return TensorKernel(rounding_table(dtype, mode, kind))


@lru_cache(maxsize=1024)
def _arguments(kernel: TensorKernel, target: Target, layout: Layout) -> tuple[int, ...]:
    return kernel.arguments(constants(target, layout).words)


def _is_ready(
    kernel: TensorKernel, dtype: torch.dtype, target: Target, kind: Kind, device: torch.device, aligned: bool
) -> bool:
    layout = WORD64 if dtype == torch.float64 else WORD32
    fixed = fixed_elements(dtype)
    x = fixed[: fixed.numel() // 16 * 16] if aligned else fixed

    def fast() -> list[torch.Tensor]:
        # Unaligned elements begin behind the start of memory of their own.
        here, there = (torch.empty(x.numel() + 1, dtype=dtype, device=device)[not aligned :] for _ in range(2))
        here, there = here[: x.numel()].copy_(x), there[: x.numel()]
        given = (address(here), address(there)), x.numel(), _arguments(kernel, target, layout), (FIXED_KEY,)
        kernel.launch(device, *given, aligned=aligned)
        return [there.cpu()]

    key = dtype, target.mode, kind, aligned
    name = f"quantize ({dtype}, {kind[0]})"
    return is_ready(name, key, device, fast, lambda: [by_reference(x, target, FIXED_KEY)])
