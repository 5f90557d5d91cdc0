"""Rules of operators that move elements or commute with a positive factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import require_float64, torch_operators
from ..._dtypes import LOGICALS
from ..._operands import decode_values
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor, wrap
from .._vocabulary import data_movement, homogeneous

aten = torch_operators("aten")

data_movement(
    *(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.t.default, aten.transpose.int),
    *(aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.diagonal.default, aten.unfold.default),
    *(aten.as_strided.default, aten.clone.default, aten.flip.default, aten.roll.default, aten.repeat.default),
    *(aten.index_select.default, aten.gather.default, aten.index.Tensor, aten._unsafe_index.Tensor),
    *(aten.embedding.default, aten.take.default, aten.tril.default, aten.triu.default, aten.masked_select.default),
    family="pass-through",
)
data_movement(
    *(aten.view_copy.default, aten._reshape_copy.default, aten._reshape_alias_copy.default, aten.t_copy.default),
    *(aten.transpose_copy.int, aten.permute_copy.default, aten.expand_copy.default, aten.slice_copy.Tensor),
    *(aten.select_copy.int, aten.unsqueeze_copy.default, aten.squeeze_copy.default, aten.squeeze_copy.dim),
    *(aten.squeeze_copy.dims, aten.alias_copy.default, aten.detach_copy.default, aten.lift_fresh_copy.default),
    *(aten.split_copy.Tensor, aten.split_with_sizes_copy.default, aten.unbind_copy.int, aten.diagonal_copy.default),
    *(aten.unfold_copy.default, aten.as_strided_copy.default, aten.narrow_copy.default),
    family="pass-through",
)
homogeneous(aten.relu.default, aten.abs.default, aten.neg.default, family="pass-through")


@implements(aten._to_copy.default, family="pass-through")
def to_copy(
    x: ScaledTensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **layout: Any
) -> Tensor:
    """Another logical dtype or device: payload and scale as they are. Integers and truth values take the value."""
    if dtype is not None and dtype not in LOGICALS:
        return aten._to_copy.default(decode_values(x), dtype=dtype, device=device, memory_format=memory_format)
    if device is not None:
        require_float64(torch.device(device), "ScaledTensors")
    payload = aten._to_copy.default(x._payload, device=device, memory_format=memory_format)
    scale = aten._to_copy.default(x._scale, device=device)
    return wrap(payload, scale, dtype or x.dtype)


@implements(aten._local_scalar_dense.default, family="pass-through")
def local_scalar_dense(x: ScaledTensor) -> float:
    """The value as a Python number."""
    return aten._local_scalar_dense.default(decode_values(x, torch.float64))


def _on_payloads(operator: OpOverload) -> None:
    """Register what forward-mode derivatives ask of a tensor and its tangent: nothing of values."""
    implements(operator, family="pass-through")(
        lambda *tensors: operator(*(x._payload if isinstance(x, ScaledTensor) else x for x in tensors))
    )


_on_payloads(aten.is_same_size.default)
_on_payloads(aten._has_same_storage_numel.default)


@implements(aten.is_pinned.default, family="pass-through")
def is_pinned(x: ScaledTensor, device: Any = None) -> bool:
    """Return whether the payload lies in pinned memory."""
    return aten.is_pinned.default(x._payload, device)
