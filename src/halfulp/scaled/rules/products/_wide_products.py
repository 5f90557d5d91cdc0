"""Products of float16 matrices with float32 results, by a device's own instructions where torch offers them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import define_operator, present, torch_operators

aten = torch_operators("aten")
_WIDE = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def wide_product(operator: OpOverload, a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices, or batches of some, of float16: exact products, summed in float32."""
    if present([_WIDE[operator]]) and has_wide_products(a.device):
        return _WIDE[operator](a, b, torch.float32)
    return operator(a.to(torch.float32), b.to(torch.float32))


def traced_wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `wide_product` of two matrices, or batches, as one operator of a graph.

    Compilers cannot ask the device while they trace, and not all of them know torch's products with another dtype.
    """
    product: Tensor = _traced(a, b)
    return product


def _of_matrices(a: Tensor, b: Tensor) -> Tensor:
    return wide_product(aten.mm.default if a.dim() == 2 else aten.bmm.default, a, b)


def _without_data(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)


_traced = define_operator("wide_product(Tensor a, Tensor b) -> Tensor", _of_matrices, _without_data)


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
