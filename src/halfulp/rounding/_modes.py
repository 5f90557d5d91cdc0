"""The rounding modes: frozen objects with a name."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from .._names import read_own_docstring, register_entry
from ..kernels import Traced
from ..kernels._device_function import ElementTraceBuilder, call_users_function

RoundingClass = TypeVar("RoundingClass", bound="type[Rounding]")


@dataclass(frozen=True)
class Rounding:
    """The base of the rounding modes, which choose between a number's two neighbours in a format."""

    name: ClassVar[str]

    @staticmethod
    def goes_away(fraction: Any, half: Any, odd: Any, negative: Any) -> Any:
        """Return whether a number that lies between two neighbours goes to the one farther from 0: a device function.

        All modes but `Nearest` and `Stochastic` define it, which have faster device functions.

        Args:
            fraction: how far the number is from the nearer one to 0, in units of the spacing, as an unsigned word:
                never 0.
            half: the word of one half.
            odd: whether the last digit of the neighbour nearer to 0 is odd.
            negative: whether the number is negative.

        Returns:
            A mask: comparisons of words, and & | ~ of masks.
        """
        raise NotImplementedError("the mode defines goes_away(fraction, half, odd, negative): see hu.rounding.Rounding")


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

    @staticmethod
    def goes_away(fraction: Any, half: Any, odd: Any, negative: Any) -> Any:
        """Never."""
        return negative & ~negative


@dataclass(frozen=True)
class Up(Rounding):
    """The larger neighbour: toward plus infinity."""

    name: ClassVar[str] = "up"

    @staticmethod
    def goes_away(fraction: Any, half: Any, odd: Any, negative: Any) -> Any:
        """Where the number is positive."""
        return ~negative


@dataclass(frozen=True)
class Down(Rounding):
    """The smaller neighbour: toward minus infinity."""

    name: ClassVar[str] = "down"

    @staticmethod
    def goes_away(fraction: Any, half: Any, odd: Any, negative: Any) -> Any:
        """Where the number is negative."""
        return negative


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
        # As a string it is a constant of a compiler's graph: see `rounding._quantize`.
        object.__setattr__(self, "_signed_seed", str(self.seed - (self.seed >> 63 << 64)))

    if TYPE_CHECKING:

        @property
        def _signed_seed(self) -> str: ...

    @property
    def signed_seed(self) -> int:
        """The bits of the seed as a signed integer, as a torch operator takes it; 0 without one."""
        return 0 if self.seed is None else int(self._signed_seed)


ROUNDING_CLASS_BY_NAME: dict[str, type[Rounding]] = {
    mode.name: mode for mode in (Nearest, TowardZero, Up, Down, Stochastic)
}
_BUILT_IN_NAMES = tuple(ROUNDING_CLASS_BY_NAME)
_GOES_AWAY_PARAMETERS = ["fraction", "half", "odd", "negative"]


