"""Rules of operators that need their operands under one scale: sums, choices, joins, bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...subclass._derivation import aten
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import (
    choose_storage,
    encode_ignoring_outliers,
    encode_operand,
    find_outliers,
    find_scaled_tensor,
    fit_payload,
    promote_dtypes,
    raise_underflows_to_smallest,
    saturate_outliers,
    wrap_rounded_payload,
)
from .._registry import FULL_RANGE_STORAGES, implements, implements_each
from .._scaled_tensor import (
    SMALLEST_PAYLOAD_NUMBER_BY_STORAGE,
    ScaledTensor,
    decode_if_scaled,
    decode_values,
    get_float32_payload,
    wrap_payload,
)
from ._vocabulary import align_constants, align_operands, align_with_constants, make_scaled_results

# The largest eps: numbers added to keep a divisor from 0 are no larger.
_LARGEST_DIVISOR_EPS = 1e-3
# Storages whose smallest number, at most 2^-16, is as good as 0 beside 1: sums of one sign become it instead of 0.
# In wider ranges no such sum becomes 0.
_STORAGES_WITH_SUM_UNDERFLOW_REPLACED = (torch.float16, torch.float8_e5m2)


def move_power_of_factor_to_scale(x: Any, factor: Any, like: ScaledTensor) -> tuple[Any, float]:
    """Return x with the power of two next to a number in its scale, and the rest of the number."""
    x = encode_ignoring_outliers(x, like, factor)
    if factor == 1:
        return x, 1.0
    power = _powers.round_number_to_power(abs(float(factor))) if factor else 1.0
    scale, rest = _powers.multiply_scales(x._scale, power)
    wide = wrap_payload(_powers.multiply_by_power(get_float32_payload(x), rest), scale, x.dtype)
    return wide, float(factor) / power


def _align_and_add(
    operator: Callable, a: Any, b: Any, alpha: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """Return both payloads, op(a, alpha b) and the scale of the three, and the storage."""
    if type(a) is ScaledTensor and type(b) is ScaledTensor and alpha == 1:
        (x, y), scale, storage, _ = align_operands(a, b)
        return x, y, operator(x, y), scale, storage
    like = find_scaled_tensor((a, b))
    storage = choose_storage((a, b))
    moved, factor = move_power_of_factor_to_scale(b, alpha, like)
    (x, y), scale, *_ = align_operands(encode_ignoring_outliers(a, like), moved)
    total = operator(x, y, alpha=factor)
    total = saturate_outliers(total, scale, storage, find_outliers(a, like), find_outliers(b, like, alpha))
    return x, y, total, scale, storage


def _add_by_fused_kernel(a: Any, b: Any, alpha: Any, sign: float) -> ScaledTensor | None:
    """Return a + sign b of two scaled tensors that lie alike by one kernel; None of others."""
    if type(a) is not ScaledTensor or type(b) is not ScaledTensor or type(alpha) is bool or alpha != 1:
        return None
    x, y = a._payload, b._payload
    if not _powers.has_fused_kernels(x) or not _powers.has_fused_kernels(y):
        return None
    storage = choose_storage((a, b))
    keep = sign > 0 and storage in _STORAGES_WITH_SUM_UNDERFLOW_REPLACED
    if fused.has_equal_or_repeating_layout(x, y):
        payload, scale = fused.add_payloads(x, y, a._scale, b._scale, storage, sign, keep)
    elif sign > 0 and fused.has_equal_or_repeating_layout(y, x):
        payload, scale = fused.add_payloads(y, x, b._scale, a._scale, storage, sign, keep)
    else:
        return None
    return wrap_payload(payload, scale, promote_dtypes((a, b)))


@implements(aten.add.Tensor, aten.add.Scalar, family="alignment")
def add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a + alpha b under the larger scale."""
    made = _add_by_fused_kernel(a, b, alpha, 1.0)
    if made is not None:
        return made
    x, y, total, scale, storage = _align_and_add(torch.add, a, b, alpha)
    rounded = fit_payload(total, scale, storage, promote_dtypes((a, b)))
    # The eps of an optimizer or a normalisation must not vanish: it keeps a divisor from 0.
    if _is_vanishing_number(b, scale, storage):
        return raise_underflows_to_smallest(rounded, total)
    # Sums of numbers of one sign are kept from rounding to 0: what is divided by a sum of positives is finite.
    if storage not in _STORAGES_WITH_SUM_UNDERFLOW_REPLACED:
        return rounded
    if _powers.has_readable_values(total):
        # Whether rounding made an element 0, or may have, beside NaN: by two passes, as every sum asks.
        least = SMALLEST_PAYLOAD_NUMBER_BY_STORAGE[storage] / 2
        if rounded._scale is not scale:
            least *= rounded._scale.item() / scale.item()
        if torch.equal(torch.nn.functional.hardshrink(total, least), total):
            return rounded
    is_one_sign = ((x >= 0) & (y >= 0)) | ((x <= 0) & (y <= 0))
    return raise_underflows_to_smallest(rounded, torch.where(is_one_sign, total, 0.0))


