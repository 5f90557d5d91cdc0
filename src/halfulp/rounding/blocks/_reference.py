"""The reference of rounding in blocks: plain torch, exact where scales are powers of two."""

from __future__ import annotations

from math import frexp

import torch

from .._kernel_constants import WORD32, WORD64
from .._random_bits import random_words
from .._reference import from_words, round_words, to_words
from .._target import STOCHASTIC
from ._target import CLOSEST, FLOOR, BlockTarget

_SMALLEST_NORMAL = 2.0**-126


def blocks_by_reference(x: torch.Tensor, target: BlockTarget, key: int) -> torch.Tensor:
    """The result on any device.

    Args:
        x: tensor of any shape; blocks lie along its last dimension, and the last one of a row may be shorter.
        target: what to round to.
        key: of the random bits; an element's index is its position in x.
    """
    if x.numel() == 0:
        return x.clone()
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    bits = None
    if target.element.mode == STOCHASTIC:
        bits = random_words(key, torch.arange(x.numel(), device=x.device, dtype=torch.int64)).view(rows.shape)
        bits = _in_blocks(bits, target.block)
    work = torch.float64 if target.powers or x.dtype == torch.float64 else torch.float32
    blocks = _in_blocks(rows.to(work), target.block)
    result = _round_blocks(blocks, target, bits).flatten(1)[:, : rows.shape[1]]
    return result.to(x.dtype).reshape(x.shape)


def _in_blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))


def _round_blocks(blocks: torch.Tensor, target: BlockTarget, bits: torch.Tensor | None) -> torch.Tensor:
    amax = blocks.abs().amax(-1, keepdim=True)
    bad = ~amax.isfinite()
    amax = torch.where(bad, 1, amax)
    scale = _power_scale(amax, target) if target.powers else _product_scale(torch.where(bad, 0, amax), target)
    scale = torch.where(bad, torch.nan, scale)
    payload = blocks / scale
    payload = torch.where((payload == 0) & (blocks != 0), torch.copysign(_tiny(payload), blocks), payload)
    layout = WORD64 if payload.dtype == torch.float64 else WORD32
    rounded = from_words(round_words(to_words(payload.contiguous()), target.element, layout, bits), payload.dtype)
    return rounded * scale


def _tiny(like: torch.Tensor) -> torch.Tensor:
    """The smallest subnormal, which is not lost where a quotient was."""
    return torch.full_like(like, 5e-324 if like.dtype == torch.float64 else 2.0**-149)


def _power_scale(amax: torch.Tensor, target: BlockTarget) -> torch.Tensor:
    """The power of two of each block, from its largest magnitude in float64."""
    largest, emax = target.element.max, frexp(target.element.max)[1] - 1
    half, e = torch.frexp(amax)
    ratio, e = half * 2.0 ** (emax + 1), e.long() - 1  # the ratio is in [2^emax, 2^(emax + 1))
    if target.choice == FLOOR:
        k = e - emax
    elif target.choice == CLOSEST:
        k = e - emax - 1 + (ratio >= 0.75 * largest).long() + (ratio >= 1.5 * largest).long()
    else:
        k = e - emax + (ratio > largest).long()
    lowest, highest = target.scale.tiny_exponent, frexp(target.scale.max)[1] - 1
    k = torch.where(amax == 0, lowest, k).clamp(lowest, highest)
    return from_words((k + WORD64.bias) << WORD64.mantissa, torch.float64)


def _product_scale(amax: torch.Tensor, target: BlockTarget) -> torch.Tensor:
    """Each block's rounded scale times the tensor's."""
    numbers = tensor_scale(float(amax.max()), target)
    tensor, unit = (torch.tensor(value, dtype=amax.dtype, device="cpu") for value in numbers)
    quotient = amax / unit.to(amax.device)
    layout = WORD64 if amax.dtype == torch.float64 else WORD32
    scale = from_words(round_words(to_words(quotient.contiguous()), target.scale, layout, None), amax.dtype)
    scale = scale.clamp(min=2.0**target.scale.tiny_exponent)
    return scale * tensor.to(amax.device)


def tensor_scale(amax: float, target: BlockTarget) -> tuple[float, float]:
    """The tensor's scale, and its product with the largest element, as float32 numbers."""
    if not target.tensor_scale:
        return 1.0, target.element.max
    numbers = [amax, target.element.max * target.scale.max, target.element.max]
    single = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    scale = (single[0] / single[1]).clamp(min=_SMALLEST_NORMAL)
    return float(scale), float(scale * single[2])
