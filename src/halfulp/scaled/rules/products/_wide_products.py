"""Products of float16 matrices with float32 results, by a device's own instructions where torch offers them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import present, torch_operators

aten = torch_operators("aten")
_WIDE = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def wide_product(operator: OpOverload, a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices, or batches of some, of float16: exact products, summed in float32."""
    if present([_WIDE[operator]]) and has_wide_products(a.device):
        return _WIDE[operator](a, b, torch.float32)
    return operator(a.to(torch.float32), b.to(torch.float32))


@functools.cache
def has_wide_products(device: torch.device) -> bool:
    """Return whether torch multiplies float16 matrices on a device into float32 results: newer versions do on CUDA."""
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(2, 16, 16, dtype=torch.float16, device=device)
        aten.bmm.dtype(ones, ones, torch.float32)
        aten.mm.dtype(ones[0], ones[1], torch.float32)
    except (NotImplementedError, RuntimeError):  # of other versions, and of ROCm
        return False
    return True
