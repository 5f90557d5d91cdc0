"""States as a narrow payload times a power of two per tensor: float16, e4m3fn or e5m2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...kernels import float32_root
from ...kernels.scalar._operations import add, bit_and, shr, sub, to_real, word
from ._storage import ABS, EXPONENT, ONE, S8, TWO_M24, Store


@dataclass(frozen=True)
class Scaled:
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

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values."""
        value = self.store.decode(tensors[0]) * tensors[1]
        return value * value if self.squared else value

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store values under a scale of their own."""
        value = float32_root(value) if self.squared else value
        tensors[1].fill_(self.fitting(finite_amax(value)))
        self.encode_payload(tensors, value / tensors[1], random)

    def encode_payload(self, tensors: list[torch.Tensor], x: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store payloads (roots for second moments) under the present scale."""
        if self.squared:
            tensors[0].copy_(self._roots(x, random if self.stochastic else None))
        else:
            tensors[0].copy_(self.store.encode(x, random if self.stochastic else None))

    def _roots(self, x: torch.Tensor, random: torch.Tensor | None) -> torch.Tensor:
        decode, words = self.store.decode, _words(self.store)
        code = self.store.encode(x, None).view(words).to(torch.int64) & _mask(self.store)
        if random is not None:
            code = torch.where(decode(_tensor(code, self.store)) > x, code - 1, code)
            low, high = (decode(_tensor(c, self.store)) for c in (code, code + 1))
            chance = (random >> 8).float() * 2.0**-24
            code = code + (chance * ((high - low) * (high + low)) < (x - low) * (x + low)).to(torch.int64)
        return _tensor(torch.where((code == 0) & (x > 0), 1, code), self.store)

    def fitting(self, largest: float) -> float:
        """Return the least power of two under which a magnitude fits into the payload; 1 for 0."""
        if largest == 0:
            return 1.0
        fraction, exponent = np.frexp(largest / torch.finfo(self.store.dtype).max)
        return float(2.0 ** int(np.clip(exponent - (fraction == 0.5), -126, 126)))

    def bindings(self, k: int) -> dict[str, object]:
        """Return the device functions of state k, by name."""
        store = self.store
        rounded = store.stochastic if self.stochastic else store.nearest
        own = {f"load_{k}": store.load, f"save_{k}": store.save, f"real_{k}": store.real, f"round_{k}": rounded}
        shared = {"squared": squared, "root_below": root_below, "root_code": root_code, "ONE": ONE}
        return {**own, f"nearest_{k}": store.nearest, **shared}

    def load_text(self, k: int, at: int) -> str:
        """Return source text that loads a value from column `at`; its scale is the constant `scale_k`."""
        value = f"real_{k}(load_{k}(a{at}, i)) * scale_{k}"
        return f"squared({value})" if self.squared else value

    def store_text(self, k: int, at: int, value: str, bits: str) -> str:
        """Return source text that stores state k, divided by its new scale (times the constant `inverse_k`)."""
        if not self.squared:
            return f"save_{k}(a{at}, i, round_{k}({value} * inverse_{k}, {bits}))"
        x, code = f"x_{k}", f"code_{k}"
        steps = [f"{x} = sqrt({value}) * inverse_{k}", f"{code} = nearest_{k}({x}, UNDRAWN)"]
        if self.stochastic:
            steps += [
                f"{code} = root_below({code}, real_{k}({code}), {x})",
                f"{code} = root_code({code}, real_{k}({code}), real_{k}(add({code}, ONE)), {x}, {bits})",
            ]
        steps += [f"{code} = ONE if {code} == UNDRAWN and {x} > ZERO else {code}", f"save_{k}(a{at}, i, {code})"]
        return "; ".join(steps)

    def measured(self, k: int) -> str:
        """Return source text of the value that must fit into the payload."""
        return f"sqrt(n{k})" if self.squared else f"n{k}"


def squared(x):
    """Device function: the square."""
    return x * x


def root_below(code, value, x):
    """Device function: the code at or below a number that is not negative, from the nearest one."""
    return sub(code, ONE) if value > x else code


def root_code(code, low, high, x, random):
    """Device function: one of the two codes around a root, such that its square is right on average."""
    chance = to_real(shr(random, S8)) * TWO_M24
    return add(code, ONE) if chance * ((high - low) * (high + low)) < (x - low) * (x + low) else code


def higher(top, x):
    """Device function: the larger of a word and that of |x|; infinities and NaN do not count."""
    magnitude = bit_and(word(x), ABS)
    finite = magnitude if magnitude < EXPONENT else top
    return finite if finite > top else top


def finite_amax(x: torch.Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    magnitude = x.abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax().item() if x.numel() else 0.0


def _words(store: Store) -> torch.dtype:
    return torch.int16 if store.dtype.itemsize == 2 else torch.uint8


def _mask(store: Store) -> int:
    return (1 << 8 * store.dtype.itemsize) - 1


def _tensor(code: torch.Tensor, store: Store) -> torch.Tensor:
    """Return the numbers of codes; a code outside the store's range is never selected."""
    return (code & _mask(store)).to(torch.int16 if _words(store) == torch.int16 else torch.uint8).view(store.dtype)
