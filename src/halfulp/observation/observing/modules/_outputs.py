"""Tensors among what a module is given and returns: tuples, dicts, the outputs of transformers' models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

MOST_OUTPUTS = 16


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a nested tuple, list, or mapping, such as a model's output."""
    stack, count = [value], 0
    while stack and count < MOST_OUTPUTS:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if item.dtype.is_floating_point:
                count += 1
                yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, tuple | list):
            stack.extend(reversed(item))


def loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss among a model's outputs, where it is one: `output.loss`, or a single number."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor) and loss.dtype.is_floating_point and loss.numel() == 1 and loss.requires_grad:
        return loss.detach()
    return None
