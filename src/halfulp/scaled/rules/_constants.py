"""Constants beside tensors: a constant raises a common scale only as far as it needs itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _powers_of_two as _powers
from .._operands import LEAST_STAND_IN, first_scaled, operand, payload_under, storage_of, to_float32
from .._plain_addends import addend, large_elements, saturated
from .._scaled_tensor import ScaledTensor

FLOAT32_MAX = torch.finfo(torch.float32).max
# From these magnitudes on a constant stands for infinity: a scale that holds it would flush other numbers to 0.
_STAND_IN = {torch.float16: 2.0**24, torch.float8_e5m2: 2.0**24, torch.float8_e4m3fn: 2.0**12}
# Among zeros, larger constants are put at the top of the payload's range: numbers added later are mostly smaller.
_LARGE = 2.0**12


def is_constant(x: Any) -> bool:
    """Return whether x is a number or a plain tensor without dimensions, which never decides a scale."""
    return not isinstance(x, ScaledTensor) and (not isinstance(x, Tensor) or x.dim() == 0)


def align_with_constants(operands: list[Any]) -> tuple[list[Any], Tensor]:
    """Return float32 payloads under their largest scale, to which constants do not contribute.

    It is at least what a constant needs. One that stands for infinity saturates, at 128 or more. Infinities stay; among
    zeros of any scale a constant's own power of two is taken, for a large one what it needs.
    """
    like, storage = first_scaled(operands), storage_of(operands)
    tensors = {i: addend(x, like) for i, x in enumerate(operands) if not is_constant(x)}
    constants = {i: operand(x, like) for i, x in enumerate(operands) if i not in tensors}
    filled = {i for i, x in tensors.items() if is_filled(x)}
    if len(filled) < len(tensors):
        constants |= {i: tensors.pop(i) for i in filled}
    scale = _powers.deciding_scale(*(x._scale for x in tensors.values()))
    if constants:
        scale = with_room(scale, storage, *constants.values())
    payloads = {i: payload_under(x, scale) for i, x in tensors.items()}
    payloads = {i: saturated(p, scale, storage, large_elements(operands[i], like)) for i, p in payloads.items()}
    payloads |= {i: constant_payload(x, scale, storage) for i, x in constants.items()}
    return [payloads[i] for i in range(len(operands))], scale


def is_filled(x: ScaledTensor) -> bool:
    """Return whether x is one large number everywhere, as torch.full_like(x, -1e9) is; False if not concrete."""
    scale = _powers.concrete_value(x._scale)
    if scale is None or scale < _LARGE / 2**16 or not _powers.is_concrete(x._payload) or not x.numel():
        return False
    low, high = (bound.item() for bound in torch.aminmax(to_float32(x).abs()))
    return low * scale >= _LARGE and high == low


def with_room(scale: Tensor, storage: torch.dtype, *constants: ScaledTensor) -> Tensor:
    """Return the scale, raised until the constants fit the storage; where x is all zeros, the constants' largest."""
    value = _powers.concrete_value(scale)
    roomy = _powers.maximum_scale(scale, *(_least_scale(c, storage) for c in constants))
    return roomy if value not in (None, _powers.ZERO_SCALE) else _zeros_scale(scale, roomy, storage, constants)


def _zeros_scale(scale: Tensor, otherwise: Tensor, storage: torch.dtype, constants: tuple[ScaledTensor, ...]) -> Tensor:
    """Return the constants' largest scale for zeros of any scale; at least 1 for a large one, and what it needs."""
    own = _powers.maximum_scale(*(c._scale for c in constants))
    roomy = _powers.maximum_scale(*(_least_scale(c, storage) for c in constants)).clamp(min=1.0)
    return torch.where(scale == _powers.ZERO_SCALE, torch.where(own < _LARGE, own, roomy), otherwise)


def _least_scale(constant: ScaledTensor, storage: torch.dtype) -> Tensor:
    largest = torch.finfo(storage).max
    value = torch.nan_to_num(to_float32(constant).abs() * constant._scale, 0.0, 0.0).amax()
    return _powers.round_to_power(torch.where(value >= _stand_in(storage), LEAST_STAND_IN, value) / largest, "up")


def constant_payload(constant: ScaledTensor, scale: Tensor, storage: torch.dtype) -> Tensor:
    """Return a constant's payload under a scale; a constant that stands for infinity saturates."""
    payload = to_float32(constant)
    largest = torch.finfo(storage).max
    moved = _powers.times(payload, _powers.ratio(constant._scale, scale)).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    if storage == torch.bfloat16:  # to which float32's largest number would be rounded as infinity
        held = (largest / scale).clamp(max=largest)
        moved = torch.minimum(torch.maximum(moved, -held), held)
    stands_in = (moved.abs() > largest) & (payload.abs() * constant._scale >= _stand_in(storage))
    enough = _powers.maximum_scale(torch.full_like(scale, largest), LEAST_STAND_IN / scale)
    return torch.where(payload.isinf(), payload, torch.where(stands_in, moved.sign() * enough, moved))


def constants_under(x: ScaledTensor, *constants: Any, room: bool = True) -> tuple[list[Any], Tensor]:
    """Return constants as payloads, and x's scale, raised as they need, or theirs if x is zeros of any scale.

    Args:
        x: a scaled tensor.
        constants: numbers, or tensors without dimensions.
        room: False where they are bounds, which results need not reach: only zeros of any scale take theirs.
    """
    storage, own = x._payload.dtype, _powers.concrete_value(x._scale)
    if own is not None and all(isinstance(c, (int, float)) for c in constants):
        numbers = [float(c) for c in constants]
        needed = [_room_of(c, storage) for c in numbers] if room else []
        if own == _powers.ZERO_SCALE:
            powers = {c: _powers.power_of(abs(c)) for c in numbers if c and math.isfinite(c)}
            needed = [p if p < _LARGE else max(1.0, _room_of(c, storage)) for c, p in powers.items()]
        own = max([own, *needed])
        return [_payload_of(c, own, storage) for c in numbers], torch.full((), own, dtype=torch.float32, device="cpu")
    tensors = [operand(c, x) for c in constants]
    scale = (
        with_room(x._scale, storage, *tensors) if room else _zeros_scale(x._scale, x._scale, storage, tuple(tensors))
    )
    return [constant_payload(c, scale, storage) for c in tensors], scale


def _room_of(constant: float, storage: torch.dtype) -> float:
    size = abs(constant)
    if not 0 < size < math.inf:
        return _powers.ZERO_SCALE
    return _powers.power_of((LEAST_STAND_IN if size >= _stand_in(storage) else size) / torch.finfo(storage).max, "up")


def _payload_of(constant: float, scale: float, storage: torch.dtype) -> float:
    if not math.isfinite(constant):
        return constant
    payload, largest = constant / scale, torch.finfo(storage).max
    if storage == torch.bfloat16:
        held = min(largest, largest / scale)
        return min(max(payload, -held), held)
    if abs(payload) > largest and abs(constant) >= _stand_in(storage):
        return math.copysign(min(max(largest, LEAST_STAND_IN / scale), FLOAT32_MAX), constant)
    return min(max(payload, -FLOAT32_MAX), FLOAT32_MAX)


def _stand_in(storage: torch.dtype) -> float:
    return _STAND_IN.get(storage, _powers.HUGE)
