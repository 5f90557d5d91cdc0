"""Vector operations for formulas on plain tensors and MCTensors alike."""

from __future__ import annotations

import math

import torch

from ..mctensor import MCTensor


def round_to_plain(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the value as a plain tensor of a dtype, by default of the components' own."""
    if isinstance(x, MCTensor):
        if x.scale is None and dtype in (None, x.dtype) and not torch.is_grad_enabled():
            # Of canonical components the first is the value, rounded.
            return x.components[0]
        return x.decode(dtype or x.dtype)
    return x if dtype is None else x.to(dtype)


def match_width(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return x as wide as another value: with all components beside an MCTensor, rounded beside a plain tensor."""
    return x if isinstance(other, MCTensor) else round_to_plain(x)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return the length along the last dimension, which is kept; its derivative at 0 is 0."""
    squares = (x * x).sum(-1, keepdim=True)
    still = squares == 0
    return torch.where(still, squares, torch.where(still, torch.ones_like(squares), squares).sqrt())


def direction_and_length(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the direction and the length along the last dimension; where the length is 0, so is the direction.

    The largest magnitude is taken out first, so that no square leaves the range.
    """
    size = round_to_plain(x).detach().abs().amax(-1, keepdim=True)
    size = torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))
    part = x / size
    length = norm(part)
    return part / torch.where(length == 0, torch.ones_like(length), length), length * size


def split_tanh(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tanh(s / 2) and 1 - tanh(s / 2) = 2 / (e^s + 1), each to full relative accuracy.

    A length beyond the logarithm of the largest number would lead out of the range; it is cut there.
    """
    grown = length.clamp(max=0.98 * math.log(torch.finfo(length.dtype).max)).expm1()
    return grown / (grown + 2), 2 / (grown + 2)


def rotate(vector: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Rotate a vector by the rotation that takes one unit vector to another and moves nothing across both."""
    middle, _ = direction_and_length(start + end)
    return (
        vector - 2 * middle * (middle * vector).sum(-1, keepdim=True) + 2 * end * (start * vector).sum(-1, keepdim=True)
    )


def write(target: torch.Tensor, rows: torch.Tensor | None, value: torch.Tensor) -> None:
    """Assign value to target[rows], or to all of target, outside autograd."""
    if isinstance(target, MCTensor) and isinstance(value, MCTensor) and target.scale is None and value.scale is None:
        torch.autograd.graph.increment_version(target)
        for part, new in zip(target.components, value.components, strict=True):
            write(part.detach(), rows, new)
    elif rows is None:
        target.copy_(value)
    else:
        target[rows] = value
