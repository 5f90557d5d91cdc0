"""Copies of tensors that keep their strides, as the order in which a sum is made follows them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...kernels import untraced

# Kernels choose by how far the first element, and each row, is from a multiple of this many bytes.
_ALIGNMENT = 64
# A part of a tensor that lies in more than so many times its own memory is moved together.
_SPREAD = 4


def times_power_of_two(gradient: Tensor, exponent: int) -> Tensor:
    """The gradient times 2^exponent, with the strides that it had.

    >>> times_power_of_two(torch.ones(1), -2)
    tensor([0.2500])
    """
    if not exponent:
        return gradient
    # Two tensors without dimensions would give the wider type.
    plain = type(gradient) is Tensor and gradient.layout is torch.strided and gradient.dim()
    return with_strides_of(gradient * (power_of_two(exponent) if plain else 2.0**exponent), gradient)


@functools.cache
def power_of_two(exponent: int) -> Tensor:
    """2^exponent as a tensor without dimensions, by which torch multiplies in half the time of a Python number's.

    >>> power_of_two(-2)
    tensor(0.2500, dtype=torch.float64)
    """
    return torch.tensor(2.0**exponent, dtype=torch.float64, device="cpu")


def with_strides_of(values: Tensor, like: Tensor) -> Tensor:
    """Values that were made element by element of a tensor, with that tensor's strides.

    torch makes the result of a part of a larger tensor, or of an expanded one, contiguous; a sum over it, or a product,
    is then made in another order, which may change the last bit. Tensor subclasses and sparse tensors are given back.
    """
    if like.layout is not torch.strided or type(like) is not Tensor:
        return values
    aligned = not like.storage_offset() * like.element_size() % _ALIGNMENT
    if aligned and (like.is_contiguous() or values.stride() == like.stride()):
        return values
    return _placed(values, like) if like.numel() else values


def _placed(values: Tensor, like: Tensor) -> Tensor:
    """The values in new memory, with the strides of another tensor, and as far from an aligned place."""
    size, unit = like.shape, _ALIGNMENT // like.element_size() or 1
    # What is expanded is kept once.
    kept = [1 if s == 0 else n for n, s in zip(size, like.stride())]
    stride = list(like.stride())
    if _length(kept, stride) > _SPREAD * math.prod(kept):
        stride = _together(kept, stride, unit)
    offset = like.storage_offset() % unit
    memory = torch.empty(offset + _length(kept, stride), dtype=values.dtype, device=values.device)
    memory.as_strided(kept, stride, offset).copy_(values.as_strided(kept, values.stride(), values.storage_offset()))
    return memory.as_strided(size, stride, offset)


def _length(size: list[int], stride: list[int]) -> int:
    """How many elements lie between the first and the last, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(size, stride))


def _together(size: list[int], stride: list[int], unit: int) -> list[int]:
    """Strides without gaps that keep each dimension's alignment, and which dimensions are contiguous."""
    found, old, new = list(stride), 1, 1
    for i in sorted((i for i, n in enumerate(size) if n > 1), key=lambda i: stride[i]):
        # The next place that is as aligned as the old one; a dimension that lay apart from the last still does.
        if stride[i] > old:
            new += 1 + (stride[i] - new - 1) % unit
        old, found[i] = stride[i] * size[i], new
        new *= size[i]
    return found


class CopyWithStrides(torch.autograd.Function):
    """A copy with the tensor's strides, where ``clone`` would make it contiguous."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        """Return a copy of the values with their strides."""
        return with_strides_of(tensor.clone(), tensor)

    @staticmethod
    @untraced
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient


def is_custom(node: Any) -> bool:
    """Whether a node is that of a custom Function, and not of a `CopyWithStrides`."""
    return isinstance(node, BackwardCFunction) and type(node) is not CopyWithStrides._backward_cls


def copy_with_strides(tensor: Tensor) -> Tensor:
    """A copy with the tensor's strides that autograd records, with a node of its own."""
    out = tensor.clone()
    if out.stride() == tensor.stride() or tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return out
    return CopyWithStrides.apply(tensor)
