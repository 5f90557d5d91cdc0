"""Payloads in float32, in which rules compute, values rounded once to a storage, and the scale of values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from . import _fused as fused
from . import _powers_of_two as _powers
from ._registry import EIGHT_BITS

_STORAGE_WIDTHS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float16: 1, torch.bfloat16: 1, torch.float32: 2}
# The largest of n numbers is at most sqrt(n) times their root mean square, and float16 ends at nearly 2^16.
_MOST_QUICK_ELEMENTS = 2**30
# Norms whose squares are normal float32 numbers, unless nearly all elements are far smaller.
_ORDINARY_NORMS = (2.0**-40, 2.0**40)


class PayloadWithScale(Protocol):
    """The parts of a ScaledTensor that are read here."""

    dtype: torch.dtype
    _payload: Tensor
    _scale: Tensor


def common_storage(storages: Iterable[torch.dtype]) -> torch.dtype:
    """Return the payload type of a result: the wider one, or of two types of one width the next wider one."""
    found = set(storages)
    if len(found) == 1:
        return found.pop()
    width = max(_STORAGE_WIDTHS[storage] for storage in found)
    widest = [storage for storage in found if _STORAGE_WIDTHS[storage] == width]
    if len(widest) == 1:
        return widest[0]
    return torch.float16 if width == 0 else torch.float32


_SMALLEST_NUMBERS = {
    storage: torch.finfo(storage).smallest_normal * torch.finfo(storage).eps for storage in _STORAGE_WIDTHS
}


def smallest_number(storage: torch.dtype) -> float:
    """Return the smallest positive number of a payload type."""
    return _SMALLEST_NUMBERS[storage]


def to_float32(x: PayloadWithScale) -> Tensor:
    """Return the payload in float32, in which rules compute."""
    return x._payload if x._payload.dtype == torch.float32 else x._payload.to(torch.float32)


def to_storage(values: Tensor, storage: torch.dtype) -> Tensor:
    """Round values once to a payload type; finite ones beyond its range saturate, infinities stay (or become NaN)."""
    if storage == values.dtype:
        return values
    if values.dtype == torch.float64 and storage != torch.float32:
        values = _round_to_odd(values)
    if storage in (torch.bfloat16, torch.float32):
        return values.to(storage)
    largest = torch.finfo(storage).max
    if _powers.is_concrete(values) and values.numel():
        low, high = torch.aminmax(values)
        if -largest <= low.item() and high.item() <= largest:
            return values.to(storage)
    if fused.is_fused(values):
        return fused.finish_payload(values, (), storage, "factor")[0]
    kept = torch.nan if storage == torch.float8_e4m3fn else values  # which has no infinity
    return torch.where(values.isinf(), kept, values.clamp(-largest, largest)).to(storage)


def _round_to_odd(values: Tensor) -> Tensor:
    """Round float64 values to float32 with the last bit 1 where digits were cut off.

    Of such a value, rounding to 22 bits or fewer makes what it makes of the float64 one (Boldo and Melquiond, IEEE
    Transactions on Computers 57, 2008), where rounding to float32 first may meet a tie that is none.
    """
    near = values.to(torch.float32)
    cut = torch.where(near.double().abs() > values.abs(), torch.nextafter(near, torch.zeros_like(near)), near)
    odd = (cut.view(torch.int32) | 1).view(torch.float32)
    return torch.where((cut.double() != values) & near.isfinite(), odd, near)


def decode_values(x: PayloadWithScale, dtype: torch.dtype | None = None) -> Tensor:
    """Return payload x scale, computed in float32 (float64 for that dtype) and rounded once, by default to x.dtype."""
    dtype = dtype or x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    value = _powers.concrete_value(x._scale)
    if wide == torch.float32 and x._payload.dtype != wide and fused.is_fused(x._payload):
        scaled = fused.finish_payload(x._payload, (x._scale,), wide, "factor")[0]
        return scaled if dtype == wide else scaled.to(dtype)
    if value is not None and type(x._payload) is Tensor and x._payload.dtype != wide:
        scaled = x._payload.to(wide)  # memory of its own: no second pass for the scale 1, no third tensor for others
        scaled = scaled if value == 1.0 else scaled.mul_(value)
    else:
        scaled = x._payload.to(wide) * (x._scale.to(wide) if value is None else value)
    if value is not None and value >= _powers.HUGE_SCALE and wide == torch.float32:
        # A payload may have been rounded up to 2: float32's largest number then decodes to itself, not to infinity.
        scaled = _powers.clamp_finite(scaled, _powers.FLOAT32_MAX, x._payload.to(wide))
    return scaled if dtype == wide else scaled.to(dtype)


def measure_rms_scale(values: Tensor, storage: torch.dtype) -> Tensor:
    """Return the power of two next to the root mean square of the finite non-zero values, or what the largest needs.

    Without such values `ZERO_SCALE`. Of values times a power of two it is that times it.
    """
    if not values.numel():
        return torch.full((), _powers.ZERO_SCALE, dtype=torch.float32, device=values.device)
    quick = None if storage in EIGHT_BITS or values.dtype in EIGHT_BITS else _measure_rms_scale_quickly(values)
    if quick is not None:
        return torch.full((), quick, dtype=torch.float32, device="cpu")
    if values.dtype in fused.PAYLOAD_CODECS and fused.is_fused(values):
        return fused.measure_level(values, storage, _powers.ZERO_SCALE)
    wide = values.detach().to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    finite = torch.nan_to_num(wide, 0.0, 0.0, 0.0)
    amax = finite.abs().amax()
    # Divided by a power of two next to amax, so that no square that matters leaves float32's range.
    near = _powers.round_to_power(amax)
    finite = finite / near
    rms = (finite.square().sum() / finite.count_nonzero().clamp(min=1)).sqrt()
    scale = _powers.round_to_power(near * rms, "nearest")
    least = _powers.round_to_power(amax / torch.finfo(storage).max, "up")
    return torch.where(amax > 0, torch.maximum(scale, least), _powers.ZERO_SCALE)


def _measure_rms_scale_quickly(values: Tensor) -> float | None:
    """Return the scale of `measure_rms_scale` for ordinary concrete values, in two passes, not eight; else None.

    No element of so few is beyond float16's range under it.
    """
    if not _powers.is_concrete(values) or values.dtype == torch.float64 or values.requires_grad:
        return None
    if values.numel() > _MOST_QUICK_ELEMENTS:
        return None
    norm = torch.linalg.vector_norm(values, dtype=torch.float32).item()
    if not _ORDINARY_NORMS[0] < norm < _ORDINARY_NORMS[1]:  # squares that leave float32's range, infinities, NaN, zeros
        return None
    return _powers.nearest_power(norm / max(int(values.count_nonzero()), 1) ** 0.5)
