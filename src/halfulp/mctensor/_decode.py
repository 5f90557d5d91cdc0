"""The operator halfulp::decode behind MCTensor.decode, with its derivative; compilers keep it in their graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import define_operator
from ._history import decoding_gradient, remember_decoding
from ._mctensor import MCTensor, decoded
from ._registry import implements

decode = define_operator(
    "decode(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: x.to(dtype, copy=True),
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
)


@implements(decode)
def decode_components(x: MCTensor, dtype: torch.dtype) -> Tensor:
    """Return the value as a plain tensor of a dtype, rounded once."""
    return decoded(x, dtype)


torch.library.register_autograd("halfulp::decode", decoding_gradient, setup_context=remember_decoding)
