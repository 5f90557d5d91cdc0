"""Averages of weights that are alive in this process, of any library, and warnings where they are narrow.

They are found by the names of their classes. A search through all objects takes tens of milliseconds: it is made only
where a class with such a name has come, or has other objects than at the last search, which the references to it tell.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from ...kernels import note_and_warn_once, report

# ModelEmaV3, EMAModel, LitEma, ExponentialMovingAverage, SWA; no SWABlock, no AveragePooler, no Email, no cinema.
_AVERAGE_CLASS_NAME = re.compile(
    r"(EMA|SWA|Ema|Swa)(Model|Weights?|Callback|Helper|Hook|Handler|Updater)?(V\d+)?$"
    r"|(?i:(moving|weight|model)s?_?averag|averaged?_?(model|weight|parameter)|polyak)"
)


class _LastSearch:
    """The averages that the last search found, and the counts that tell whether it is outdated."""

    classes: ClassVar[tuple[int, int]] = (0, 0)
    average_classes: ClassVar[list[weakref.ref[type]]] = []
    reference_counts: ClassVar[list[int]] = []
    found: ClassVar[list[weakref.ref]] = []


def list_living_averages() -> list[object]:
    """Return the objects whose classes are named like averages, but for this package's own."""
    classes = len(type.__subclasses__(object)), len(_list_subclasses(nn.Module))
    if classes != _LastSearch.classes:
        _LastSearch.classes, _LastSearch.average_classes = (
            classes,
            [weakref.ref(kind) for kind in _list_subclasses(object) if _is_average_class(kind)],
        )
    if _count_references() != _LastSearch.reference_counts or any(one() is None for one in _LastSearch.found):
        kinds = {one() for one in _LastSearch.average_classes}
        living = (x for x in gc.get_objects() if type(x) in kinds and type(x).__weakrefoffset__)
        _LastSearch.found = list(map(weakref.ref, living))
        del kinds
        _LastSearch.reference_counts = _count_references()
    return [x for one in _LastSearch.found if (x := one()) is not None]


def _count_references() -> list[int]:
    """Return how many references each class of averages has: one for each of its objects, and others."""
    return [sys.getrefcount(kind) for one in _LastSearch.average_classes if (kind := one()) is not None]


def _list_subclasses(kind: type) -> set[type]:
    """Return all subclasses of a class."""
    found: set[type] = set()
    new = {kind}
    while new:
        new = set(itertools.chain.from_iterable(map(type.__subclasses__, new))) - found
        found |= new
    return found


