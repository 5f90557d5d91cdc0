"""Warnings where averages of narrow weights are kept as narrow: rounding drops most of their updates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from ...kernels import note_and_warn_once, report
from ._living_averages import held_tensors, living_averages

_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_KIND = "lost updates"
_handles: list = []


def warn_of_narrow_averages() -> None:
    """Warn from now on where an AveragedModel is made whose averages are kept in a narrow format.

    It holds a deep copy of the model, of plain tensors, whose updates nobody sees. That it takes the copy as its part
    is all that can be seen, by torch's hook for modules that get parts.
    """
    if not _handles:
        _handles.append(register_module_module_registration_hook(_check))


def _check(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if isinstance(module, AveragedModel) and part is not None:
        narrow = next(filter(_is_narrow, part.parameters()), None)
        if narrow is not None:
            note_and_warn_once(_KIND, _said(AveragedModel, narrow))


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
    if not shapes or not _untold(own, shapes):
        return
    gc.collect()  # an average that nobody holds any more may be among them
    for text in _untold(own, shapes):
        note_and_warn_once(_KIND, text)


def warn_of_written_average(is_written: Callable[[Tensor], bool]) -> None:
    """Warn if a narrow tensor that was written is held by an average, of any library.

    Args:
        is_written: whether a tensor is that one.
    """
    for average in living_averages():
        for tensor in (tensor for together in held_tensors(average) for tensor in together if is_written(tensor)):
            note_and_warn_once(_KIND, _said(type(average), tensor))


def _untold(own: set[int], shapes: set[tuple[int, ...]]) -> list[str]:
    """Return the warnings that were not given yet."""
    told = report()
    found = {text for average in living_averages() if (text := _narrow_average(average, own, shapes)) is not None}
    return sorted(text for text in found if f"{_KIND}: {text}" not in told)


def _narrow_average(average: Any, own: set[int], shapes: set[tuple[int, ...]]) -> str | None:
    """Return the warning of an object that averages parameters of these shapes in a narrow format; None of others."""
    # timm's rounds bfloat16 averages stochastically.
    fine = {torch.bfloat16} if getattr(average, "stochastic_rounding", False) is True else set()
    for place, together in enumerate(held_tensors(average)):
        if any(id(tensor) in own for tensor in together):
            if not place and issubclass(type(average), nn.Module):
                return None  # a part of the model that is trained, whatever it is called
            continue
        narrow = [tensor for tensor in together if _is_narrow(tensor) and _payload(tensor).dtype not in fine]
        alike = [tensor for tensor in narrow if tuple(tensor.shape) in shapes]
        covered = {tuple(tensor.shape) for tensor in alike}
        if 2 * len(alike) >= len(narrow) and 2 * len(covered) >= len(shapes):
            return _said(type(average), alike[0])
    return None


def _payload(tensor: Any) -> Tensor:
    return getattr(tensor, "payload", tensor)


def _is_narrow(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers have few bits, and no other components."""
    return _payload(tensor).dtype in _NARROW and not hasattr(tensor, "components")


def _said(kind: type, tensor: Tensor) -> str:
    """Return the warning of averages of a class that are kept as a tensor is."""
    payload, is_torchs = _payload(tensor), issubclass(kind, AveragedModel)
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
