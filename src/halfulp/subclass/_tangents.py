"""Plain gradients converted to the tensor class that a compiled backward pass was traced for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import untraced

# torch calls this method of a gradient.
_CONVERSION = "__coerce_same_metadata_as_tangent__"
# By class: the function of a plain gradient and the traced tensor's __tensor_flatten__ context.
_converters: dict[type, Callable[[Tensor, Any], Tensor]] = {}


def register(kind: type[Tensor], convert: Callable[[Tensor, Any], Tensor]) -> None:
    """Register the function that converts plain gradients for compiled graphs whose outputs are of a class."""
    _converters[kind] = convert


@untraced
def _of_plain(gradient: Tensor, context: Any, expected: type | None = None) -> Tensor | None:
    """Convert a plain gradient to the class that torch expects; None (torch's error) where none is registered."""
    convert = None if expected is None else _converters.get(expected)
    return None if convert is None else convert(gradient.detach(), context)


# Of an output that the loss does not use, autograd hands over plain zeros.
setattr(torch.Tensor, _CONVERSION, _of_plain)
