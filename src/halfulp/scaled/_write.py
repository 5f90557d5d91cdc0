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
from ._operands import as_operand
from ._payloads import decode_values, smallest_number, to_float32, to_storage
from ._registry import implements
from ._scaled_tensor import ScaledTensor, to_plain

# Operators that write at indices or under a mask, and the names of the arguments they write.
_VALUE_ARGUMENTS_BY_OPERATOR = {
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
    return write_values(x, value)


def write_values(x: Tensor, value: Any) -> Tensor:
    """Copy a tensor of any kind or a number into x; its views see it.

    A scaled tensor that owns all of its memory takes the value's scale. One that is a part of other memory keeps the
    scale, unless there are only zeros of any scale.

    Raises:
        RuntimeError: the value's shape does not broadcast to x's.
        ValueError: a finite value is out of the payload's range under the scale that must be kept, or all would be 0
            under it and they are not (where values can be looked at); x is as it was.
    """
    if not isinstance(x, ScaledTensor):
        return x.copy_(to_plain(value))
    value = as_operand(value, x)
    if value.shape != x.shape and torch.broadcast_shapes(value.shape, x.shape) != x.shape:
        raise RuntimeError(f"a value of shape {list(value.shape)} for a tensor of shape {list(x.shape)}")
    if owns_all_memory(x):
        # The same storage is copied without computing: torch runs such copies after a compiled graph, outside of it.
        same = value._payload.dtype == x._payload.dtype
        payload, scale = value._payload if same else to_float32(value), value._scale
    else:
        scale = _choose_partial_write_scale(x._scale, value._scale)
        factor = _powers.scale_ratio(value._scale, scale)
        payload = _powers.times_power(to_float32(value), factor)
        if isinstance(factor, float) and factor > _powers.LARGEST_SCALE:  # which `times` does not multiply by
            payload = to_float32(value)
            payload = payload.masked_fill(payload != 0, torch.inf)
        _check_value_fits(x, payload, value)
    if x._payload.dtype == torch.bfloat16 and payload.dtype == torch.float32:
        payload = _clamp_to_bfloat16(payload, scale)
    x._payload.copy_(payload if payload.dtype == x._payload.dtype else to_storage(payload, x._payload.dtype))
    x._scale.copy_(scale)
    return x


def _clamp_to_bfloat16(payload: Tensor, scale: Tensor) -> Tensor:
    """Keep finite numbers that bfloat16 would round to infinity, as float32's largest: they saturate."""
    largest = torch.finfo(torch.bfloat16).max
    held = (largest / scale).clamp(max=largest)
    if _powers.is_concrete(payload) and (not payload.numel() or payload.abs().amax().item() <= held.item()):
        return payload
    return _powers.clamp_finite(payload, held)


def owns_all_memory(x: ScaledTensor) -> bool:
    """Return whether x is all of its memory, so that no view holds elements outside of x."""
    payload = x._payload
    if type(payload) is not Tensor:
        return not x._is_view() and not payload._is_view()
    return payload.numel() * payload.element_size() == payload.untyped_storage().nbytes()


def _choose_partial_write_scale(own: Tensor, other: Tensor) -> Tensor:
    """Return the scale for a partial write: the memory's own, or the value's if the memory holds only zeros."""
    value = _powers.concrete_value(own)
    if value is None:
        return torch.where(own == _powers.ZERO_SCALE, other, own)
    return other if value == _powers.ZERO_SCALE else own


def _check_value_fits(x: ScaledTensor, payload: Tensor, value: ScaledTensor) -> None:
    storage = x._payload.dtype
    largest = torch.finfo(storage).max
    if not _powers.is_concrete(payload):
        if storage not in (torch.float32, torch.bfloat16):
            torch._assert_async(
                ~_has_overflow(payload, value, largest),
                f"a value is out of {storage}'s range under the scale of the memory it is written into: write into "
                "x.clone(), or give the whole tensor a larger scale first, x.with_scale(...)",
            )
        return
    top = payload.abs().amax().item() if payload.numel() else 1.0
    if top <= smallest_number(storage) / 2:
        _refuse_vanishing(x, value)
    elif not top <= largest and bool(_has_overflow(payload, value, largest)):
        raise ValueError(
            f"a value is out of {storage}'s range under the scale {x._scale.item():g}, which this tensor "
            "shares with the memory it is a view of: it is as it was. Write into x.clone(), or give the whole tensor a "
            "larger scale first, x.with_scale(...)"
        )


def check_indexed_write(name: str, given: Mapping[str, Any], x: Any, result: Any) -> None:
    """Raise if every value that is written at indices or under a mask would become 0 in the payload.

    Constants have no say in a scale; large ones saturate, but one that vanishes leaves zeros that nobody asked for.
    Given are the operator's name and arguments, what it writes into, and what that becomes.
    """
    source = next((given[key] for key in _VALUE_ARGUMENTS_BY_OPERATOR.get(name, ()) if key in given), None)
    if source is None or given.get("accumulate") or given.get("reduce") or not isinstance(x, ScaledTensor):
        return
    value = as_operand(source, x)
    if not all(map(_powers.is_concrete, (value._payload, value._scale, result._scale))) or not _writes_any_element(
        given, value
    ):
        return
    largest = to_float32(value).abs().amax().item() * value._scale.item()
    scale = result._scale.item()
    if largest and largest <= scale * (smallest_number(x._payload.dtype) / 2):
        raise ValueError(
            f"a value of magnitude {largest:g} is 0 in {x._payload.dtype} under the scale {scale:g} of the tensor that "
            f"{name} writes it into: it is as it was. Give the tensor a smaller scale first, x.copy_(x.with_scale(...))"
        )


def _writes_any_element(given: Mapping[str, Any], value: ScaledTensor) -> bool:
    """Return whether any element is written."""
    places = [given[key] for key in ("mask", "index") if key in given]
    places += [index for index in given.get("indices", ()) if index is not None]
    masks = (place for place in places if place.dtype in (torch.bool, torch.uint8))
    return bool(value.numel()) and all(place.numel() for place in places) and all(bool(mask.any()) for mask in masks)


def _has_overflow(payload: Tensor, value: ScaledTensor, largest: float) -> Tensor:
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
SAMPLE_INTERVAL, LEAST_SAMPLED_ELEMENTS = 32, 64
# Operators that add to their target, and those that only shrink it, so that the next addition ends the update.
_ADDING_OPERATORS = ("add_", "sub_", "lerp_", "addcdiv_")
_SHRINKING_OPERATORS = ("mul_", "div_")
# Samples over which most of the updates must be lost before a warning: of averages, which reverse at times, and of
# optimizer steps, which become small as training ends. Beyond the last number older samples count half.
_LEAST_AVERAGE_SAMPLES, _LEAST_STEP_SAMPLES, _MOST_SAMPLES = 2, 8, 16
_sampling_phases = itertools.count()
# By the identity of the scale, which views share: torch passes detached views to averaging functions.
_updates_by_scale: dict[int, tuple[weakref.ref[Tensor], SampledUpdates]] = {}


@dataclass(slots=True)
class SampledUpdates:
    """The sampled updates of one tensor.

    Attributes:
        count: how many there were.
        was_shrunk: whether the last write only shrank the tensor.
        start_values, exact_values: what the tensor held before the sampled update, and would hold unrounded.
        payload_version: when `exact_values` was computed.
        is_average: whether the target was shrunk first, or moved towards another tensor.
        samples, kept_shares: how many updates were looked at, and the sum of the shares of them that were kept.
    """

    count: int
    was_shrunk: bool = False
    start_values: Tensor | None = None
    exact_values: Tensor | None = None
    payload_version: int = -1
    is_average: bool = False
    samples: float = 0.0
    kept_shares: float = 0.0


def begin_update(name: str, x: Any, given: Mapping[str, Any], functional: Callable) -> SampledUpdates | None:
    """Return, if this in-place update of x is sampled, what `end_update` takes after the write; mostly None.

    `given` holds all arguments of the operator `name`, x too; `functional` is the operator that returns its result.
    """
    if name not in _ADDING_OPERATORS and name not in _SHRINKING_OPERATORS:
        return None
    if name in ("add_", "sub_") and not getattr(given.get("other"), "ndim", 0):
        return None  # a constant such as eps is no update
    if not isinstance(x, ScaledTensor) or x._payload.dtype == torch.float32 or x.numel() < LEAST_SAMPLED_ELEMENTS:
        return None
    if not _powers.is_concrete(x._payload) or not _powers.is_concrete(x._scale) or x._payload.is_inference():
        return None
    seen = _find_updates(x._scale)
    goes_on = seen.was_shrunk and name in _ADDING_OPERATORS
    seen.was_shrunk = name in _SHRINKING_OPERATORS
    is_next = (
        goes_on
        and seen.exact_values is not None
        and seen.payload_version == x._payload._version
        and seen.exact_values.shape == x.shape
    )
    if not is_next:
        seen.start_values = seen.exact_values = None
        seen.count += not goes_on
        if goes_on or seen.count % SAMPLE_INTERVAL:
            return None
        seen.start_values = decode_values(x, torch.float64)
    target = next(iter(given))
    wide = {key: _decode_to_float64(value) for key, value in given.items()}
    wide[target] = seen.exact_values if is_next else seen.start_values
    seen.exact_values = functional(**wide)
    seen.is_average = name == "lerp_" or (is_next and name in ("add_", "sub_"))
    return seen


def end_update(seen: SampledUpdates, name: str, x: ScaledTensor) -> None:
    """Compare a sampled update that has been written with the exact one, or wait for the addition that completes it."""
    if name in _SHRINKING_OPERATORS:
        seen.payload_version = x._payload._version
        return
    assert seen.exact_values is not None  # as `begin_update` left them
    assert seen.start_values is not None
    wanted, kept = seen.exact_values - seen.start_values, decode_values(x, torch.float64) - seen.start_values
    seen.start_values = seen.exact_values = None
    asked, got = (wanted * wanted).sum().item(), (wanted * kept).sum().item()
    if not 0.0 < asked < torch.inf:
        return
    seen.samples, seen.kept_shares = seen.samples + 1, seen.kept_shares + min(max(got / asked, -2.0), 2.0)
    if (
        seen.samples >= (_LEAST_AVERAGE_SAMPLES if seen.is_average else _LEAST_STEP_SAMPLES)
        and seen.kept_shares < 0.5 * seen.samples
    ):
        note_and_warn_once(
            "lost updates",
            f"{name} moves a ScaledTensor of {x._payload.dtype} by so little that rounding drops most of it: keep "
            "averages of weights in float32 (move a copy of the model by halfulp.scaled.unscalify, with lerp_), and "
            "let hu.optim step parameters, whose weight updates keep what rounding drops",
        )
    if seen.samples >= _MOST_SAMPLES:
        seen.samples, seen.kept_shares = seen.samples / 2, seen.kept_shares / 2


def _find_updates(scale: Tensor) -> SampledUpdates:
    key = id(scale)
    entry = _updates_by_scale.get(key)
    if entry is not None and entry[0]() is scale:
        return entry[1]

    def forget(dead: weakref.ref) -> None:
        if _updates_by_scale.get(key, (None,))[0] is dead:
            del _updates_by_scale[key]

    seen = SampledUpdates(next(_sampling_phases) % SAMPLE_INTERVAL)
    _updates_by_scale[key] = weakref.ref(scale, forget), seen
    return seen


def _decode_to_float64(x: Any) -> Any:
    if isinstance(x, ScaledTensor):
        return decode_values(x, torch.float64)
    return x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x
