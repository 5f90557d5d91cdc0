"""Rules of complex results: they leave scaled tensors, as complex numbers carry no scale, and are plain values.

What follows in complex numbers is torch's own, and real parts and inverse transforms come back plain. A gradient that
returns through one is plain too; it meets scaled gradients as any plain tensor does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels import torch_operators
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import value_of
from .._vocabulary import decoded

aten = torch_operators("aten")

decoded(aten._fft_r2c.default, aten.complex.default, aten.polar.default, family="complex")


@implements(aten.view_as_complex.default, family="complex")
def view_as_complex(x: ScaledTensor) -> Tensor:
    """The values as complex numbers: a copy, as the payload's memory does not hold them."""
    return torch.view_as_complex(value_of(x).contiguous())
