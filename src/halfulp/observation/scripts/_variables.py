"""The names that a script itself gives to its models, read from the frames that run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

# Frames of these hold models under names of their own, as self and module.
_OTHERS = ("torch", "halfulp", "runpy", "contextlib", "functools")
_MOST_ATTRIBUTES = 200


def names_in_script(models: Sequence[Iterable[nn.Module]]) -> list[str | None]:
    """Return the variable or attribute that holds each model, None where none does.

    The outermost frame that has one decides, as there a model has the name that tells it from the others.

    Args:
        models: each with the wrappers around it, whose name does as well.
    """
    wanted = {id(one): place for place, same in enumerate(models) for one in same}
    found: dict[int, str] = {}
    for frame in reversed(list(_frames())):
        for variables in (_locals(frame), dict(frame.f_globals)):
            for name, value in _bound(variables):
                place = wanted.get(id(value))
                if place is not None and name.isidentifier() and name != "self" and not name.startswith("__"):
                    found.setdefault(place, name)
    return [found.get(place) for place in range(len(models))]


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the script, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in _OTHERS:
            yield frame
        frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, Any]:
    """Return a frame's variables, which its own copy of them does not keep alive afterwards."""
    found = dict(frame.f_locals)
    # Until Python 3.12 a function's frame holds what was read until it is read again; a module's frame has its globals.
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        frame.f_locals.clear()
    return found


def _bound(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, then what attributes of objects and items of dictionaries among them hold, with their names."""
    yield from variables.items()
    for value in variables.values():
        inner = value if type(value) is dict else getattr(type(value), "__dict__", None) and _attributes(value)
        if isinstance(inner, dict) and len(inner) <= _MOST_ATTRIBUTES:
            yield from ((name, one) for name, one in list(inner.items()) if isinstance(name, str))


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object, an outer module's children included; None of classes and modules of Python."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # objects without one, and those that raise for any question
        return None
    if type(own) is not dict or isinstance(value, type(sys)):
        return None
    return own