def list_held_tensors(average: object) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors that an average holds, together those of one module, list, dict or attribute of it."""
    if issubclass(type(average), nn.Module):
        yield (*average.parameters(), *average.buffers())  # type: ignore[attr-defined]
    for key, value in getattr(average, "__dict__", {}).items():
        if key in ("_parameters", "_buffers", "_modules"):
            continue
        if issubclass(type(value), nn.Module) and not _is_average_class(type(value)):  # which is looked at itself
            yield (*value.parameters(), *value.buffers())
        parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
        yield tuple(part for part in parts if issubclass(type(part), Tensor))


@functools.cache  # all classes are asked again whenever one has come
def _is_average_name(name: str) -> bool:
    return _AVERAGE_CLASS_NAME.search(name) is not None


def _is_average_class(kind: type) -> bool:
    if any(str(base.__module__).startswith("halfulp.") for base in kind.__mro__):
        return False
    return issubclass(kind, AveragedModel) or any(_is_average_name(base.__name__) for base in kind.__mro__)


_NARROW_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_REPORT_KIND = "lost updates"
_hook_handles: list = []


def warn_of_narrow_averages() -> None:
    """Warn from now on where an AveragedModel is made whose averages are kept in a narrow format.

    It holds a deep copy of the model, of plain tensors, whose updates nobody sees. That it takes the copy as its part
    is all that can be seen, by torch's hook for modules that get parts.
    """
    if not _hook_handles:
        _hook_handles.append(register_module_module_registration_hook(_warn_of_averaged_part))


def _warn_of_averaged_part(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if isinstance(module, AveragedModel) and part is not None:
        narrow = next(filter(_is_narrow, part.parameters()), None)
        if narrow is not None:
            note_and_warn_once(_REPORT_KIND, _make_warning(AveragedModel, narrow))


def warn_of_living_averages(stepped: Iterable[Tensor]) -> None:
    """Warn of averages, of any library, that hold the narrow parameters of an optimizer in a narrow format.

    This is how those are seen that were made before the first optimizer, that a copy or a file has brought, or that are
    no modules. They are known by the names of their classes, and by tensors of the parameters' shapes.

    Args:
        stepped: the optimizer's parameters.
    """
    live = list(stepped)
    own = {id(parameter) for parameter in live}
    # Single numbers are like any meter's.
    shapes = {tuple(parameter.shape) for parameter in live if _is_narrow(parameter) and parameter.numel() > 1}
    if not shapes or not _list_new_warnings(own, shapes):
        return
    gc.collect()  # an average that nobody holds any more may be among them
    for text in _list_new_warnings(own, shapes):
        note_and_warn_once(_REPORT_KIND, text)


def _list_new_warnings(own: set[int], shapes: set[tuple[int, ...]]) -> list[str]:
    """Return the warnings that were not given yet."""
    told = report()
    found = {
        text
        for average in list_living_averages()
        if (text := _describe_narrow_average(average, own, shapes)) is not None
    }
    return sorted(text for text in found if f"{_REPORT_KIND}: {text}" not in told)


def _describe_narrow_average(average: Any, own: set[int], shapes: set[tuple[int, ...]]) -> str | None:
    """Return the warning of an object that averages parameters of these shapes in a narrow format; None of others."""
    # timm's rounds bfloat16 averages stochastically.
    fine = {torch.bfloat16} if getattr(average, "stochastic_rounding", False) is True else set()
    for place, together in enumerate(list_held_tensors(average)):
        if any(id(tensor) in own for tensor in together):
            if not place and issubclass(type(average), nn.Module):
                return None  # a part of the model that is trained, whatever it is called
            continue
        narrow = [tensor for tensor in together if _is_narrow(tensor) and _get_payload(tensor).dtype not in fine]
        alike = [tensor for tensor in narrow if tuple(tensor.shape) in shapes]
        covered = {tuple(tensor.shape) for tensor in alike}
        if 2 * len(alike) >= len(narrow) and 2 * len(covered) >= len(shapes):
            return _make_warning(type(average), alike[0])
    return None


def _get_payload(tensor: Any) -> Tensor:
    return getattr(tensor, "payload", tensor)


def _is_narrow(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers have few bits, and no other components."""
    return _get_payload(tensor).dtype in _NARROW_DTYPES and not hasattr(tensor, "components")


def _make_warning(kind: type, tensor: Tensor) -> str:
    """Return the warning of averages of a class that are kept as a tensor is."""
    payload, is_torchs = _get_payload(tensor), issubclass(kind, AveragedModel)
    name = "AveragedModel" if is_torchs else kind.__name__
    if payload is not tensor:
        remedy = f"take {name}(halfulp.scaled.unscalify(copy.deepcopy(model)))"
    elif is_torchs:
        remedy = (
            "take halfulp.optim.EMA(model, optimizer=optimizer), or "
            "AveragedModel(copy.deepcopy(model).float(), avg_fn=get_ema_avg_fn())"
        )
    else:
        remedy = "take halfulp.optim.EMA(model, optimizer=optimizer), or keep its averages in float32"
    return (
        f"{name} keeps its averages in {payload.dtype}, as the model its parameters: an update moves "
        f"them by mostly less than half a last place, which rounding drops; {remedy}"
    )