def _is_vanishing_number(number: Any, scale: Tensor, storage: torch.dtype) -> bool:
    """Return whether a positive number is below the payload's range under the scale; True if that is unknown."""
    if storage in FULL_RANGE_STORAGES:
        return False
    if type(number) is not ScaledTensor and isinstance(number, Tensor) and not number.dim():
        # Compiled optimizers add a tensor of one number, and divide by what has the other sign.
        if not _powers.has_readable_values(number):
            return True
        number = abs(number.item())
    if not isinstance(number, (int, float)) or not number > 0:
        return False
    held = _powers.read_scale(scale)
    return number < (_LARGEST_DIVISOR_EPS if held is None else SMALLEST_PAYLOAD_NUMBER_BY_STORAGE[storage] * held)


@implements(aten.sub.Tensor, aten.sub.Scalar, family="alignment")
def sub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a - alpha b under the larger scale."""
    made = _add_by_fused_kernel(a, b, alpha, -1.0)
    if made is not None:
        return made
    *_, total, scale, storage = _align_and_add(torch.sub, a, b, alpha)
    return fit_payload(total, scale, storage, promote_dtypes((a, b)))


implements(aten.rsub.Tensor, aten.rsub.Scalar, family="alignment")(lambda a, b, alpha=1: sub(b, a, alpha))


@implements_each(aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default, family="alignment")
def take_maximum_or_minimum(operator: OpOverload, a: Any, b: Any) -> Tensor:
    """Return the larger or the smaller elements under the larger scale, which constants do not decide."""
    (x, y), scale = align_with_constants([a, b])
    return make_scaled_results(operator(x, y), [scale], [a, b])


@implements(aten.where.self, family="alignment")
def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    """a or b under the larger scale, which constants do not decide."""
    condition = decode_if_scaled(condition)
    if not any(isinstance(x, ScaledTensor) for x in (a, b)):
        return torch.where(condition, a, b)
    (x, y), scale = align_with_constants([a, b])
    return make_scaled_results(torch.where(condition, x, y), [scale], [a, b])


@implements(aten.hypot.default, family="alignment")
def hypot(a: Any, b: Any) -> Tensor:
    """Return the root of a^2 + b^2 under the larger scale."""
    (x, y), scale, storage, dtype = align_operands(a, b)
    total = torch.hypot(x, y)
    return raise_underflows_to_smallest(fit_payload(total, scale, storage, dtype), total)


@implements_each(aten.cat.default, aten.stack.default, family="alignment")
def join_tensors(operator: OpOverload, tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Join tensors under the largest scale, which constants do not decide."""
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    payloads, scale = align_with_constants(list(tensors))
    return wrap_rounded_payload(operator(payloads, dim), scale, choose_storage(tensors), dtype)


