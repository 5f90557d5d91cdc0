"""The reference of every rounding: plain torch on integers, on any device."""

from __future__ import annotations

import torch

from ._kernel_constants import WORD32, WORD64, Layout, random_bits
from ._random_bits import random_words
from ._target import DOWN, NEAREST, STOCHASTIC, UP, Target


def by_reference(x: torch.Tensor, target: Target, key: int) -> torch.Tensor:
    """The result in plain torch, on any device; the random index is the position in x's logical order."""
    layout = WORD64 if x.dtype == torch.float64 else WORD32
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    bits = None
    if target.mode == STOCHASTIC:
        bits = random_words(key, torch.arange(x.numel(), device=x.device, dtype=torch.int64)).view(x.shape)
    words = round_words(to_words(wide.contiguous()), target, layout, bits)
    return from_words(words, wide.dtype).to(x.dtype)


def round_words(words: torch.Tensor, target: Target, layout: Layout, bits: torch.Tensor | None) -> torch.Tensor:
    """Round the words of floats.

    Args:
        words: int64 tensor of any shape, the bits of float32 (unsigned) or float64 (as signed integers) numbers.
        target: what to round to.
        layout: which of the two.
        bits: for STOCHASTIC, int64 tensor of the same shape, uniform in [0, 2^32); the upper ones are used.

    Returns:
        int64 tensor of the same shape, the bits of the results, NaNs quiet.
    """
    field, infinity = layout.mantissa, layout.power(layout.bias + 1)
    sign_bit = -(1 << 63) if layout.width == 64 else 1 << 31
    negative = (words & sign_bit) != 0
    a = words & (1 << layout.width - 1) - 1
    finite = torch.where(a < infinity, a, 0)
    r = _round_finite(finite, negative, target, layout, bits)
    inward = {NEAREST: a < 0, STOCHASTIC: a < 0, UP: negative, DOWN: ~negative}.get(target.mode, a >= 0)
    largest = min(layout.word(target.max), infinity - 1) if _holds(target, layout) else infinity - 1
    overflow = (infinity, infinity | 1 << field - 1, largest)[target.policy]
    r = torch.where(r > largest, torch.where(inward, largest, overflow), r)
    r = torch.where(a == infinity, overflow, r)
    nan = (a > infinity) | (negative & (a != 0)) if not target.signed else a > infinity
    r = torch.where(nan, infinity | 1 << field - 1, r)
    keeps_sign = negative & target.signed & ((r != 0) | target.signed_zero)
    return torch.where(keeps_sign, r | sign_bit, r)


def _round_finite(
    a: torch.Tensor, negative: torch.Tensor, target: Target, layout: Layout, bits: torch.Tensor | None
) -> torch.Tensor:
    """Round magnitudes on the unbounded grid: a significand loses its last s bits, and may gain one step."""
    field = layout.mantissa
    e = (a >> field).clamp(min=1)
    significand = torch.where(a >= 1 << field, a & (1 << field) - 1 | 1 << field, a)
    smallest = target.emin + layout.bias
    s = (field - target.mantissa_bits + (smallest - e).clamp(min=0)).clamp(min=0)
    if not target.subnormals:
        s = torch.where(a < layout.power(target.emin), field + smallest - e, s)
    near = s.clamp(max=field + 1)
    steps = significand >> near
    fraction = significand - (steps << near)
    away = _goes_away(fraction, steps, s, negative, target, bits)
    packed = ((e - 1) << field) + ((steps + away) << near)
    tiny, floor = layout.power(target.tiny_exponent), 0 if target.zero else layout.power(target.tiny_exponent)
    below = torch.where(away, tiny, floor)
    return torch.where(a < tiny, below, packed)


def _goes_away(
    fraction: torch.Tensor,
    steps: torch.Tensor,
    s: torch.Tensor,
    negative: torch.Tensor,
    target: Target,
    bits: torch.Tensor | None,
) -> torch.Tensor:
    """Whether the neighbour of larger magnitude is taken; the fraction is in units of 2^-s."""
    if target.mode == NEAREST:
        capped = s.clamp(max=62)
        half = torch.where(s == 0, 1, (1 << (capped - 1).clamp(min=0)))
        return ((fraction > half) | ((fraction == half) & (steps & 1 == 1))) & (s > 0)
    if target.mode in (UP, DOWN):
        return (fraction > 0) & (negative if target.mode == DOWN else ~negative)
    if target.mode == STOCHASTIC:
        assert bits is not None  # stochastic rounding is given its bits
        count = random_bits(target)
        kept = (fraction << (count - s).clamp(min=0)) >> (s - count).clamp(min=0, max=62)
        return (bits >> 32 - count) + kept >= 1 << count
    return fraction < 0


def _holds(target: Target, layout: Layout) -> bool:
    return layout.width == 64 or target.max < 2.0**128


def to_words(x: torch.Tensor) -> torch.Tensor:
    """The bits of a float32 or float64 tensor as int64."""
    if x.dtype == torch.float64:
        return x.view(torch.int64)
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def from_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float32 or float64 tensor with these bits."""
    if dtype == torch.float64:
        return words.view(torch.float64)
    return ((words << 32) >> 32).to(torch.int32).view(torch.float32)
