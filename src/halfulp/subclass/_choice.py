"""A choice between tensors and numbers that waits for no device."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return torch.where(condition, a, b), with numbers made where the condition lies.

    torch.where itself makes them in the host's memory, and waits for the device as it copies them.

    Args:
        condition: booleans.
        a: where the condition is true; a number takes the dtype of b, two numbers are float32.
        b: elsewhere, likewise.

    >>> choose(torch.tensor([True, False]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([1., 0.])
    """
    dtype = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), torch.float32)
    a, b = (x if isinstance(x, Tensor) else torch.full((), x, dtype=dtype, device=condition.device) for x in (a, b))
    return torch.where(condition, a, b)
