"""Pickle and torch.save: plain tensors and a version, nothing that weights_only refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import class_function
from ._scaled_tensor import ScaledTensor, wrap

VERSION = 1


@class_function
def pickled_parts(x: ScaledTensor) -> tuple:
    """What pickle stores: history is left out, the gradient too, as for every tensor."""
    if not x.is_leaf:
        raise RuntimeError("only leaves can be pickled, as for every tensor: save x.detach()")
    marks = (x.requires_grad, getattr(x, "_is_param", False))
    payload = x._payload.detach()
    # torch.load knows no storages of eight-bit floats.
    stored = payload.view(torch.uint8) if payload.element_size() == 1 else payload
    # Without a home as before there were any, so that older versions read it.
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
    """The tensor that `reduced` took apart.

    Raises:
        ValueError: the file was written by a version of another layout.
    """
    if version != VERSION:
        raise ValueError(
            f"this file holds ScaledTensors of layout {version}, and this version of halfulp reads layout {VERSION}: "
            "load it with the version that wrote it and save x.payload and x.scale, which are plain tensors"
        )
    made = wrap(stored.view(storage), scale, dtype, home)
    made.requires_grad_(requires_grad)
    if is_parameter:
        made._is_param = True
    return made


torch.serialization.add_safe_globals([rebuild_scaled_tensor])
