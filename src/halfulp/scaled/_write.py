"""Writes into scaled tensors: what owns its memory takes the value's scale, a part keeps its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..subclass._composite_tensor import owns_all_memory
from ..subclass._derivation import aten
from . import _powers_of_two as _powers
from ._operands import encode_operand
from ._registry import FULL_RANGE_STORAGES, implements
from ._scaled_tensor import (
    SMALLEST_PAYLOAD_NUMBER_BY_STORAGE,
    ScaledTensor,
    decode_if_scaled,
    get_float32_payload,
    round_to_storage,
)


@implements(aten.copy_.default, family="writing")
def copy_(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor of any kind into x."""
    return write_values(x, value)


def write_values(x: Tensor, value: Any) -> Tensor:
    """Copy a tensor of any kind or a number into x; its views see it."""
    # A scaled tensor that owns all of its memory takes the value's scale. One that is a part of other memory keeps the
    # scale, unless there are only zeros of any scale: it stays as it was and ValueError is raised if the value does not
    # fit, or would be 0, where values can be looked at.
    if not isinstance(x, ScaledTensor):
        return x.copy_(decode_if_scaled(value))
    value = encode_operand(value, x)
    if value.shape != x.shape and torch.broadcast_shapes(value.shape, x.shape) != x.shape:
        raise RuntimeError(f"a value of shape {list(value.shape)} for a tensor of shape {list(x.shape)}")
    if type(x._payload) is Tensor:
        is_whole = owns_all_memory(x._payload)
    else:
        is_whole = not x._is_view() and not x._payload._is_view()
    if is_whole:
        # The same storage is copied without computing: torch runs such copies after a compiled graph, outside of it.
        same = value._payload.dtype == x._payload.dtype
        payload, scale = value._payload if same else get_float32_payload(value), value._scale
    else:
        scale = torch.where(x._scale == _powers.SCALE_OF_ZEROS, value._scale, x._scale)
        payload = _powers.multiply_by_power(get_float32_payload(value), _powers.divide_scales(value._scale, scale))
        _check_written_value_fits(x, payload, value)
    if x._payload.dtype == torch.bfloat16 and payload.dtype == torch.float32:
        # Finite numbers that bfloat16 would round to infinity, as float32's largest, saturate.
        held = (torch.finfo(torch.bfloat16).max / scale).clamp(max=torch.finfo(torch.bfloat16).max)
        fits = _powers.has_readable_values(payload) and (
            not payload.numel() or payload.abs().amax().item() <= held.item()
        )
        payload = payload if fits else _powers.clamp_finite_values(payload, held)
    x._payload.copy_(payload if payload.dtype == x._payload.dtype else round_to_storage(payload, x._payload.dtype))
    x._scale.copy_(scale)
    return x


def _check_written_value_fits(x: ScaledTensor, payload: Tensor, value: ScaledTensor) -> None:
    storage = x._payload.dtype
    largest = torch.finfo(storage).max
    if not _powers.has_readable_values(payload):
        if storage not in FULL_RANGE_STORAGES:
            torch._assert_async(
                ~_has_overflow(payload, value, largest),
                f"a value is out of {storage}'s range under the scale of the memory it is written into: write into "
                "x.clone(), or give the whole tensor a larger scale first, x.with_scale(...)",
            )
        return
    top = payload.abs().amax().item() if payload.numel() else 1.0
    if top <= SMALLEST_PAYLOAD_NUMBER_BY_STORAGE[storage] / 2 and (
        amax := get_float32_payload(value).abs().amax().item()
    ):
        reason, wanted = f"a value of magnitude {amax * value._scale.item():g} is 0 in {storage}", "smaller"
    elif not top <= largest and bool(_has_overflow(payload, value, largest)):
        reason, wanted = f"a value is out of {storage}'s range", "larger"
    else:
        return
    raise ValueError(
        f"{reason} under the scale {x._scale.item():g}, which this tensor shares with the memory it is a view of: it "
        f"is as it was. Write into x.clone(), or give the whole tensor a {wanted} scale first, x.with_scale(...)"
    )


# The argument that operators write at indices or under a mask, by the operator's name.
_WRITTEN_ARGUMENT_BY_OPERATOR = {
    **dict.fromkeys(("masked_fill_", "index_fill_"), "value"),
    **dict.fromkeys(("masked_scatter_", "index_copy_", "put_"), "source"),
    **dict.fromkeys(("index_put_", "_index_put_impl_"), "values"),
    **{"scatter_": "src", "fill_diagonal_": "fill_value"},
}


def refuse_vanishing_indexed_write(name: str, given: Mapping[str, Any], x: Any, result: Any) -> None:
    """Raise if all of what an operator writes at indices or under a mask would be 0 in the result, and is not."""
    # Constants have no say in a scale: large ones saturate, but those that vanish leave zeros that nobody asked for.
    written = given.get(_WRITTEN_ARGUMENT_BY_OPERATOR.get(name, ""), given.get("value") if name == "scatter_" else None)
    if written is None or given.get("accumulate") or given.get("reduce"):
        return
    if not isinstance(x, ScaledTensor) or not isinstance(result, ScaledTensor):
        return
    value = encode_operand(written, x)
    if not value.numel() or not all(map(_powers.has_readable_values, (value._payload, value._scale, result._scale))):
        return
    targets = [one for one in (given.get("mask"), given.get("index"), *given.get("indices", ())) if one is not None]
    if any(not (one.any() if one.dtype in (torch.bool, torch.uint8) else one.numel()) for one in targets):
        return  # nothing is written
    largest, scale = get_float32_payload(value).abs().amax().item() * value._scale.item(), result._scale.item()
    if largest and largest <= scale * (SMALLEST_PAYLOAD_NUMBER_BY_STORAGE[x._payload.dtype] / 2):
        raise ValueError(
            f"a value of magnitude {largest:g} is 0 in {x._payload.dtype} under the scale {scale:g} of the tensor that "
            f"{name} writes it into: it is as it was. Give the tensor a smaller scale first, x.copy_(x.with_scale(...))"
        )


def _has_overflow(payload: Tensor, value: ScaledTensor, largest: float) -> Tensor:
    return ((payload.abs() > largest) & get_float32_payload(value).isfinite()).any()
