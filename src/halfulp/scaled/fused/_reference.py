"""The fused operations in plain torch: what their kernels are compared with before their first use on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._powers_of_two import round_to_power

SMALLEST, LARGEST, HUGE = 2.0**-126, 2.0**127, 2.0**100
INFINITE = (torch.float16, torch.float8_e5m2)


def saturated_to(values: Tensor, storage: torch.dtype) -> Tensor:
    """Round float32 values once; finite ones beyond the range saturate, infinities stay (or become NaN)."""
    if storage in (torch.bfloat16, torch.float32):
        return values.to(storage)
    largest = torch.finfo(storage).max
    kept = values if storage in INFINITE else torch.nan
    return torch.where(values.isinf(), kept, values.clamp(-largest, largest)).to(storage)


def finish(
    y: Tensor, scales: Sequence[Tensor], storage: torch.dtype, mode: str, number: float, factor: float
) -> tuple[Tensor, Tensor | None]:
    """See `_operations.finish`."""
    if mode == "held":
        most = torch.finfo(torch.bfloat16).max
        limit = (most / scales[0]).clamp(max=most)
        wide = y.to(torch.float32)
        clamped = torch.minimum(torch.maximum(wide, -limit), limit)
        return saturated_to(torch.where(wide.isfinite(), clamped, wide), storage), None
    held, rest, extra = _factors(y, scales, mode, number)
    values = y.to(torch.float32)
    values = values if factor == 1.0 else values * factor
    values = values if extra is None else values * extra
    return saturated_to(values * rest, storage), held


def _factors(
    y: Tensor, scales: Sequence[Tensor], mode: str, number: float
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    one = torch.ones((), dtype=torch.float64, device=y.device)
    if mode in ("values", "ratio", "brought"):
        over, under = (one, *scales) if mode == "values" else scales
        most = HUGE if mode == "brought" else None
        return under.clone(), (over.double() / under).clamp(min=SMALLEST, max=most).to(torch.float32), None
    if mode == "deviation":
        held = (one / scales[0]).clamp(SMALLEST, LARGEST).clamp(max=number).to(torch.float32)
        return held, (one / held).clamp(min=SMALLEST).to(torch.float32), None
    extra = None
    if mode == "paired":
        extra = (one / (scales[-2].double() * scales[-1]).clamp(SMALLEST, LARGEST)).to(torch.float32)
        scales = scales[:-1]
    if mode == "levelled":
        extra = (one / scales[1]).to(torch.float32)
    total = one * number
    for scale in scales:
        total = total * scale
    held = total.clamp(SMALLEST, LARGEST).to(torch.float32)
    return (None, held, extra) if mode == "factor" else (held, (total / held).to(torch.float32), extra)


def level(y: Tensor, storage: torch.dtype, of_zeros: float) -> Tensor:
    """See `_operations.level`."""
    finite = torch.nan_to_num(y.to(torch.float32), 0.0, 0.0, 0.0)
    amax = finite.abs().amax()
    # Divided by a power of two next to amax, so that no square that matters leaves float32's range.
    near = round_to_power(amax)
    finite = finite / near
    rms = (finite.square().sum() / finite.count_nonzero().clamp(min=1)).sqrt()
    scale = round_to_power(near * rms, "nearest")
    least = round_to_power(amax / torch.finfo(storage).max, "up")
    return torch.where(amax > 0, torch.maximum(scale, least), of_zeros)


def add(
    x: Tensor, y: Tensor, sx: Tensor, sy: Tensor, storage: torch.dtype, sign: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """See `_operations.add`."""
    usual = [torch.where(scale < HUGE, scale, SMALLEST) for scale in (sx, sy)]
    scale = torch.maximum(*usual)
    scale = torch.where(scale == SMALLEST, torch.maximum(sx, sy), scale)
    u, v = (p.to(torch.float32) * (s / scale).clamp(SMALLEST, HUGE) for p, s in ((x, sx), (y, sy)))
    v = v * sign
    total = u + v
    made = saturated_to(total, storage)
    if keep:
        is_one_sign = ((u >= 0) & (v >= 0)) | ((u <= 0) & (v <= 0))
        limits = torch.finfo(storage)
        least = torch.full_like(total, limits.smallest_normal * limits.eps).copysign(total)
        wide = made.to(torch.float32)
        made = torch.where(is_one_sign & (total != 0) & (wide == 0), least, wide).to(storage)
    return made, scale


def affine_factors(
    s_base: Tensor, sa: Tensor, sb: Tensor, beta_power: float, power: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `_operations.affine_factors`."""
    base, product = s_base.double(), sa.double() * sb
    scale = torch.maximum((base * beta_power).clamp(SMALLEST, LARGEST), (product * power).clamp(SMALLEST, LARGEST))
    of_base, of_product = ((x / scale).clamp(SMALLEST, LARGEST).to(torch.float32) for x in (base, product))
    return scale.to(torch.float32), of_base, of_product


def affine(
    y: Tensor, base: Tensor, s_base: Tensor, sa: Tensor, sb: Tensor, storage: torch.dtype,
    beta: float, beta_power: float, alpha: float, power: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `_operations.affine`."""
    scale, of_base, of_product = affine_factors(s_base, sa, sb, beta_power, power)
    total = y.to(torch.float32) * (alpha * of_product) + base.to(torch.float32) * (beta * of_base)
    return saturated_to(total, storage), scale
