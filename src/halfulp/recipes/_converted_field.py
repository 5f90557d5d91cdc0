"""Fields of a frozen dataclass that take more types than they hold, and the conversions of a recipe's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

    from ..formats import Format

Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)

Mix = tuple[tuple[str, str], ...]


class Converted(Generic[Given, Held]):
    """A dataclass field that is given as `Given` and read as `Held`, by a conversion.

    Checkers of types know both from `__set__` and `__get__`.
    """

    def __init__(self, convert: Callable[[Given], Held], default: Held) -> None:
        self._convert = convert
        self._default = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Held:
        # dataclasses asks the class for the default.
        if instance is None:
            return self._default
        held: Held = vars(instance)[self._name]
        return held

    def __set__(self, instance: object, value: Given) -> None:
        vars(instance)[self._name] = self._convert(value)


# A format by its name or by what bears it, held as the name.
FormatName = Converted["str | torch.dtype | Format | None", str | None]
# One weight update for all, or pairs from glob to weight update.
UpdateNames = Converted[str | Sequence[Sequence[str]] | Mapping[str, str] | None, str | Mix | None]
Globs = Converted[Sequence[str], tuple[str, ...]]
ScaleOrPolicy = Converted[str | float | None, str | float | None]


def name_of_format(value: str | torch.dtype | Format | None) -> str | None:
    """Return ``torch.bfloat16`` or a Format as the name that JSON can hold; strings and None pass through."""
    if value is None or isinstance(value, str):
        return value
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(value).removeprefix("torch.")


def name_or_mix(value: str | Sequence[Sequence[str]] | Mapping[str, str] | None) -> str | Mix | None:
    """Return pairs from glob to name as tuples; a single name and None pass through.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, str):
        return value
    given: Any = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple((str(glob), str(name)) for glob, name in given)
    except (TypeError, ValueError):
        raise TypeError(
            f"weight_update={value!r}: give a name, pairs of a glob and a name, or a dict from glob to name"
        ) from None


def globs(value: Sequence[str]) -> tuple[str, ...]:
    """Return globs as a tuple.

    Raises:
        ValueError: it is no list of words.
    """
    if (
        isinstance(value, str)
        or not isinstance(value, list | tuple)
        or not all(isinstance(x, str) and x for x in value)
    ):
        raise ValueError(f"float32={value!r}: give a list of globs over names of modules and classes, () for none")
    return tuple(value)


def power_or_policy(value: str | float | None) -> str | float | None:
    """Return a whole number as a float; all else passes through."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
