"""Pickle and torch.save of scaled tensors: plain tensors and a version, which weights_only accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..subclass._pickle import check_layout, saved_marks, with_saved_marks
from ._registry import CLASS_FUNCTIONS, Transient, class_function
from ._scaled_tensor import ScaledTensor, wrap

VERSION = 1


@class_function
def pickled_parts(x: ScaledTensor) -> tuple:
    """Return what pickle stores of a tensor: no history and no gradient, as for every tensor."""
    marks = saved_marks(x)
    if type(x._home) is Transient:
        x = CLASS_FUNCTIONS["with_dtypes"](x.detach(), x.dtype, x._home.storage)
    payload = x._payload.detach()
    # torch.load has no storage class for eight-bit floats.
    stored = payload.view(torch.uint8) if payload.element_size() == 1 else payload
    # Without a home the tuple is as in versions without homes, which then can read it.
    home = () if x._home is None else (x._home,)
    return rebuild_scaled_tensor, (VERSION, stored, payload.dtype, x._scale, x.dtype, *marks, *home)


def rebuild_scaled_tensor(
    version: int,
    stored: Tensor,
    storage: torch.dtype,
    scale: Tensor,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    home: torch.dtype | None = None,
) -> ScaledTensor:
    """Return the tensor of which `pickled_parts` stored the parts; files of torch.save hold this function's name.

    Raises:
        ValueError: the file was written by a version of another layout.
    """
    check_layout(version, VERSION, "ScaledTensor", "x.payload and x.scale")
    return with_saved_marks(wrap(stored.view(storage), scale, dtype, home), requires_grad, is_parameter)


torch.serialization.add_safe_globals([rebuild_scaled_tensor])
