"""Rules of operators that need their operands under one scale: sums, choices, joins, bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import find_torch_operators
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import (
    choose_storage,
    find_scaled,
    find_stand_ins,
    keep_nonzero,
    make_addend,
    make_operand,
    make_scaled,
    make_scaled_to_fit,
    promote_dtypes,
    saturate_stand_ins,
)
from .._registry import implements
from .._scaled_tensor import ScaledTensor, decode_values, find_smallest, to_float32, to_plain, wrap
from ._vocabulary import align_constants, align_operands, align_with_constants, scale_payloads

aten = find_torch_operators("aten")
# The largest eps: numbers added to keep a divisor from 0 are no larger.
_LARGEST_EPS = 1e-3
# Payload types whose smallest number is no larger, next to which it is as good as 0.
_LARGEST_NEGLIGIBLE_NUMBER = 2.0**-16


def move_power_to_scale(x: Any, factor: Any, like: ScaledTensor) -> tuple[Any, float]:
    """Return x with the power of two next to a number in its scale, and the rest of the number."""
    x = make_addend(x, like, factor)
    if factor == 1:
        return x, 1.0
    power = _powers.round_number(abs(float(factor))) if factor else 1.0
    scale, rest = _powers.multiply_scales(x._scale, power)
    wide = wrap(_powers.multiply_by_power(to_float32(x), rest), scale, x.dtype)
    return wide, float(factor) / power


def _add_payloads(operator: Callable, a: Any, b: Any, alpha: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """Return both payloads, op(a, alpha b) and the scale of the three, and the storage."""
    if type(a) is ScaledTensor and type(b) is ScaledTensor and alpha == 1:
        (x, y), scale, storage, _ = align_operands(a, b)
        return x, y, operator(x, y), scale, storage
    like = find_scaled((a, b))
    storage = choose_storage((a, b))
    moved, factor = move_power_to_scale(b, alpha, like)
    (x, y), scale, *_ = align_operands(make_addend(a, like), moved)
    total = operator(x, y, alpha=factor)
    total = saturate_stand_ins(total, scale, storage, find_stand_ins(a, like), find_stand_ins(b, like, alpha))
    return x, y, total, scale, storage


def _add_by_fused_kernel(a: Any, b: Any, alpha: Any, sign: float) -> ScaledTensor | None:
    """Return a + sign b of two scaled tensors that lie alike by one kernel; None of others."""
    if type(a) is not ScaledTensor or type(b) is not ScaledTensor or type(alpha) is bool or alpha != 1:
        return None
    x, y = a._payload, b._payload
    if not _powers.is_fused(x) or not _powers.is_fused(y):
        return None
    storage = choose_storage((a, b))
    keep = (
        sign > 0
        and find_smallest(storage) <= _LARGEST_NEGLIGIBLE_NUMBER
        and storage not in (torch.bfloat16, torch.float32)
    )
    if fused.is_elementwise_pair(x, y):
        payload, scale = fused.add_payloads(x, y, a._scale, b._scale, storage, sign, keep)
    elif sign > 0 and fused.is_elementwise_pair(y, x):
        payload, scale = fused.add_payloads(y, x, b._scale, a._scale, storage, sign, keep)
    else:
        return None
    return wrap(payload, scale, promote_dtypes((a, b)))


@implements(aten.add.Tensor, aten.add.Scalar, family="alignment")
def add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a + alpha b under the larger scale."""
    made = _add_by_fused_kernel(a, b, alpha, 1.0)
    if made is not None:
        return made
    x, y, total, scale, storage = _add_payloads(torch.add, a, b, alpha)
    made_up = make_scaled_to_fit(total, scale, storage, promote_dtypes((a, b)))
    # The eps of an optimizer or a normalisation must not vanish: it keeps a divisor from 0.
    if _is_vanishing_number(b, scale, storage):
        return keep_nonzero(made_up, total)
    return _keep_sum_of_one_sign(made_up, total, scale, x, y)


