"""The numbers behind any tensor as contiguous plain memory: a payload, a decoded value, a shard, a copy in order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels import plain, undisturbed
from ...mctensor import MCTensor
from ...optim.parameters._local_tensors import local
from ...scaled import ScaledTensor

_NARROW = (torch.float16, torch.bfloat16)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


@undisturbed()
def _plain_keys() -> frozenset[int]:
    """Dispatch keys of tensors on the CPU whose pointer leads to their numbers, with and without autograd's.

    There is none of a sign, of zeros not written out, of a layout, of a transform or of a class of one's own.
    """
    kept = torch.empty(0, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        without = torch.empty(0, dtype=torch.float32, device="cpu")
    return frozenset(torch._C._dispatch_keys(one).raw_repr() for one in (kept, without))


_KEYS = _plain_keys()


def plain_address(tensor: torch.Tensor) -> int:
    """Return where the numbers of a contiguous plain tensor on the CPU lie; 0 for any other, and for an empty one.

    It holds where no mode of torch watches functions.

    >>> plain_address(torch.ones(3)) > 0, plain_address(torch.ones(2, 3).t()), plain_address(torch.ones(3).to_sparse())
    (True, 0, 0)
    """
    if type(tensor) not in PLAIN_TYPES or torch._C._dispatch_keys(tensor).raw_repr() not in _KEYS:
        return 0
    return tensor.data_ptr() if tensor.is_contiguous() else 0


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
