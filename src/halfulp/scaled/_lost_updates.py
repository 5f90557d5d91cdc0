"""Updates in place that rounding to a narrow payload drops: sampled, compared with the exact update, and warned of.

An average of weights moves by a thousandth of what is left of its way, and rounding to nearest drops what is less than
half a last place: torch's AveragedModel of a scaled model, or an optimizer's small steps, would stand still in silence.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import note_and_warn_once
from ..subclass.models._averaged_models import warn_of_written_average
from . import _powers_of_two as _powers
from ._operands import decode_values
from ._scaled_tensor import ScaledTensor

# One update in INTERVAL of a tensor is sampled; of tensors with fewer elements none, as chance decides there.
INTERVAL, LEAST_ELEMENTS = 32, 64
# Operators that add to their target, and those that only shrink it, so that the next addition ends the update.
_ADDING = ("add_", "sub_", "lerp_", "addcdiv_")
_SHRINKING = ("mul_", "div_")
# Samples over which most of the updates must be lost before a warning: of averages, which reverse at times, and of
# optimizer steps, which become small as training ends. Beyond the last number older samples count half.
_LOOKS_OF_AVERAGES, _LOOKS_OF_STEPS, _MOST_LOOKS = 2, 8, 16
_phases = itertools.count()
# By the identity of the scale, which views share: torch passes detached views to averaging functions.
_updates: dict[int, tuple[weakref.ref[Tensor], Updates]] = {}


@dataclass(slots=True)
class Updates:
    """The sampled updates of one tensor.

    Attributes:
        count: how many there were.
        shrunk: whether the last write only shrank the tensor.
        start, exact: what the tensor held before the update that is looked at, and what it would hold unrounded.
        version: of the payload when `exact` was computed.
        writes: how often any operator wrote the tensor.
        is_average: whether the target was shrunk first, or moved towards another tensor.
        looks, kept: how many updates were looked at, and the sum of the shares of them that were kept.
    """

    count: int
    shrunk: bool = False
    start: Tensor | None = None
    exact: Tensor | None = None
    version: int = -1
    writes: int = 0
    is_average: bool = False
    looks: float = 0.0
    kept: float = 0.0


def begin(name: str, x: Any, given: Mapping[str, Any], functional: Callable) -> Updates | None:
    """Compute the unrounded result of an in-place update of x, if this update is sampled.

    Args:
        name: of the operator, such as "lerp_".
        x: what is written.
        given: all arguments by name.
        functional: the operator that returns its result.

    Returns:
        What `end` takes after the write; mostly None.
    """
    if name not in _ADDING and name not in _SHRINKING:
        return None
    if name in ("add_", "sub_") and not getattr(given.get("other"), "ndim", 0):
        return None  # a constant such as eps is no update
    if not isinstance(x, ScaledTensor) or x._payload.dtype == torch.float32 or x.numel() < LEAST_ELEMENTS:
        return None
    if not _powers.is_concrete(x._payload) or not _powers.is_concrete(x._scale) or x._payload.is_inference():
        return None
    seen = _updates_of(x._scale)
    goes_on = seen.shrunk and name in _ADDING
    seen.shrunk = name in _SHRINKING
    is_next = goes_on and seen.exact is not None and seen.version == x._payload._version and seen.exact.shape == x.shape
    if not is_next:
        seen.start = seen.exact = None
        seen.count += not goes_on
        if goes_on or seen.count % INTERVAL:
            return None
        seen.start = decode_values(x, torch.float64)
    target = next(iter(given))
    wide = {key: _wide(value) for key, value in given.items()}
    wide[target] = seen.exact if is_next else seen.start
    seen.exact = functional(**wide)
    seen.is_average = name == "lerp_" or (is_next and name in ("add_", "sub_"))
    return seen


def end(seen: Updates, name: str, x: ScaledTensor) -> None:
    """Compare a sampled update that has been written with the exact one, or wait for the addition that completes it."""
    if name in _SHRINKING:
        seen.version = x._payload._version
        return
    assert seen.exact is not None  # as `begin` left them
    assert seen.start is not None
    wanted, kept = seen.exact - seen.start, decode_values(x, torch.float64) - seen.start
    seen.start = seen.exact = None
    asked, got = (wanted * wanted).sum().item(), (wanted * kept).sum().item()
    if not 0.0 < asked < torch.inf:
        return
    seen.looks, seen.kept = seen.looks + 1, seen.kept + min(max(got / asked, -2.0), 2.0)
    if seen.looks >= (_LOOKS_OF_AVERAGES if seen.is_average else _LOOKS_OF_STEPS) and seen.kept < 0.5 * seen.looks:
        note_and_warn_once(
            "lost updates",
            f"{name} moves a ScaledTensor of {x._payload.dtype} by so little that rounding drops most of it: keep "
            "averages of weights in float32 (move a copy of the model by halfulp.scaled.unscalify, with lerp_), and "
            "let hu.optim step parameters, whose weight updates keep what rounding drops",
        )
    if seen.looks >= _MOST_LOOKS:
        seen.looks, seen.kept = seen.looks / 2, seen.kept / 2


def note_write(x: ScaledTensor) -> None:
    """Warn if a tensor that was written belongs to an average, whose updates `copy_` brings rounded already.

    It is asked at the first write, and each time that the writes have doubled.
    """
    if x._payload.dtype == torch.float32 or x._payload.numel() < LEAST_ELEMENTS:
        return
    if type(x._scale) is not Tensor or torch.compiler.is_dynamo_compiling():
        return
    seen = _updates_of(x._scale)
    seen.writes += 1
    if not seen.writes & (seen.writes - 1):
        warn_of_written_average(lambda tensor: getattr(tensor, "_scale", None) is x._scale)


def _updates_of(scale: Tensor) -> Updates:
    key = id(scale)
    entry = _updates.get(key)
    if entry is not None and entry[0]() is scale:
        return entry[1]

    def forget(dead: weakref.ref) -> None:
        if _updates.get(key, (None,))[0] is dead:
            del _updates[key]

    seen = Updates(next(_phases) % INTERVAL)
    _updates[key] = weakref.ref(scale, forget), seen
    return seen


def _wide(x: Any) -> Any:
    if isinstance(x, ScaledTensor):
        return decode_values(x, torch.float64)
    return x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x