def register_rounding(kind: RoundingClass) -> RoundingClass:
    """Register a rounding of one's own under its name, for `quantize` and all that rounds (a class decorator).

    It says by `Rounding.goes_away` which neighbour is taken, for every format, dtype and processor. Numbers beyond a
    format's largest overflow as those do that round to nearest. Optimizers' weight updates and states round to nearest
    or stochastically alone.

    Raises:
        TypeError: it is no subclass of `Rounding` with a name, or `goes_away` is no static method of the four
            arguments, or no device function that returns a mask.
        ValueError: another rounding has the name, or the class has no docstring.

    >>> @register_rounding
    ... class HalfAwayFromZero(Rounding):
    ...     "The nearer neighbour; at a tie the one farther from zero."
    ...
    ...     name = "half_away_from_zero"
    ...
    ...     @staticmethod
    ...     def goes_away(fraction, half, odd, negative):
    ...         return fraction >= half
    >>> import halfulp as hu
    >>> hu.quantize(torch.tensor([0.5, 1.5, 2.5, -2.5]), "e8m1", "half_away_from_zero").tolist()
    [0.5, 1.5, 3.0, -3.0]
    """
    if not isinstance(kind, type) or not issubclass(kind, Rounding) or not isinstance(getattr(kind, "name", None), str):
        raise TypeError(f"a rounding is a subclass of hu.rounding.Rounding with a class attribute name, got {kind!r}")
    function = inspect.getattr_static(kind, "goes_away")
    is_own = isinstance(function, staticmethod) and function is not inspect.getattr_static(Rounding, "goes_away")
    if not is_own or list(inspect.signature(kind.goes_away).parameters) != _GOES_AWAY_PARAMETERS:
        raise TypeError(f"{kind.__name__} defines no static method goes_away({', '.join(_GOES_AWAY_PARAMETERS)})")
    name, own = kind.name, ROUNDING_CLASS_BY_NAME.get(kind.name)
    if name != _normalize_name(name) or not name.isidentifier():
        raise ValueError(f"the name {name!r} of a rounding: give lower-case letters, digits and underscores")
    recorded = _record_mode_decision(kind)
    if name in _BUILT_IN_NAMES or (own is not None and _recorded_decision_by_name[name] != recorded):
        # Kernels of the other one may have been compiled.
        raise ValueError(f"rounding {name!r} exists already: choose another name for {kind.__name__}")
    register_entry("rounding", ROUNDING_CLASS_BY_NAME, name, kind, read_own_docstring(kind))
    _recorded_decision_by_name[name] = recorded
    return kind


# What registered roundings do, recorded: a module may be loaded again, but not with another function of the name.
_recorded_decision_by_name: dict[str, tuple[object, ...]] = {}


def _record_mode_decision(kind: type[Rounding]) -> tuple[object, ...]:
    """Return the instructions of a mode's decision on words of 32 and 64 bits.

    Raises:
        TypeError: it is no mask, or the mode uses what device functions lack.
    """
    found: list[object] = []
    for width in ("w32", "w64"):
        element = ElementTraceBuilder(0)
        given = [
            element.add_input(name, one) for name, one in zip(_GOES_AWAY_PARAMETERS, (width, width, "mask", "mask"))
        ]
        away = call_users_function(kind.goes_away, *given)
        if not isinstance(away, Traced) or away.kind != "mask":
            raise TypeError(f"goes_away of rounding {kind.name!r} returns {away!r}: return a mask, as fraction > half")
        found += [element.trace.digest(), away.number]
    return tuple(found)


def _normalize_name(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def get_rounding(rounding: Rounding | str) -> Rounding:
    """Return the mode that a name stands for; a mode is handed back.

    Raises:
        ValueError: If the name is unknown; the message lists near ones.
        TypeError: If it is neither.

    >>> get_rounding("toward_zero")
    TowardZero()
    """
    if isinstance(rounding, Rounding):
        if not isinstance(rounding, ROUNDING_CLASS_BY_NAME.get(rounding.name, ())):
            kind = type(rounding).__name__
            raise TypeError(f"{kind} is no registered rounding: register the class by hu.rounding.register_rounding")
        return rounding
    if not isinstance(rounding, str):
        hint = f"; call it: {rounding.__name__}()" if isinstance(rounding, type) else ""
        raise TypeError(f"a rounding is an object such as hu.Nearest() or a name, got {rounding!r}{hint}")
    key = _normalize_name(rounding)
    if key in ROUNDING_CLASS_BY_NAME:
        return ROUNDING_CLASS_BY_NAME[key]()
    near = difflib.get_close_matches(key, ROUNDING_CLASS_BY_NAME, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown rounding {rounding!r}: {meant}Known are {', '.join(ROUNDING_CLASS_BY_NAME)}")


def rounding_names() -> list[str]:
    """Return the names of the modes, those that `register_rounding` added last.

    >>> rounding_names()[:5]
    ['nearest', 'toward_zero', 'up', 'down', 'stochastic']
    """
    return list(ROUNDING_CLASS_BY_NAME)


def draw_random_key() -> int:
    """Draw a key from torch's default generator."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))