def _keep_sum_of_one_sign(rounded: ScaledTensor, total: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Keep sums of numbers of one sign from rounding to 0: what is divided by a sum of positives is finite."""
    if find_smallest(rounded._payload.dtype) > _LARGEST_NEGLIGIBLE_NUMBER or rounded._payload.dtype in (
        torch.float32,
        torch.bfloat16,
    ):
        return rounded
    if _powers.is_concrete(total):
        # Whether rounding made an element 0, or may have, beside NaN: by two passes, as every sum asks.
        least = find_smallest(rounded._payload.dtype) / 2
        if rounded._scale is not scale:
            least *= rounded._scale.item() / scale.item()
        if torch.equal(torch.nn.functional.hardshrink(total, least), total):
            return rounded
    is_one_sign = ((x >= 0) & (y >= 0)) | ((x <= 0) & (y <= 0))
    return keep_nonzero(rounded, torch.where(is_one_sign, total, 0.0))


def _is_vanishing_number(number: Any, scale: Tensor, storage: torch.dtype) -> bool:
    """Return whether a positive number is below the payload's range under the scale; True if that is unknown.

    Compiled optimizers divide by what has the other sign, and add a tensor of one number.
    """
    if storage in (torch.float32, torch.bfloat16):
        return False
    if type(number) is not ScaledTensor and isinstance(number, Tensor) and not number.dim():
        if not _powers.is_concrete(number):
            return True
        number = abs(number.item())
    if not isinstance(number, (int, float)) or not number > 0:
        return False
    held = _powers.read_concrete(scale)
    return number < (_LARGEST_EPS if held is None else find_smallest(storage) * held)


@implements(aten.sub.Tensor, aten.sub.Scalar, family="alignment")
def sub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a - alpha b under the larger scale."""
    made = _add_by_fused_kernel(a, b, alpha, -1.0)
    if made is not None:
        return made
    *_, total, scale, storage = _add_payloads(torch.sub, a, b, alpha)
    return make_scaled_to_fit(total, scale, storage, promote_dtypes((a, b)))


implements(aten.rsub.Tensor, aten.rsub.Scalar, family="alignment")(lambda a, b, alpha=1: sub(b, a, alpha))


def _register_choice(operator: OpOverload) -> None:
    """Register an operator that selects one of two: constants do not decide the scale."""

    def pick(a: Any, b: Any) -> Tensor:
        (x, y), scale = align_with_constants([a, b])
        return scale_payloads(operator(x, y), [scale], [a, b])

    implements(operator, family="alignment")(pick)


for _operator in (aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default):
    _register_choice(_operator)


@implements(aten.where.self, family="alignment")
def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    """a or b under the larger scale, which constants do not decide."""
    condition = to_plain(condition)
    if not any(isinstance(x, ScaledTensor) for x in (a, b)):
        return torch.where(condition, a, b)
    (x, y), scale = align_with_constants([a, b])
    return scale_payloads(torch.where(condition, x, y), [scale], [a, b])


@implements(aten.hypot.default, family="alignment")
def hypot(a: Any, b: Any) -> Tensor:
    """Return the root of a^2 + b^2 under the larger scale."""
    (x, y), scale, storage, dtype = align_operands(a, b)
    total = torch.hypot(x, y)
    return keep_nonzero(make_scaled_to_fit(total, scale, storage, dtype), total)


def _register_concatenation(operator: OpOverload) -> None:
    """Register an operator that joins tensors: under the largest scale."""

    def join(tensors: Sequence[Any], dim: int = 0) -> Tensor:
        dtype = tensors[0].dtype
        for x in tensors[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
        payloads, scale = align_with_constants(list(tensors))
        return make_scaled(operator(payloads, dim), scale, choose_storage(tensors), dtype)

    implements(operator, family="alignment")(join)


_register_concatenation(aten.cat.default)
_register_concatenation(aten.stack.default)


def _lower_scale_to_bounds(x: ScaledTensor, low: Any, high: Any) -> ScaledTensor:
    """Return x under the power of two of its larger bound, if two numbers bound it and that is the smaller scale."""
    bounds = [abs(float(b)) for b in (low, high) if isinstance(b, (int, float))]
    if len(bounds) < 2 or not 0 < max(bounds) < float("inf"):
        return x
    limit = torch.full_like(x._scale, _powers.round_number(max(bounds)))
    return wrap(x._payload, torch.minimum(x._scale, limit), x.dtype)


@implements(aten.clamp.default, aten.clamp.Tensor, family="alignment")
def clamp(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """x between bounds; numbers among them keep x's scale."""
    given = [x, *(bound for bound in (low, high) if bound is not None)]
    if not isinstance(x, ScaledTensor) or any(isinstance(b, Tensor) and b.dim() for b in given[1:]):
        payloads, scale = align_with_constants(given)
    else:
        bounds, scale = align_constants(_lower_scale_to_bounds(x, low, high), *given[1:], room=False)
        bounds = [torch.full((), b, dtype=torch.float32, device=x.device) if type(b) is float else b for b in bounds]
        payloads = [_powers.multiply_by_power(to_float32(x), _powers.divide_scales(x._scale, scale)), *bounds]
    values = payloads.pop(0)
    limits = [None if bound is None else payloads.pop(0) for bound in (low, high)]
    return scale_payloads(torch.clamp(values, *limits), [scale], given)


implements(aten.clamp_min.default, aten.clamp_min.Tensor, family="alignment")(lambda x, low: clamp(x, low, None))
implements(aten.clamp_max.default, aten.clamp_max.Tensor, family="alignment")(lambda x, high: clamp(x, None, high))
implements(aten.hardtanh.default, family="gated")(lambda x, low=-1, high=1: clamp(x, low, high))


def apply_with_constant(operator: Any, x: ScaledTensor, value: Any) -> Tensor:
    """Return op(payload, payload of a constant) under x's scale."""
    (payload,), scale = align_constants(x, value)
    own = _powers.multiply_by_power(to_float32(x), _powers.divide_scales(x._scale, scale))
    return scale_payloads(operator(own, payload), [scale], [x])


@implements(aten.masked_fill.Scalar, aten.masked_fill.Tensor, family="alignment")
def masked_fill(x: Any, mask: Tensor, value: Any) -> Tensor:
    """Return a constant where the mask is true, under x's scale."""
    if not isinstance(x, ScaledTensor):
        return torch.masked_fill(x, mask, decode_values(value, x.dtype))
    # masked_fill reads a constant that is a tensor, and waits for its device.
    return apply_with_constant(
        lambda p, c: torch.where(mask, c, p) if isinstance(c, Tensor) else torch.masked_fill(p, mask, c), x, value
    )


@implements(aten.constant_pad_nd.default, family="alignment")
def constant_pad_nd(x: ScaledTensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Return a constant around x, under x's scale."""
    if not value:
        return scale_payloads(aten.constant_pad_nd.default(to_float32(x), pad), [x._scale], [x])

    def padded(payload: Tensor, constant: Any) -> Tensor:
        if not isinstance(constant, Tensor):
            return aten.constant_pad_nd.default(payload, pad, constant)
        inside = torch.ones_like(payload, dtype=torch.bool)
        return torch.where(
            aten.constant_pad_nd.default(inside, pad), aten.constant_pad_nd.default(payload, pad), constant
        )

    return apply_with_constant(padded, x, value)


@implements(aten.fill.Scalar, aten.fill.Tensor, family="alignment")
def fill(x: Any, value: Any) -> Tensor:
    """Fill with one number, under its own power of two."""
    if not isinstance(x, ScaledTensor):
        return torch.full_like(x, 0).copy_(decode_values(value))
    number = make_operand(value, x)
    payload = torch.empty_like(x._payload, dtype=torch.float32).copy_(to_float32(number))
    return make_scaled(payload, number._scale.clone(), x._payload.dtype, x.dtype)


implements(aten.zero.default, family="alignment")(lambda x: torch.zeros_like(x))


@implements(aten.copy.default, family="alignment")
def copy(x: Any, source: Any, non_blocking: bool = False) -> Tensor:
    """Return the source's values in x's shape, storage and dtype, under the source's scale."""
    if not isinstance(x, ScaledTensor):
        return aten.copy.default(x, decode_values(source), non_blocking)
    given = make_operand(source, x)
    payload = aten.copy.default(torch.empty_like(x._payload, dtype=torch.float32), to_float32(given), non_blocking)
    scale = given._scale.to(x.device) if given._scale.device != x.device else given._scale.clone()
    return make_scaled(payload, scale, x._payload.dtype, x.dtype)
