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
from . import _powers_of_two as _powers
from ._operands import decode_values
from ._scaled_tensor import ScaledTensor

# Of so many updates of a tensor one is looked at; of small tensors none, as chance decides there.
INTERVAL, LEAST_ELEMENTS = 32, 64
# What adds to its target, and what only shrinks it, so that the next addition completes the update.
_ADDING = ("add_", "sub_", "lerp_", "addcdiv_")
_SHRINKING = ("mul_", "div_")
# Over so many looks most must be lost: of averages, which turn round once in a while, and of steps, which become small
# as training ends. The older of more looks count less and less.
_TURNS, _STEPS, _MOST = 2, 8, 16
_turns = itertools.count()
# By the identity of a scale, which views share: torch hands detached ones to what averages.
_known: dict[int, tuple[weakref.ref[Tensor], Updates]] = {}


@dataclass(slots=True)
class Updates:
    """The sampled updates of one tensor.

    Attributes:
        count: how many there were.
        shrunk: whether the last write only shrank the tensor.
        start, exact: what the tensor held before the update that is looked at, and what it would hold unrounded.
        version: of the payload when `exact` was computed.
        is_average: whether the target was shrunk first, or moved towards another tensor.
        looks, kept: how many updates were looked at, and the sum of the shares of them that were kept.
    """

    count: int
    shrunk: bool = False
    start: Tensor | None = None
    exact: Tensor | None = None
    version: int = -1
    is_average: bool = False
    looks: float = 0.0
    kept: float = 0.0


def begin(name: str, x: Any, given: Mapping[str, Any], functional: Callable) -> Updates | None:
    """Compute without rounding what an update in place makes of x, if this update is sampled.

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
    held = _updates_of(x._scale)
    goes_on = held.shrunk and name in _ADDING
    held.shrunk = name in _SHRINKING
    is_next = goes_on and held.exact is not None and held.version == x._payload._version and held.exact.shape == x.shape
    if not is_next:
        held.start = held.exact = None
        held.count += not goes_on
        if goes_on or held.count % INTERVAL:
            return None
        held.start = decode_values(x, torch.float64)
    target = next(iter(given))
    wide = {key: _wide(value) for key, value in given.items()}
    wide[target] = held.exact if is_next else held.start
    held.exact = functional(**wide)
    held.is_average = name == "lerp_" or (is_next and name in ("add_", "sub_"))
    return held


def end(held: Updates, name: str, x: ScaledTensor) -> None:
    """Compare a sampled update that has been written with the exact one, or wait for the addition that completes it."""
    if name in _SHRINKING:
        held.version = x._payload._version
        return
    wanted, kept = held.exact - held.start, decode_values(x, torch.float64) - held.start
    held.start = held.exact = None
    asked, got = (wanted * wanted).sum().item(), (wanted * kept).sum().item()
    if not 0.0 < asked < torch.inf:
        return
    held.looks, held.kept = held.looks + 1, held.kept + min(max(got / asked, -2.0), 2.0)
    if held.looks >= (_TURNS if held.is_average else _STEPS) and held.kept < 0.5 * held.looks:
        note_and_warn_once(
            "lost updates",
            f"{name} moves a ScaledTensor of {x._payload.dtype} by so little that rounding drops most of it: keep "
            "averages of weights in float32 (move a copy of the model by halfulp.scaled.unscalify, with lerp_), and "
            "let hu.optim step parameters, whose weight updates keep what rounding drops",
        )
    if held.looks >= _MOST:
        held.looks, held.kept = held.looks / 2, held.kept / 2


def _updates_of(scale: Tensor) -> Updates:
    key = id(scale)
    known = _known.get(key)
    if known is not None and known[0]() is scale:
        return known[1]

    def forget(dead: weakref.ref) -> None:
        if _known.get(key, (None,))[0] is dead:
            del _known[key]

    held = Updates(next(_turns) % INTERVAL)
    _known[key] = weakref.ref(scale, forget), held
    return held


def _wide(x: Any) -> Any:
    if isinstance(x, ScaledTensor):
        return decode_values(x, torch.float64)
    return x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x
