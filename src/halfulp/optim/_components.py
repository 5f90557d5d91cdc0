"""The weight as an unevaluated sum of n narrow components (Yu et al., arXiv 2207.08867), grown by error-free sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..kernels._scalar import sub
from ._bound import weight_load, weight_nearest, weight_real, weight_save
from ._kahan import Kahan
from ._stores import Store
from ._weight_update import Parts, WeightUpdate, register, store_bindings


@dataclass(frozen=True)
class Components(WeightUpdate):
    """p + c_1 + ... + c_(n-1), each at most half an ulp of the one before, all to nearest.

    n = 2 is Kahan with a nearest residual, bit for bit; 3 bfloat16 components carry as many bits as a float32.

    Args:
        n: 2, 3 or 4.

    >>> Components(3)
    Components(n=3)
    """

    name: ClassVar[str] = "components"
    compensates: ClassVar[bool] = True
    n: int = 2

    def __post_init__(self) -> None:
        if self.n not in (2, 3, 4):
            raise ValueError(f"Components({self.n!r}): allowed are 2, 3 and 4")

    def check(self, store: Store) -> None:
        """Not for float32 as such."""
        if store.name == "fp32":
            raise ValueError("weight_update 'components' is for narrow parameters: give 16-bit ones, or format=")

    def companions(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        """The components behind the parameter."""
        names = ("residual",) if self.n == 2 else tuple(f"component_{k}" for k in range(1, self.n))
        return tuple((name, store.dtype) for name in names)

    def bindings(self, store: Store) -> dict[str, object]:
        """Pieces for n components."""
        if self.n == 2:
            return _KAHAN.bindings(store)
        pieces = (read_three, write_three) if self.n == 3 else (read_four, write_four)
        return dict(zip(("read_weight", "write_weight"), pieces)) | store_bindings(store, False)

    def read(self, store: Store, parts: Parts) -> torch.Tensor:
        """The sum, smallest first."""
        if self.n == 2:
            return _KAHAN.read(store, parts)
        total = store.decode(parts[-1])
        for part in reversed(parts[:-1]):
            total = store.decode(part) + total
        return total

    def write(self, store: Store, parts: Parts, u: torch.Tensor, draws: Parts) -> torch.Tensor:
        """Sweep the update through the components from the smallest up, then cut the exact sum from the top."""
        if self.n == 2:
            return _KAHAN.write(store, parts, u, draws)
        high, low = _two_sum(store.decode(parts[-1]), u)
        for part in reversed(parts[:-1]):
            high, error = _two_sum(store.decode(part), high)
            low = low + error
        return self._cut(store, parts, high, low)

    def fill(self, store: Store, parts: Parts, value: torch.Tensor) -> None:
        """Cut the value from the top."""
        if self.n == 2:
            _KAHAN.fill(store, parts, value)
        else:
            self._cut(store, parts, value, torch.zeros_like(value))

    def _cut(self, store: Store, parts: Parts, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        lost = torch.zeros_like(high, dtype=torch.bool)
        for part in parts:
            code = store.encode(torch.where(lost, 0.0, high), None)
            shown = store.decode(code)
            rest = high - shown
            lost = lost | ((rest - rest) != 0)
            high, low = _two_sum(rest, low)
            part.copy_(code)
        return self.read(store, parts)


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a + b rounded, and the rounding's error exactly (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


ZERO = np.float32(0.0)


def two_sum(a, b):
    """Piece: a + b rounded, and the rounding's error exactly."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def component(address, i):
    """Piece: one component."""
    return weight_real(weight_load(address, i))


def save_component(address, i, high, low, lost):
    """Piece: cut the leading component off high + low; behind an infinity or NaN follow zeros."""
    code = weight_nearest(high, high)
    code = code if lost == lost else sub(code, code)
    weight_save(address, i, code)
    rest = high - weight_real(code)
    high, low = two_sum(rest, low)
    return high, low, lost + (rest - rest)


def read_three(a0, a1, a2, a3, i):
    """Piece: the sum of three, smallest first."""
    w = component(a0, i) + (component(a1, i) + component(a2, i))
    return w, w, w, w


def read_four(a0, a1, a2, a3, i):
    """Piece: the sum of four, smallest first."""
    w = component(a0, i) + (component(a1, i) + (component(a2, i) + component(a3, i)))
    return w, w, w, w


def write_three(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1):
    """Piece: sweep up through three components, cut from the top."""
    high, e2 = two_sum(component(a2, i), u)
    high, e1 = two_sum(component(a1, i), high)
    high, e0 = two_sum(component(a0, i), high)
    low = (e2 + e1) + e0
    high, low, lost = save_component(a0, i, high, low, ZERO)
    high, low, lost = save_component(a1, i, high, low, lost)
    save_component(a2, i, high, low, lost)
    return read_three(a0, a1, a2, a3, i)[0]


def write_four(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1):
    """Piece: sweep up through four components, cut from the top."""
    high, e3 = two_sum(component(a3, i), u)
    high, e2 = two_sum(component(a2, i), high)
    high, e1 = two_sum(component(a1, i), high)
    high, e0 = two_sum(component(a0, i), high)
    low = ((e3 + e2) + e1) + e0
    high, low, lost = save_component(a0, i, high, low, ZERO)
    high, low, lost = save_component(a1, i, high, low, lost)
    high, low, lost = save_component(a2, i, high, low, lost)
    save_component(a3, i, high, low, lost)
    return read_four(a0, a1, a2, a3, i)[0]


_KAHAN = Kahan(residual="nearest")
register(Components())
