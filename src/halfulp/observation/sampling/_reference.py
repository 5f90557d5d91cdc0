"""The reference: the same counts by `quantize` itself in plain torch, on any device and for float64."""

from __future__ import annotations

import math

import numpy as np
import torch

from ...formats import BlockFormat
from ...rounding import Nearest, quantize
from ...rounding.blocks._reference import scales_of_blocks
from ._candidates import Candidates, target_of
from ._sample_places import sampled_places
from ._totals import (
    AMAX,
    AMIN,
    ELEMENTS,
    FIXED,
    LARGEST,
    LAST_AMAX,
    LAST_FINITE,
    NONFINITE,
    SAMPLED,
    SQUARES,
    STEP_NONFINITE,
    ZEROS,
    Totals,
)


def sample_of(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return the sampled elements of a contiguous flat tensor, in float32 (float64 of float64), on the CPU."""
    places = sampled_places(key, flat.numel())
    taken = flat if len(places) == flat.numel() else flat[places.to(flat.device)]
    return taken.to("cpu", torch.float64 if flat.dtype == torch.float64 else torch.float32, copy=True)


def count_whole(flat: torch.Tensor, largest: float, totals: Totals) -> None:
    """Add a whole tensor's extremes."""
    if not flat.numel():
        return
    magnitude = flat.abs()
    wide = magnitude.float() if magnitude.dtype.itemsize < 2 else magnitude
    finite = wide.isfinite()
    nonfinite = flat.numel() - int(finite.sum())
    zeros = int((wide == 0).sum())
    amax = float(torch.where(finite, wide, 0.0).max())
    integers, reals = totals.integers, totals.reals
    integers[ELEMENTS] += flat.numel()
    integers[ZEROS] += zeros
    integers[NONFINITE] += nonfinite
    integers[STEP_NONFINITE] += nonfinite
    integers[LARGEST] += int((wide == largest).sum())
    reals[AMAX], reals[LAST_AMAX] = max(reals[AMAX], amax), max(reals[LAST_AMAX], amax)
    if zeros + nonfinite < flat.numel():
        smallest = float(torch.where(finite & (wide > 0), wide.double(), math.inf).min())
        reals[AMIN] = min(reals[AMIN], smallest)


def count_sample(sample: torch.Tensor, candidates: Candidates, totals: Totals) -> None:
    """Add a sample's counts: histogram, squares, and what each candidate makes of it."""
    finite = sample[sample.isfinite()]
    integers, reals = totals.integers, totals.reals
    integers[SAMPLED] += len(sample)
    reals[SQUARES] += float(finite.double().square().sum())
    reals[LAST_FINITE] += len(finite)
    exponents = torch.frexp(finite[finite != 0].double())[1].long() - 1
    blocks_at, histogram_at = totals.offsets
    bins = torch.bincount(exponents - totals.lowest, minlength=len(integers) - histogram_at)
    integers[histogram_at:] += bins.numpy()
    for k, format in enumerate(candidates.single):
        rounded = quantize(sample, format, Nearest(), overflow="nan") if len(sample) else sample
        known = sample.isfinite()
        size = rounded.abs()
        found = (known & (sample != 0) & (size == 0), known & (size > 0) & (size < format.smallest_normal))
        beyond = known & ~rounded.isfinite()
        integers[FIXED + 3 * k : FIXED + 3 * k + 3] += np.array([int(one.sum()) for one in (*found, beyond)])
    for k, block in enumerate(candidates.blocks):
        integers[blocks_at + 4 * k : blocks_at + 4 * k + 4] += np.array(_in_blocks(sample, block))


def _in_blocks(sample: torch.Tensor, format: BlockFormat) -> tuple[int, int, int, int]:
    """Elements in finite blocks, those that become zero, subnormals, and zeros in blocks whose largest stays."""
    if not len(sample):
        return 0, 0, 0, 0
    target = target_of(format)
    rounded = quantize(sample, format)
    padding = -len(sample) % format.block
    x, y = (torch.nn.functional.pad(t, (0, padding)).view(-1, format.block) for t in (sample, rounded))
    work = x.double() if target.powers or x.dtype == torch.float64 else x
    amax = work.abs().amax(-1, keepdim=True)
    good = amax.isfinite()
    known = torch.where(good, amax, 0)
    scale = scales_of_blocks(known.double() if target.powers else known, target)
    gone = good & (x != 0) & (y == 0)
    smallest = (format.element.smallest_normal * scale).to(y.dtype)
    subnormal = good & (y != 0) & (y.abs() < smallest)
    shown = good & (y.abs().amax(-1, keepdim=True) > 0)
    counted = int(good.expand_as(x).flatten()[: len(sample)].sum())
    return counted, int(gone.sum()), int(subnormal.sum()), int((gone & shown).sum())
