"""Scaled parameters in a state_dict, as values and scales, and their gradients between processes."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .._messages import name_type
from ..subclass.models._state_dict import StateDictLayout, check_is_state_dict, divide_by_scale_exactly, register_layout
from . import _powers_of_two as _powers
from ._operands import encode_plain_tensor
from ._registry import LOGICAL_DTYPES, check_storage_dtype
from ._scaled_tensor import ScaledTensor, decode_values, measure_rms_scale, round_to_storage, wrap_payload
from .rules._collectives import agree_on_scales

# Layout of the entries below; a file of another layout is refused.
STATE_DICT_LAYOUT_VERSION = 2
_SCALE_SUFFIX = ".payload_scale"


def plain_state_dict(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a scaled model's state_dict without scales, values rounded once, for loaders that refuse unknown entries.

    Args:
        state_dict: from `state_dict()`, torch.load or safetensors.
        dtype: of the values of scaled tensors; entries that were none stay as they are.

    Returns:
        `weight` for every `weight` with `weight.payload_scale`, and the other entries, in the same order.

    Raises:
        TypeError: no mapping, such as a model instead of its state_dict.
        ValueError: another layout.

    >>> from halfulp.scaled import scalify
    >>> layer = torch.nn.Linear(3, 2)
    >>> layer.load_state_dict(plain_state_dict(scalify(torch.nn.Linear(3, 2)).state_dict()))
    <All keys matched successfully>
    """
    check_is_state_dict(state_dict, "plain_state_dict")
    names = {name.removesuffix(_SCALE_SUFFIX) for name in state_dict if name.endswith(_SCALE_SUFFIX)}
    names = {name for name in names if _is_scaled_entry(state_dict.get(name), state_dict[name + _SCALE_SUFFIX])}
    plain = {}
    for name, value in state_dict.items():
        if isinstance(value, ScaledTensor):
            plain[name] = decode_values(value, dtype)
        elif name in names:
            plain[name] = value.to(dtype, copy=True)
        elif name.removesuffix(_SCALE_SUFFIX) not in names:
            plain[name] = value
    return plain


def _is_scaled_entry(value: Any, scale: Any) -> bool:
    """Return whether two entries are a tensor and its payload's scale, not other parameters with such names."""
    if not all(isinstance(x, Tensor) and not isinstance(x, ScaledTensor) for x in (value, scale)):
        return False
    if not value.is_floating_point() or scale.dim() or scale.dtype != torch.float32:
        return False
    return scale.is_meta or bool(scale == _powers.round_to_power(scale))


def _decode_exactly(x: ScaledTensor) -> Tensor:
    """Return payload x scale in float32, or in float64 if that is its dtype or float32 would lose digits."""
    if x.dtype == torch.float64:
        return decode_values(x, torch.float64)
    values = decode_values(x, torch.float32)
    if values.is_meta:
        return values
    wide = x._payload.double() * x._scale.double()
    # Values that float32 holds only as its largest numbers are no loss: decoding clamps to these.
    lost = (values.double() != wide) & ~wide.isnan() & (wide.abs() != 2.0**128)
    return wide if bool(lost.any()) else values


