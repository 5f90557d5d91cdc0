"""The rounding modes: frozen objects with a name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch


@dataclass(frozen=True)
class Rounding:
    """The base of the rounding modes, which choose between a number's two neighbours in a format."""

    name: ClassVar[str]


@dataclass(frozen=True)
class Nearest(Rounding):
    """The nearer neighbour; at a tie the one whose last digit is even (IEEE 754-2019, 4.3.1).

    >>> Nearest().name
    'nearest'
    """

    name: ClassVar[str] = "nearest"


@dataclass(frozen=True)
class TowardZero(Rounding):
    """The neighbour of smaller magnitude."""

    name: ClassVar[str] = "toward_zero"


@dataclass(frozen=True)
class Up(Rounding):
    """The larger neighbour: toward plus infinity."""

    name: ClassVar[str] = "up"


@dataclass(frozen=True)
class Down(Rounding):
    """The smaller neighbour: toward minus infinity."""

    name: ClassVar[str] = "down"


@dataclass(frozen=True)
class Stochastic(Rounding):
    """The upper neighbour with a probability equal to the fraction: on average, nothing is lost.

    With `lo <= |x| < hi` the neighbours and `f = (|x| - lo) / (hi - lo)`, the result is hi where `v < floor(2^31 f)`
    for 31 random bits v: with probability f, less than 2^-31 apart.

    Args:
        seed: None draws a key from torch's default generator at each call, so that `torch.manual_seed` governs and
            activation checkpointing replays the same bits. An integer makes every result a pure function of (seed,
            counter, element index): two calls with the same counter round alike.

    Raises:
        ValueError: If the seed is no integer in [0, 2^64).

    >>> Stochastic(seed=7)
    Stochastic(seed=7)
    """

    seed: int | None = None
    name: ClassVar[str] = "stochastic"

    def __post_init__(self) -> None:
        if self.seed is None:
            return
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**64:
            raise ValueError(f"a seed is an integer from 0 to 2^64 - 1, or None; got {self.seed!r}")
        # As a string it is a constant of a compiler's graph: see rounding._traced.
        object.__setattr__(self, "_signed_seed", str(self.seed - (self.seed >> 63 << 64)))

    if TYPE_CHECKING:

        @property
        def _signed_seed(self) -> str: ...

    @property
    def signed_seed(self) -> int:
        """The bits of the seed as a signed integer, as a torch operator takes it; 0 without one."""
        return 0 if self.seed is None else int(self._signed_seed)


MODES: dict[str, type[Rounding]] = {mode.name: mode for mode in (Nearest, TowardZero, Up, Down, Stochastic)}


def get_rounding(rounding: Rounding | str) -> Rounding:
    """The mode that a name stands for; a mode is handed back.

    Raises:
        ValueError: If the name is unknown; the message lists near ones.
        TypeError: If it is neither.

    >>> get_rounding("toward_zero")
    TowardZero()
    """
    if isinstance(rounding, Rounding):
        return rounding
    if not isinstance(rounding, str):
        hint = f"; call it: {rounding.__name__}()" if isinstance(rounding, type) else ""
        raise TypeError(f"a rounding is an object such as hu.Nearest() or a name, got {rounding!r}{hint}")
    key = rounding.strip().lower().replace("-", "_")
    if key in MODES:
        return MODES[key]()
    near = difflib.get_close_matches(key, MODES, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown rounding {rounding!r}: {meant}Known are {', '.join(MODES)}")


def rounding_names() -> list[str]:
    """Names of the modes.

    >>> rounding_names()
    ['nearest', 'toward_zero', 'up', 'down', 'stochastic']
    """
    return list(MODES)


def drawn_key() -> int:
    """Draw a key from torch's default generator."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))
