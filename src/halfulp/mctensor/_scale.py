"""Scales of components: choosing a power of two, multiplying and dividing by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arithmetic import Parts, merge, renormalize
from ..arithmetic.expansions._pointwise import under_scale

# A payload's largest magnitude lies in [2^(top - HEADROOM - 1), 2^(top - HEADROOM)): writes in place may grow by 16.
HEADROOM = 4
TOP = {torch.float16: 16, torch.bfloat16: 128, torch.float32: 128, torch.float64: 1024}
_BIAS = 127


def to_float64(parts: Parts, scale: Tensor | None) -> Parts:
    """Return scaled components as float64 ones without a scale: one for float16, else as many as there are."""
    if parts[0].dtype == torch.float16:
        value = merge(parts, torch.float64)
        return (value if scale is None else value * scale,)
    wide = tuple(part.double() for part in parts)
    return wide if scale is None else tuple(part * scale for part in wide)


def magnitude(x: Tensor) -> Tensor:
    """Return the largest finite magnitude as a 0-d tensor; 0 without elements."""
    if not x.numel():
        return x.new_zeros(())
    return x.abs().nan_to_num_(0.0, 0.0, 0.0).amax()


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two by which values of this largest magnitude fill a dtype up to HEADROOM binades."""
    # In float64: a product of scaled values may be out of float32's range where its payload is not.
    exponent = (largest.double().view(torch.int64) >> 52) - (1023 - _BIAS + min(TOP[dtype], 128) - HEADROOM - 1)
    exponent = torch.where(largest == 0, _BIAS, exponent.clamp(1, 2 * _BIAS))
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def divide_by_scale(wide: Parts, scale: Tensor, components: int, dtype: torch.dtype, keeps: bool = False) -> Parts:
    """Return components whose sum times the scale is the value of float64 components.

    keeps: whether none is 0 where the value is not, so that what is divided by a sum stays finite.
    """
    if type(scale) is Tensor and type(wide[0]) is Tensor and not torch.compiler.is_compiling():
        return under_scale(wide, scale, components, dtype, keeps)
    parts = renormalize(tuple(part / scale for part in wide), components, dtype)
    if not keeps:
        return parts
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    vanished = (parts[0] == 0) & (wide[0] != 0)
    held = torch.full_like(parts[0], least).copysign(wide[0].to(dtype))
    return (torch.where(vanished, held, parts[0]), *parts[1:])


def power_of_two(scale: Tensor | float, device: torch.device) -> Tensor:
    """Return a scale as a 0-d float32 tensor.

    Raises:
        ValueError: it is no power of two, or out of float32's normal range.
    """
    value = float(scale)
    if value <= 0 or not math.isfinite(value) or math.frexp(value)[0] != 0.5 or not 2.0**-126 <= value <= 2.0**127:
        raise ValueError(f"scale={value!r}: allowed are powers of two from 2**-126 to 2**127, 'auto', 'none' and None")
    return torch.tensor(value, dtype=torch.float32, device=device)
