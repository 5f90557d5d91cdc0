"""Plain operands of sums, choices and elementwise products: their large constants have no say in a scale.

A mask of -1e9, a penalty of 1 + 1e8 m or a last distance of 1e10 stands for infinity. Under a scale that holds it, a
narrow payload would have no digits left for all other elements. So a scale is measured without such elements, and
where they lead beyond the payload's range, results saturate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..subclass._stand_ins import stand_ins
from . import _powers_of_two as _powers
from ._operands import LEAST_STAND_IN, STAND_IN, encode_values, is_stand_in_free, operand, scale_beside_stand_ins
from ._scaled_tensor import ScaledTensor, wrap

# Narrower ranges hold less beside other numbers.
_STAND_IN = {torch.float8_e4m3fn: 2.0**12}
# So many times beyond its range a payload takes a larger scale, as others keep their digits under it.
_ROOM = {torch.float16: 2.0**6, torch.float8_e5m2: 2.0**6}
_FLOAT32_MAX = torch.finfo(torch.float32).max


def stand_in_size(storage: torch.dtype) -> float:
    """Return from which magnitude on an element among smaller ones stands for infinity."""
    return _STAND_IN.get(storage, STAND_IN)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, ScaledTensor) and bool(x.dim()) and x.is_floating_point()


def addend(x: Any, like: ScaledTensor, factor: Any = 1.0, among_zeros: bool = True) -> ScaledTensor:
    """Return an operand as a ScaledTensor; the scale of a plain one is measured without what stands for infinity.

    Args:
        x: a tensor or a number.
        like: the scaled tensor that it meets.
        factor: a number that x is multiplied by.
        among_zeros: whether numbers among zeros alone may stand for infinity.
    """
    if not _is_plain(x):
        return operand(x, like)
    # What a home of float16 keeps in float32 for now is to fit float16 in the end.
    storage = torch.float16 if like._home == torch.float16 else like._payload.dtype
    size = _size_of(storage, factor)
    least = min(LEAST_STAND_IN * size / stand_in_size(storage), size)
    is_wide = storage in (torch.float32, torch.bfloat16)
    scale = scale_beside_stand_ins(x, storage, size, least, is_negative=False, is_wide=is_wide, among_zeros=among_zeros)
    made = encode_values(x, torch.float32, scale)
    if is_wide or is_stand_in_free(x, _powers.HUGE, is_negative=False):
        return made
    # Products of what saturates stay finite.
    held = made._payload.clamp(-_powers.HUGE, _powers.HUGE)
    return wrap(torch.where(made._payload.isfinite(), held, made._payload), made._scale, made.dtype)


def large_elements(
    x: Any, like: ScaledTensor, factor: Any = 1.0, inverse: bool = False, among_zeros: bool = True
) -> Tensor | None:
    """Return where a plain operand, times a number, stands for infinity; None if nowhere.

    Args:
        x: an operand.
        like: the scaled tensor that it meets.
        factor: a number that x is multiplied by.
        inverse: x is a divisor.
        among_zeros: whether numbers among zeros alone may stand for infinity.
    """
    if not _is_plain(x):
        return None
    size = _size_of(like._payload.dtype, factor)
    x = x.detach()
    if inverse:
        x = torch.where(x == 0, 0.0, x.reciprocal())
    if is_stand_in_free(x, size, is_negative=False):
        return None
    large = stand_ins(x, size, among_zeros)
    if _powers.is_concrete(x):
        return large if bool(large.any()) and not bool(large.all()) else None
    return large & ~large.all()


def _size_of(storage: torch.dtype, factor: Any) -> float:
    number = abs(float(factor)) if isinstance(factor, (int, float)) else 1.0
    return min(stand_in_size(storage) / number, _FLOAT32_MAX) if number else _FLOAT32_MAX


def saturated(values: Tensor, scale: Tensor, storage: torch.dtype, *large: Tensor | None) -> Tensor:
    """Return a result's float32 payload, clamped to what the storage holds where large elements have led beyond it."""
    places = [place for place in large if place is not None]
    if storage == torch.float32 or not places:
        return values
    limits = torch.finfo(storage)
    if _powers.is_concrete(values):
        top = values.abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if values.numel() else 0.0
        if top * scale.item() <= _FLOAT32_MAX / 2 and top <= limits.max * _ROOM.get(storage, 1.0):
            return values
    # A number that is rounded up to the payload's next must not decode to infinity.
    held = (_FLOAT32_MAX * (1 - limits.eps) / scale).clamp(max=limits.max)
    is_large = places[0]
    for place in places[1:]:
        is_large = is_large | place
    return torch.where(is_large & values.isfinite(), torch.minimum(torch.maximum(values, -held), held), values)
