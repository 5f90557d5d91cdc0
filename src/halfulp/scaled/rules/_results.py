"""Results of rules from float32 payloads or values and scales, and operands under one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import (
    STAND_IN,
    encode_values,
    first_scaled,
    logical_of,
    make_scaled_to_fit,
    operand,
    payload_under,
    storage_of,
)
from .._payloads import decode_values, to_float32
from .._scaled_tensor import ScaledTensor, wrap

# Beyond this scale, or below its inverse, payloads are brought back to about 1.
_FAR = 2.0**60


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Return tree_map(function, x), without its cost for a tensor and for plain tuples, lists and dicts."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind(mapped(function, y) for y in x)
    if kind is dict:
        return {key: mapped(function, y) for key, y in x.items()}
    return tree_map(function, x) if isinstance(x, (tuple, list, dict)) else function(x)


def is_floating(x: Any) -> bool:
    """Return whether x is a floating tensor, scaled or plain."""
    return isinstance(x, Tensor) and x.is_floating_point()


def value_of(x: Any) -> Any:
    """Return a tensor's values in float32, float32 for a floating dtype, and anything else unchanged."""
    if isinstance(x, ScaledTensor):
        return decode_values(x, torch.float32)
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(torch.float32)
    return torch.float32 if isinstance(x, torch.dtype) and x.is_floating_point else x


def scale_one(like: Tensor) -> Tensor:
    """Return the scale 1 on a tensor's device."""
    return torch.ones((), dtype=torch.float32, device=like.device)


def power_of_scale(scale: Tensor, degree: int) -> tuple[Tensor, Tensor | float]:
    """Return scale^degree as a scale, and the factor beyond its range."""
    value = _powers.concrete_value(scale)
    if value is not None:
        return _powers.product(torch.tensor(1.0, dtype=torch.float32, device="cpu"), value**degree)
    return _powers.product(torch.ones_like(scale), scale.double() ** degree)


def make_result(y: Any, scale: Tensor, rest: Tensor | float, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Return a float32 payload under a scale as a scaled tensor, and what is no float unchanged."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    y = _powers.times(y, rest)
    value = _powers.concrete_value(scale)
    if value is not None and not 1 / _FAR <= value <= _FAR and y.numel():
        y, scale = _centre(y, scale)
    return make_scaled_to_fit(y, scale, storage, dtype)


def _centre(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Bring a payload back to about 1: iterations that multiply scales would leave float32's range."""
    amax = torch.nan_to_num(y.abs(), 0.0, 0.0, 0.0).amax()
    power = _powers.round_to_power(torch.where(amax > 0, amax, 1.0))
    total, rest = _powers.product(scale, power)
    return _powers.times(y / power, rest), total


def payloads_under(results: Any, factors: list[Tensor], holders: list[Any], sum_scale: float = 1.0) -> Any:
    """Return floating results, payloads under the product of scales, each with a scale of its own."""
    storage, dtype = storage_of(holders), logical_of(holders)
    if not factors:
        factors = [scale_one(first_scaled(holders))]

    held: list[tuple[Tensor, Tensor | float]] = []  # computed once, if at all

    def scale_and_rest() -> tuple[Tensor, Tensor | float]:
        if not held:
            is_one = len(factors) == 1 and sum_scale == 1.0
            held.append((factors[0], 1.0) if is_one else _powers.product(*factors, sum_scale))
        return held[0]

    def rescaled(y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.is_floating_point():
            return y
        if is_fused(y, factors, storage, sum_scale):
            payload, made = fused.finish(y, factors, storage, number=sum_scale, factor=1.0 / sum_scale)
            return wrap(payload, made, dtype)
        scale, rest = scale_and_rest()
        return make_result(y if sum_scale == 1.0 else y * (1.0 / sum_scale), scale.clone(), rest, storage, dtype)

    return mapped(rescaled, results)


def is_fused(y: Tensor, factors: Sequence[Tensor], storage: torch.dtype, number: float = 1.0) -> bool:
    """Return whether one kernel makes a result of y, and there is anything to compute."""
    if len(factors) > 3 or y.dtype not in fused.CODECS or not fused.engaged(y):
        return False
    return len(factors) != 1 or number != 1.0 or y.dtype != storage


def values_under(y: Any, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Return float32 values as a scaled tensor of a given scale, and what is no float unchanged."""
    if not is_floating(y):
        return y
    if fused.engaged(y) and y.dtype in fused.CODECS:
        return wrap(*fused.finish(y, (scale,), storage, "values"), dtype)
    return make_result(y, scale.clone(), _powers.ratio(scale_one(y), scale), storage, dtype)


def values_under_one(y: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    """Return float32 values as a scaled tensor under the scale 1, or what the largest needs."""
    if y.dtype in fused.CODECS and y.dtype != storage and fused.engaged(y):
        return wrap(*fused.finish(y, (), storage), dtype)
    return make_scaled_to_fit(y, scale_one(y), storage, dtype)


def measured_like(y: Any, holders: list[Any]) -> Any:
    """Encode floating values under a measured scale, in the storage and dtype of holders."""
    return encode_values(y, storage_of(holders), dtype=logical_of(holders)) if is_floating(y) else y


def align(*operands: Any) -> tuple[list[Tensor], Tensor, torch.dtype, torch.dtype]:
    """Return operands' float32 payloads under their largest scale, that scale, the storage and the logical dtype.

    Numbers that stand for infinity do not decide the scale, and stay about as much larger than the rest as float32 can
    hold.
    """
    like = first_scaled(operands)
    tensors = [operand(x, like) for x in operands]
    storage, dtype = storage_of(operands), logical_of(operands)
    values: list[Any] = [_powers.concrete_value(x._scale) for x in tensors]
    if None in values:
        scale = _powers.deciding_scale(*(x._scale for x in tensors))
        payloads = [payload_under(x, scale) for x in tensors]
    else:
        largest = _powers.deciding_value(values)
        scale = torch.tensor(largest, dtype=torch.float32, device="cpu")
        payloads = [_powers.times_at_most(to_float32(x), value / largest) for x, value in zip(tensors, values)]
    payloads = [_saturate(p, given, value, storage) for p, given, value in zip(payloads, operands, values)]
    return payloads, scale, storage, dtype


def _saturate(payload: Tensor, given: Any, scale: float | None, storage: torch.dtype) -> Tensor:
    """Clamp an operand's stand-ins for infinity to the storage's range."""
    if isinstance(given, ScaledTensor):
        if scale is None or scale < _powers.HUGE:
            return payload
    elif not isinstance(given, Tensor) or not given.dim():
        return payload
    largest = torch.finfo(storage).max
    if storage in (torch.float32, torch.bfloat16) or (
        _powers.is_concrete(payload) and not (payload.abs() > largest).any()
    ):
        return payload
    stands_in = (value_of(given) <= -STAND_IN) & (payload.abs() > largest) & payload.isfinite()
    return torch.where(stands_in, payload.sign() * largest, payload)


def sqrt_of_count(count: int) -> float:
    """Return the power of two below the square root of a number of terms.

    Any power of two would give the same values: of a symbolic size the one of the size that is traced is taken, so
    that other sizes run in the same graph.
    """
    if isinstance(count, torch.SymInt):
        count = count.node.hint if count.node.has_hint() else 1
    power = 1
    while count >= 4 * power * power:
        power *= 2
    return float(power)