@implements(aten.clamp.default, aten.clamp.Tensor, family="alignment")
def clamp(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """x between bounds; numbers among them keep x's scale."""
    given = [x, *(bound for bound in (low, high) if bound is not None)]
    if not isinstance(x, ScaledTensor) or any(isinstance(b, Tensor) and b.dim() for b in given[1:]):
        payloads, scale = align_with_constants(given)
    else:
        lowered = x
        sizes = [abs(float(b)) for b in (low, high) if isinstance(b, (int, float))]
        if len(sizes) == 2 and 0 < max(sizes) < float("inf"):  # no result needs more than the larger bound's power
            limit = torch.full_like(x._scale, _powers.round_number_to_power(max(sizes)))
            lowered = wrap_payload(x._payload, torch.minimum(x._scale, limit), x.dtype)
        bounds, scale = align_constants(lowered, *given[1:], makes_room=False)
        bounds = [torch.full((), b, dtype=torch.float32, device=x.device) if type(b) is float else b for b in bounds]
        payloads = [_powers.multiply_by_power(get_float32_payload(x), _powers.divide_scales(x._scale, scale)), *bounds]
    values = payloads.pop(0)
    limits = [None if bound is None else payloads.pop(0) for bound in (low, high)]
    return make_scaled_results(torch.clamp(values, *limits), [scale], given)


implements(aten.clamp_min.default, aten.clamp_min.Tensor, family="alignment")(lambda x, low: clamp(x, low, None))
implements(aten.clamp_max.default, aten.clamp_max.Tensor, family="alignment")(lambda x, high: clamp(x, None, high))
implements(aten.hardtanh.default, family="gated")(lambda x, low=-1, high=1: clamp(x, low, high))


def apply_to_payload_and_constant(operator: Any, x: ScaledTensor, value: Any) -> Tensor:
    """Return op(payload, payload of a constant) under x's scale."""
    (payload,), scale = align_constants(x, value)
    own = _powers.multiply_by_power(get_float32_payload(x), _powers.divide_scales(x._scale, scale))
    return make_scaled_results(operator(own, payload), [scale], [x])


@implements(aten.masked_fill.Scalar, aten.masked_fill.Tensor, family="alignment")
def masked_fill(x: Any, mask: Tensor, value: Any) -> Tensor:
    """Return a constant where the mask is true, under x's scale."""
    if not isinstance(x, ScaledTensor):
        return torch.masked_fill(x, mask, decode_values(value, x.dtype))
    # masked_fill reads a constant that is a tensor, and waits for its device.
    return apply_to_payload_and_constant(
        lambda p, c: torch.where(mask, c, p) if isinstance(c, Tensor) else torch.masked_fill(p, mask, c), x, value
    )


@implements(aten.constant_pad_nd.default, family="alignment")
def constant_pad_nd(x: ScaledTensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Return a constant around x, under x's scale."""
    if not value:
        return make_scaled_results(aten.constant_pad_nd.default(get_float32_payload(x), pad), [x._scale], [x])

    def pad_payload(payload: Tensor, constant: Any) -> Tensor:
        if not isinstance(constant, Tensor):
            return aten.constant_pad_nd.default(payload, pad, constant)
        inside = aten.constant_pad_nd.default(torch.ones_like(payload, dtype=torch.bool), pad)
        return torch.where(inside, aten.constant_pad_nd.default(payload, pad), constant)

    return apply_to_payload_and_constant(pad_payload, x, value)


@implements(aten.fill.Scalar, aten.fill.Tensor, family="alignment")
def fill(x: Any, value: Any) -> Tensor:
    """Fill with one number, under its own power of two."""
    if not isinstance(x, ScaledTensor):
        return torch.full_like(x, 0).copy_(decode_values(value))
    number = encode_operand(value, x)
    payload = torch.empty_like(x._payload, dtype=torch.float32).copy_(get_float32_payload(number))
    return wrap_rounded_payload(payload, number._scale.clone(), x._payload.dtype, x.dtype)


implements(aten.zero.default, family="alignment")(lambda x: torch.zeros_like(x))


@implements(aten.copy.default, family="alignment")
def copy(x: Any, source: Any, non_blocking: bool = False) -> Tensor:
    """Return the source's values in x's shape, storage and dtype, under the source's scale."""
    if not isinstance(x, ScaledTensor):
        return aten.copy.default(x, decode_values(source), non_blocking)
    given = encode_operand(source, x)
    payload = aten.copy.default(
        torch.empty_like(x._payload, dtype=torch.float32), get_float32_payload(given), non_blocking
    )
    scale = given._scale.to(x.device) if given._scale.device != x.device else given._scale.clone()
    return wrap_rounded_payload(payload, scale, x._payload.dtype, x.dtype)
