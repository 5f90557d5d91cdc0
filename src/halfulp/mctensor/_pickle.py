"""Pickle and torch.save: plain tensors and a version, nothing that weights_only refuses; batches of a DataLoader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic import Parts

if TYPE_CHECKING:
    from ._mctensor import MCTensor

VERSION = 1


def reduced(x: MCTensor) -> tuple:
    """What pickle stores: history is left out, the gradient too, as for every tensor."""
    if not x.is_leaf:
        raise RuntimeError("only leaves can be pickled, as for every tensor: save x.detach()")
    parts = tuple(part.detach() for part in x._parts)
    return rebuild_mctensor, (VERSION, parts, x._scale, x._gradients, x.requires_grad, getattr(x, "_is_param", False))


def rebuild_mctensor(
    version: int, parts: Parts, scale: Tensor | None, gradients: str, requires_grad: bool, is_parameter: bool
) -> MCTensor:
    """The tensor that `reduced` took apart.

    Raises:
        ValueError: the file was written by a version of another layout.
    """
    from ._mctensor import wrap

    if version != VERSION:
        raise ValueError(
            f"this file holds MCTensors of layout {version}, and this version of halfulp reads layout {VERSION}: load "
            "it with the version that wrote it and save x.components and x.scale, which are plain tensors"
        )
    made = wrap(tuple(parts), scale, gradients)
    made.requires_grad_(requires_grad)
    if is_parameter:
        made._is_param = True
    return made


torch.serialization.add_safe_globals([rebuild_mctensor])


def collate(batch: list, *, collate_fn_map: dict | None = None) -> Tensor:
    """A DataLoader's batch of tensors with companions.

    torch's own makes plain memory for it in a worker, which would hold one component, or values without their scale.
    """
    return torch.stack(batch)


def register_collate(kind: type) -> None:
    """Let torch's default_collate make batches of a tensor class by `collate`."""
    torch.utils.data._utils.collate.default_collate_fn_map[kind] = collate
