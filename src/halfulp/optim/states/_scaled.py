"""States as a narrow payload times a power of two per tensor: float16, e4m3fn or e5m2."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import float32_root
from ...kernels.scalar._operations import add, bit_and, select, shr, sqrt, sub, to_real, word
from ..stores._storage import ABS, EXPONENT, ONE, S8, TWO_M24, Store
from ._codec import TensorCodec

NONE, ZERO = np.uint32(0), np.float32(0.0)


@dataclass(frozen=True)
class Scaled(TensorCodec):
    """value = payload x scale, or its square for second moments, whose roots are stored: half the range, no sign.

    The scale is a power of two per tensor, chosen at each step from the largest finite magnitude that is about to be
    stored, so that it falls into the highest binade of the store: nothing overflows, and no digit is given away. Roots
    are rounded so that their square is right on average, and a positive one never to 0, which would divide by eps.
    """

    columns: ClassVar[int] = 2

    store: Store
    squared: bool
    stochastic: bool

    @property
    def random_bits(self) -> int:
        """Random bits of each rounding."""
        return self.store.random_bits if self.stochastic else 0

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of the payload and its scale."""
        return {name: (shape, self.store.dtype), f"{name}_scale": (torch.Size([]), torch.float32)}

    @property
    def to_nearest(self) -> Scaled:
        """The same codec without draws."""
        return dataclasses.replace(self, stochastic=False)

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """Store values under a scale of their own."""
        tensors[1].fill_(self.fitting(finite_amax(float32_root(value) if self.squared else value)))
        super().encode(tensors, value, random)

    def scale_inputs(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor | float]:
        """Return the present scale, and its inverse."""
        return {"scale": tensors[1], "inverse": 1.0 / tensors[1]}

    def fitting(self, largest: float) -> float:
        """Return the least power of two under which a magnitude fits into the payload; 1 for 0."""
        if largest == 0:
            return 1.0
        fraction, exponent = np.frexp(largest / torch.finfo(self.store.dtype).max)
        return float(2.0 ** int(np.clip(exponent - (fraction == 0.5), -126, 126)))

    def load(self, arrays: Sequence[Any], i: Any, scale: Any) -> Any:
        """Device function: the float32 of element i under a scale."""
        value = self.store.real(self.store.load(arrays[0], i)) * scale
        return value * value if self.squared else value

    def save(self, arrays: Sequence[Any], i: Any, value: Any, inverse: Any, random: Any) -> None:
        """Device function: store element i under the scale of an inverse."""
        store, x = self.store, self.measured(value) * inverse
        if not self.squared:
            code = (store.stochastic if self.stochastic else store.nearest)(x, random)
        else:
            code = store.nearest(x, random)
            if self.stochastic:
                code = root_below(code, store.real(code), x)
                code = root_code(code, store.real(code), store.real(add(code, ONE)), x, random)
            code = select((code == NONE) & (x > ZERO), ONE, code)
        store.save(arrays[0], i, code)

    def measured(self, value: Any) -> Any:
        """Device function: what must fit into the payload."""
        return sqrt(value) if self.squared else value


def root_below(code, value, x):
    """Device function: the code at or below a number that is not negative, from the nearest one."""
    return select(value > x, sub(code, ONE), code)


def root_code(code, low, high, x, random):
    """Device function: one of the two codes around a root, such that its square is right on average."""
    chance = to_real(shr(random, S8)) * TWO_M24
    return select(chance * ((high - low) * (high + low)) < (x - low) * (x + low), add(code, ONE), code)


def finite_word(x):
    """Device function: the word of |x|; 0 for infinities and NaN."""
    magnitude = bit_and(word(x), ABS)
    return select(magnitude < EXPONENT, magnitude, NONE)


def finite_amax(x: torch.Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    magnitude = x.abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax().item() if x.numel() else 0.0
