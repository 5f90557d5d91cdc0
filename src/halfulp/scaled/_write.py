"""Writes into scaled tensors, and updates that rounding to a narrow payload drops: sampled, and warned of.

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

from ..kernels import note_and_warn_once, torch_operators
from . import _powers_of_two as _powers
from ._operands import operand
from ._payloads import decode_values, smallest, to_float32, to_storage
from ._registry import implements
from ._scaled_tensor import ScaledTensor, plain

# Operators that write at indices or under a mask, and the names of the arguments they write.
_WRITTEN_AT = {
    "masked_fill_": ("value",),
    "masked_scatter_": ("source",),
    "index_put_": ("values",),
    "_index_put_impl_": ("values",),
    "index_fill_": ("value",),
    "index_copy_": ("source",),
    "scatter_": ("src", "value"),
    "put_": ("source",),
    "fill_diagonal_": ("fill_value",),
}


@implements(torch_operators("aten").copy_.default, family="writing")
def copy_(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor of any kind into x."""
    return write(x, value)


def write(x: Tensor, value: Any) -> Tensor:
    """Copy a tensor of any kind or a number into x; its views see it.

    A scaled tensor that owns all of its memory takes the value's scale. One that is a part of other memory keeps the
    scale, unless there are only zeros of any scale.

    Raises:
        RuntimeError: the value's shape does not broadcast to x's.
        ValueError: a finite value is out of the payload's range under the scale that must be kept, or all would be 0
            under it and they are not (where values can be looked at); x is as it was.
    """
    if not isinstance(x, ScaledTensor):
        return x.copy_(plain(value))
    value = operand(value, x)
    if value.shape != x.shape and torch.broadcast_shapes(value.shape, x.shape) != x.shape:
        raise RuntimeError(f"a value of shape {list(value.shape)} for a tensor of shape {list(x.shape)}")
    if covers_memory(x):
        # The same storage is copied without computing: torch runs such copies after a compiled graph, outside of it.
        same = value._payload.dtype == x._payload.dtype
        payload, scale = value._payload if same else to_float32(value), value._scale
    else:
        scale = _scale_of_partial_write(x._scale, value._scale)
        factor = _powers.ratio(value._scale, scale)
        payload = _powers.times(to_float32(value), factor)
        if isinstance(factor, float) and factor > _powers.LARGEST:  # which `times` does not multiply by
            payload = to_float32(value)
            payload = payload.masked_fill(payload != 0, torch.inf)
        _check_fits(x, payload, value)
    if x._payload.dtype == torch.bfloat16 and payload.dtype == torch.float32:
        payload = _held_in_bfloat16(payload, scale)
    x._payload.copy_(payload if payload.dtype == x._payload.dtype else to_storage(payload, x._payload.dtype))
    x._scale.copy_(scale)
    return x


def _held_in_bfloat16(payload: Tensor, scale: Tensor) -> Tensor:
    """Keep finite numbers that bfloat16 would round to infinity, as float32's largest: they saturate."""
    largest = torch.finfo(torch.bfloat16).max
    held = (largest / scale).clamp(max=largest)
    if _powers.is_concrete(payload) and (not payload.numel() or payload.abs().amax().item() <= held.item()):
        return payload
    return _powers.clamp_finite(payload, held)


def covers_memory(x: ScaledTensor) -> bool:
    """Return whether x is all of its memory, so that no view holds elements outside of x."""
    payload = x._payload
    if type(payload) is not Tensor:
        return not x._is_view() and not payload._is_view()
    return payload.numel() * payload.element_size() == payload.untyped_storage().nbytes()


def _scale_of_partial_write(own: Tensor, other: Tensor) -> Tensor:
    """Return the scale for a partial write: the memory's own, or the value's if the memory holds only zeros."""
    value = _powers.concrete_value(own)
    if value is None:
        return torch.where(own == _powers.ZERO_SCALE, other, own)
    return other if value == _powers.ZERO_SCALE else own


def _check_fits(x: ScaledTensor, payload: Tensor, value: ScaledTensor) -> None:
    storage = x._payload.dtype
    largest = torch.finfo(storage).max
    if not _powers.is_concrete(payload):
        if storage not in (torch.float32, torch.bfloat16):
            torch._assert_async(
                ~_is_too_large(payload, value, largest),
                f"a value is out of {storage}'s range under the scale of the memory it is written into: write into "
                "x.clone(), or give the whole tensor a larger scale first, x.with_scale(...)",
            )
        return
    top = payload.abs().amax().item() if payload.numel() else 1.0
    if top <= smallest(storage) / 2:
        _refuse_vanishing(x, value)
    elif not top <= largest and bool(_is_too_large(payload, value, largest)):
        raise ValueError(
            f"a value is out of {storage}'s range under the scale {x._scale.item():g}, which this tensor "
            "shares with the memory it is a view of: it is as it was. Write into x.clone(), or give the whole tensor a "
            "larger scale first, x.with_scale(...)"
        )


def check_written_at(name: str, given: Mapping[str, Any], x: Any, result: Any) -> None:
    """Raise if every value that is written at indices or under a mask would become 0 in the payload.

    Constants have no say in a scale; large ones saturate, but one that vanishes leaves zeros that nobody asked for.
    Given are the operator's name and arguments, what it writes into, and what that becomes.
    """
    source = next((given[key] for key in _WRITTEN_AT.get(name, ()) if key in given), None)
    if source is None or given.get("accumulate") or given.get("reduce") or not isinstance(x, ScaledTensor):
        return
    value = operand(source, x)
    if not all(map(_powers.is_concrete, (value._payload, value._scale, result._scale))) or not _is_anywhere(
        given, value
    ):
        return
    largest = to_float32(value).abs().amax().item() * value._scale.item()
    scale = result._scale.item()
    if largest and largest <= scale * (smallest(x._payload.dtype) / 2):
        raise ValueError(
            f"a value of magnitude {largest:g} is 0 in {x._payload.dtype} under the scale {scale:g} of the tensor that "
            f"{name} writes it into: it is as it was. Give the tensor a smaller scale first, x.copy_(x.with_scale(...))"
        )


def _is_anywhere(given: Mapping[str, Any], value: ScaledTensor) -> bool:
    """Return whether any element is written."""
    places = [given[key] for key in ("mask", "index") if key in given]
    places += [index for index in given.get("indices", ()) if index is not None]
    masks = (place for place in places if place.dtype in (torch.bool, torch.uint8))
    return bool(value.numel()) and all(place.numel() for place in places) and all(bool(mask.any()) for mask in masks)


def _is_too_large(payload: Tensor, value: ScaledTensor, largest: float) -> Tensor:
    return ((payload.abs() > largest) & to_float32(value).isfinite()).any()


def _refuse_vanishing(x: ScaledTensor, value: ScaledTensor) -> None:
    largest = to_float32(value).abs().amax().item()
    if largest:
        raise ValueError(
            f"a value of magnitude {largest * value._scale.item():g} is 0 in {x._payload.dtype} under the scale "
            f"{x._scale.item():g}, which this tensor shares with the memory it is a view of: it is as it was. Write "
            "into x.clone(), or give the whole tensor a smaller scale first, x.with_scale(...)"
        )


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
    """Return, if this in-place update of x is sampled, what `end` takes after the write; mostly None.

    `given` holds all arguments of the operator `name`, x too; `functional` is the operator that returns its result.
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
