"""Averages of weights that are alive in this process, of any library: found by the names of their classes.

A search through all objects takes tens of milliseconds. So it is made only where a class with such a name has come, or
has other instances than at the last search, which the references to a class tell: each instance holds one.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

# ModelEmaV3, EMAModel, LitEma, ExponentialMovingAverage, SWA; no SWABlock, no AveragePooler, no Email, no cinema.
_NAME = re.compile(
    r"(EMA|SWA|Ema|Swa)(Model|Weights?|Callback|Helper|Hook|Handler|Updater)?(V\d+)?$"
    r"|(?i:(moving|weight|model)s?_?averag|averaged?_?(model|weight|parameter)|polyak)"
)


class _Search:
    """What the last searches found.

    Attributes:
        counted: how many classes there were at the last walk through them, direct and of modules.
        kinds: the classes of averages, weakly.
        references: how many references each of them had after the last search for objects.
        found: the objects, weakly.
    """

    counted: ClassVar[tuple[int, int]] = (0, 0)
    kinds: ClassVar[tuple[weakref.ref[type], ...]] = ()
    references: ClassVar[dict[int, int]] = {}
    found: ClassVar[tuple[weakref.ref, ...]] = ()


def living_averages() -> list[object]:
    """Return the objects whose classes are named like averages, but for this package's own."""
    references = _references(_kinds())
    if references != _Search.references or any(one() is None for one in _Search.found):
        kinds = set(_kinds())
        # No tuple of a generator: another thread's search would hold the tuple while it grows, which is an error.
        found = [weakref.ref(x) for x in gc.get_objects() if type(x) in kinds and _takes_weak_references(x)]
        _Search.found = tuple(found)
        del kinds
        _Search.references = _references(_kinds())
    return [x for one in _Search.found if (x := one()) is not None]


def held_tensors(average: object) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors that an average holds, together those of one module, list, dict or attribute of it."""
    if issubclass(type(average), nn.Module):
        yield (*average.parameters(), *average.buffers())  # type: ignore[attr-defined]
    for key, value in getattr(average, "__dict__", {}).items():
        if key in ("_parameters", "_buffers", "_modules"):
            continue
        if issubclass(type(value), nn.Module) and not _is_average(type(value)):  # which is looked at itself
            yield (*value.parameters(), *value.buffers())
        parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
        yield tuple(part for part in parts if issubclass(type(part), Tensor))


def _kinds() -> list[type]:
    """Return the classes that are named like averages."""
    counted = len(type.__subclasses__(object)), len(_below(nn.Module))
    if counted != _Search.counted:
        named = {AveragedModel, *(kind for kind in _below(object) if _NAME.search(kind.__name__))}
        alike = named.union(*map(_below, named))
        _Search.counted, _Search.kinds = counted, tuple(weakref.ref(kind) for kind in alike if _is_average(kind))
    return [kind for one in _Search.kinds if (kind := one()) is not None]


def _is_average(kind: type) -> bool:
    if any(str(base.__module__).startswith("halfulp.") for base in kind.__mro__):
        return False
    return issubclass(kind, AveragedModel) or any(_NAME.search(base.__name__) for base in kind.__mro__)


def _below(kind: type) -> set[type]:
    """Return all subclasses of a class."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        new = [one for one in type.__subclasses__(waiting.pop()) if one not in found]
        found.update(new)
        waiting += new
    return found


def _references(kinds: list[type]) -> dict[int, int]:
    return {id(kind): sys.getrefcount(kind) for kind in kinds}


def _takes_weak_references(x: object) -> bool:
    return type(x).__weakrefoffset__ != 0
