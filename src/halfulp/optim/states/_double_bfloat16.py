"""A state as the sum of two bfloat16, after Collage (Yu et al., arXiv 2405.03637), which keeps v so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...kernels.scalar._operations import load16, store16, sub
from ._storage import BF16, bf16_nearest, bf16_real


@dataclass(frozen=True)
class DoubleBF16:
    """value = first + residual, both rounded to nearest: 16 bits, so that a share of 0.999 is kept, where 8 stall.

    Where the first is an infinity or NaN, the residual is zero.
    """

    random_bits: ClassVar[int] = 0
    columns: ClassVar[int] = 2

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the dtypes of both numbers."""
        return {name: (shape, torch.bfloat16), f"{name}_residual": (shape, torch.bfloat16)}

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values."""
        return BF16.decode(tensors[0]) + BF16.decode(tensors[1])

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store values; nothing is drawn."""
        first = BF16.encode(value, None)
        rest = value - BF16.decode(first)
        rest = torch.where((rest - rest) == 0, rest, 0.0)
        tensors[0].copy_(first)
        tensors[1].copy_(BF16.encode(rest, None))

    def bindings(self, k: int) -> dict[str, object]:
        """Return the device functions that load and store state k, by name."""
        return {"pair_real": pair_real, "pair_save": pair_save}

    def load_text(self, k: int, at: int) -> str:
        """Return source text that loads a value from columns `at` and `at` + 1."""
        return f"pair_real(a{at}, a{at + 1}, i)"

    def store_text(self, k: int, at: int, value: str, bits: str) -> str:
        """Return source text that stores a value."""
        return f"pair_save(a{at}, a{at + 1}, i, {value})"


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
    store16(residual, i, low if lost == lost else sub(low, low))
