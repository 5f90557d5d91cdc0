"""Support of tensor subclasses for pickle, torch.save and a DataLoader's batches."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Subclass = TypeVar("Subclass", bound=Tensor)


def saved_marks(x: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor requires a gradient and is a parameter: what pickle stores of its autograd state.

    Raises:
        RuntimeError: it is no leaf.
    """
    if not x.is_leaf:
        raise RuntimeError("only leaves can be pickled, as for every tensor: save x.detach()")
    return x.requires_grad, getattr(x, "_is_param", False)


def with_saved_marks(x: Subclass, requires_grad: bool, is_parameter: bool) -> Subclass:
    """Return the tensor with what `saved_marks` returned of the stored one."""
    x.requires_grad_(requires_grad)
    if is_parameter:
        x._is_param = True
    return x


def check_layout(layout: int, own: int, kind: str, parts: str) -> None:
    """Raise unless a file has the layout that this version reads.

    Args:
        layout: the file's.
        own: the one that this version writes.
        kind: the tensor class's name.
        parts: the expressions that give its plain tensors, for the message.

    Raises:
        ValueError: the layouts differ.
    """
    if layout != own:
        raise ValueError(
            f"this file holds {kind}s of layout {layout}, and this version of halfulp reads layout {own}: load "
            f"it with the version that wrote it and save {parts}, which are plain tensors"
        )


def collate(batch: list[Tensor], *, collate_fn_map: dict[Any, Any] | None = None) -> Tensor:
    """Stack a DataLoader's batch of tensors of a subclass.

    torch's own makes plain memory for it in a worker, which would hold one component, or values without their scale.
    """
    return torch.stack(batch)


def register_collate(kind: type[Tensor]) -> None:
    """Let torch's default_collate make batches of a tensor class by `collate`."""
    torch.utils.data._utils.collate.default_collate_fn_map[kind] = collate
