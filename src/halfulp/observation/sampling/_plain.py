"""The numbers behind any tensor as contiguous plain memory: a payload, a decoded value, a shard, a copy in order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels import plain, plain_address
from ...mctensor import MCTensor
from ...optim.parameters._local_tensors import local
from ...scaled import ScaledTensor

_NARROW = (torch.float16, torch.bfloat16)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


class Stored(NamedTuple):
    """A tensor's numbers.

    Attributes:
        flat: contiguous, without history, of any shape; payload of a scaled tensor, values of an expansion.
        dtype: of its storage: a payload's, a component's.
        scale: its values are `flat` times this.
    """

    flat: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0


def stored(tensor: torch.Tensor) -> Stored | None:
    """Return a tensor's numbers in row-major order; None where it holds none that can be read.

    Floating-point tensors only; of a DTensor the shard on this process. A sparse, quantized, nested, fake or meta
    tensor, and one inside a transform of torch.func, has none.
    """
    if tensor.dtype in _FLOATS and plain_address(tensor):
        return Stored(tensor.detach(), tensor.dtype)
    tensor = local(tensor)
    if not tensor.dtype.is_floating_point:
        return None
    try:
        if isinstance(tensor, ScaledTensor):
            payload = plain(tensor.payload.detach())
            return Stored(payload.contiguous(), payload.dtype, float(tensor.scale))
        if isinstance(tensor, MCTensor):
            dtype = tensor.components[0].dtype
            decoded = tensor.detach().decode(torch.float32 if dtype in _NARROW else torch.float64)
            return Stored(plain(decoded).contiguous(), dtype)
        flat = plain(tensor.detach())
    except TypeError:
        return None
    return Stored(flat if flat.is_contiguous() else flat.contiguous(), flat.dtype)