def _read_parameter_entries(state_dict: Mapping[str, Any], name: str, parameter: ScaledTensor) -> ScaledTensor | None:
    """Return a parameter's entries in its own storage and home; None where the file has none."""
    storage, dtype, home = parameter._payload.dtype, parameter.dtype, parameter._home
    value = state_dict.get(name)
    try:
        if name + _SCALE_SUFFIX in state_dict:
            value = _join_values_and_scale(state_dict, name, dtype, storage)
        if not isinstance(value, Tensor):
            return None
        if isinstance(value, ScaledTensor) and value._payload.dtype == storage:
            return wrap_payload(value._payload, value._scale, value.dtype, home)
        plain = decode_values(value, torch.float32) if isinstance(value, ScaledTensor) else value
        if plain.dtype not in LOGICAL_DTYPES:
            raise ValueError(f"it is {plain.dtype} in the file, and payloads are encoded from floating tensors")
        encoded: ScaledTensor = encode_plain_tensor(plain.detach(), storage, dtype=dtype)
        encoded._home = home
        return encoded
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def _join_values_and_scale(state_dict: Mapping[str, Any], name: str, dtype: torch.dtype, storage: torch.dtype) -> Any:
    """Return a parameter's values and scale as a tensor; the values if they are no such payload under the scale."""
    entry = name + _SCALE_SUFFIX
    values, scale = state_dict.get(name), state_dict[entry]
    if values is None:
        raise ValueError(f"the file has {entry!r} alone: it is damaged")
    if not isinstance(scale, Tensor):
        raise ValueError(f"{entry!r} is {name_type(scale)}; the file is damaged")
    try:
        scale = _powers.make_scale(scale.detach(), scale.device)
    except ValueError as error:
        raise ValueError(f"{error}; the file is damaged") from None
    if isinstance(values, ScaledTensor) or not isinstance(values, Tensor) or values.dtype not in LOGICAL_DTYPES:
        return values
    payload = divide_by_scale_exactly(values, scale, storage)
    return values if payload is None else wrap_payload(payload, scale, dtype)


register_layout(
    StateDictLayout(
        ScaledTensor,
        metadata_key="halfulp_scaled",
        version=STATE_DICT_LAYOUT_VERSION,
        description="scaled tensors",
        auxiliary_suffix=re.compile(r"\.payload_scale$"),
        # The values under the parameter's own name, for every loader, and the scale of their payload.
        make_entries=lambda name, value: {name: _decode_exactly(value), name + _SCALE_SUFFIX: value._scale},
        read_tensor=_read_parameter_entries,
    )
)


def payload_hook(
    storage: torch.dtype | tuple[torch.dtype, dist.ProcessGroup], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average gradients over ranks as payloads of a narrow dtype: a communication hook for DistributedDataParallel.

    `model.register_comm_hook(torch.float16, payload_hook)` installs it, for plain and for scaled parameters; for a
    model with a process group of its own `model.register_comm_hook((torch.float16, group), payload_hook)`.
    Every gradient takes the largest of the scales that the ranks measure for it, one message for a bucket, and room
    for the sum; then the payloads are added. float32 payloads give what DistributedDataParallel gives without a hook,
    float16 half the traffic.

    Args:
        storage: the payload's dtype: float16, bfloat16 or float32; or a pair of it and the model's process group.
        bucket: what DistributedDataParallel hands over: plain gradients side by side.

    Returns:
        A future of the bucket's averages.

    Raises:
        ValueError: another dtype; eight-bit payloads cannot be added on the wire.
    """
    kind, group = storage if isinstance(storage, tuple) else (storage, dist.group.WORLD)
    if check_storage_dtype(kind).itemsize < 2:
        raise ValueError(f"storage={kind}: eight-bit payloads cannot be added on the wire, give torch.float16")
    size = dist.get_world_size(group)
    gradients = bucket.gradients()
    mine = [encode_plain_tensor(gradient, torch.float32, measure_rms_scale(gradient, kind)) for gradient in gradients]

    def find_largest(x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        return x

    scales = agree_on_scales(mine, find_largest, size, kind)
    payloads = [
        _powers.multiply_by_power(x._payload, _powers.divide_scales(x._scale, scale)) for x, scale in zip(mine, scales)
    ]
    message = torch.cat([round_to_storage(payload.reshape(-1), kind) for payload in payloads])
    finished = dist.all_reduce(message, group=group, async_op=True).get_future()
    counts = [gradient.numel() for gradient in gradients]

    def average_payloads(future: torch.futures.Future[Any]) -> Tensor:
        received = future.value()[0] if isinstance(future.value(), list) else future.value()
        for gradient, piece, scale in zip(gradients, received.split(counts), scales):
            gradient.copy_((piece.to(torch.float32) / size * scale).view_as(gradient))
        return bucket.buffer()

    result: torch.futures.Future[Tensor] = finished.then(average_payloads)
    return result


if dist.is_available():
    # torch compares annotations, and knows no strings.
    payload_hook.__annotations__ = typing.get_type_hints(payload_hook)
