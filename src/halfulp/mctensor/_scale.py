"""Scales: choosing a power of two, taking it into the components and out again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arithmetic import Parts, merge, renormalize

# A payload's largest magnitude lies in [2^(top - HEADROOM - 1), 2^(top - HEADROOM)): writes in place may grow by 16.
HEADROOM = 4
TOP = {torch.float16: 16, torch.bfloat16: 128, torch.float32: 128, torch.float64: 1024}
_BIAS = 127


def widened(parts: Parts, scale: Tensor | None) -> Parts:
    """A scaled value as components without a scale: one float64 for float16, else as many float64 as components."""
    if parts[0].dtype == torch.float16:
        value = merge(parts, torch.float64)
        return (value if scale is None else value * scale,)
    wide = tuple(part.double() for part in parts)
    return wide if scale is None else tuple(part * scale for part in wide)


def magnitude(x: Tensor) -> Tensor:
    """The largest finite magnitude, 0-d; 0 without elements."""
    if not x.numel():
        return x.new_zeros(())
    return x.abs().nan_to_num_(0.0, 0.0, 0.0).amax()


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that brings a largest magnitude to the top of a dtype, but for the headroom."""
    # In float64: a product of scaled values may be out of float32's range where its payload is not.
    exponent = (largest.double().view(torch.int64) >> 52) - (1023 - _BIAS) - (min(TOP[dtype], 128) - HEADROOM - 1)
    exponent = torch.where(largest == 0, _BIAS, exponent.clamp(1, 2 * _BIAS))
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def scaled(wide: Parts, scale: Tensor, components: int, dtype: torch.dtype) -> Parts:
    """Components whose sum times the scale is the value."""
    return renormalize(tuple(part / scale for part in wide), components, dtype)


def power_of_two(scale: Tensor | float, device: torch.device) -> Tensor:
    """A scale as a float32 tensor without dimensions.

    Raises:
        ValueError: it is no power of two, or out of float32's normal range.
    """
    value = float(scale)
    if value <= 0 or not math.isfinite(value) or math.frexp(value)[0] != 0.5 or not 2.0**-126 <= value <= 2.0**127:
        raise ValueError(f"scale={value!r}: allowed are powers of two from 2**-126 to 2**127, 'auto', 'none' and None")
    return torch.tensor(value, dtype=torch.float32, device=device)
