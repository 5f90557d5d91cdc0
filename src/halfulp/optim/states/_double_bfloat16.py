"""A state as the sum of two bfloat16, after Collage (Yu et al., arXiv 2405.03637), which keeps v so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...kernels.scalar._operations import load16, select, store16, sub
from ._codec import TensorCodec
from ._storage import bf16_nearest, bf16_real


@dataclass(frozen=True)
class DoubleBF16(TensorCodec):
    """value = first + residual, both rounded to nearest: 16 bits, so that a share of 0.999 is kept, where 8 stall.

    Where the first is an infinity or NaN, the residual is zero.
    """

    random_bits: ClassVar[int] = 0
    columns: ClassVar[int] = 2

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the dtypes of both numbers."""
        return {name: (shape, torch.bfloat16), f"{name}_residual": (shape, torch.bfloat16)}

    def load(self, arrays: Sequence[Any], i: Any, scale: Any) -> Any:
        """Device function: the float32 of element i."""
        first, residual = arrays
        return pair_real(first, residual, i)

    def save(self, arrays: Sequence[Any], i: Any, value: Any, inverse: Any, random: Any) -> None:
        """Device function: store element i."""
        first, residual = arrays
        pair_save(first, residual, i, value)


def pair_real(first, residual, i):
    """Device function: the sum."""
    return bf16_real(load16(first, i)) + bf16_real(load16(residual, i))


def pair_save(first, residual, i, x):
    """Device function: the number nearest to x, and the one nearest to the rest."""
    code = bf16_nearest(x, x)
    store16(first, i, code)
    rest = x - bf16_real(code)
    lost = rest - rest
    low = bf16_nearest(rest, rest)
    store16(residual, i, select(lost == lost, low, sub(low, low)))
