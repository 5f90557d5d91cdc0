"""Gradients in the form that a compiled backward pass was traced for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import untraced

# By class: a plain gradient, and what __tensor_flatten__ told of the traced one, as a gradient of that class.
_forms: dict[type[Tensor], Callable[[Tensor, Any], Tensor]] = {}


def register(kind: type[Tensor], form: Callable[[Tensor, Any], Tensor]) -> None:
    """From now on plain gradients may reach compiled graphs that gave tensors of this class."""
    _forms[kind] = form


@untraced
def _of_plain(gradient: Tensor, context: Any, expected: type | None = None) -> Tensor | None:
    """What torch asks a gradient of another class than a backward pass was traced for: its other form, or None."""
    form = _forms.get(expected)
    return None if form is None else form(gradient.detach(), context)


# Of an output that the loss does not use, autograd hands over plain zeros.
torch.Tensor.__coerce_same_metadata_as_tangent__ = _of_plain
