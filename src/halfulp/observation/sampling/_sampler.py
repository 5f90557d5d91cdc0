"""The sampler: many tensors looked at in one call, by compiled kernels where they run, else by the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, check_bits, select_engine, undisturbed
from ...rounding import Nearest, quantize
from ...rounding.blocks._quantize import scales_of_blocks
from .._record import TensorRecord
from ._candidates import DEFAULT_FORMATS, Candidates, target_of
from ._device_functions import KERNEL_DTYPES
from ._rows import Counting, Rows
from ._sample_places import MOST, sample_size, sampled_places
from ._totals import Totals


@dataclass(slots=True)
class Look:
    """One tensor to look at.

    Attributes:
        dtype: of its storage, whose largest number is counted; the tensor's own but for eight bits and expansions.
        totals: what the counts are added to; None where only the sample is wanted, without the dtype.
    """

    tensor: torch.Tensor
    key: int
    dtype: torch.dtype | None = None
    totals: Totals | None = None


def look(
    tensors: Sequence[Look], candidates: Candidates | None = None, counting: Counting | None = None, step: int = 0
) -> list[torch.Tensor]:
    """Sample tensors, by compiled kernels where they run and else by the reference; with candidates count them too.

    Args:
        counting: of the candidates, for kernels.
        step: that is counted.

    Returns:
        One float32 tensor (float64 of a float64 tensor) per look, on the CPU, of at most 4096 elements; those of one
        dtype lie one after another in memory.
    """
    if counting is None:
        counting = _no_counting() if candidates is None else Counting(candidates, count_in_blocks)
    samples, engine = [_EMPTY] * len(tensors), select_engine("cpu")
    by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for k, one in enumerate(tensors):
        tensor = to_wide(one.tensor)
        if engine == "llvm" and tensor.dtype in KERNEL_DTYPES and tensor.is_cpu:
            by_dtype.setdefault(tensor.dtype, []).append((k, tensor))
        else:
            samples[k] = look_by_reference(one, candidates, step)
    for dtype, found in by_dtype.items():
        check_kernels(dtype)
        looks = [tensors[k] for k, _ in found]
        given = [(one.totals, one.dtype) for one in looks if one.totals is not None and one.dtype is not None]
        counts = [tensor.numel() for _, tensor in found]
        parts = _buffers(counts)
        rows = Rows(dtype, len(found), counting, given if candidates is not None else ())
        rows.point([address(tensor) for _, tensor in found], counts, [signed(one.key) for one in looks])
        places = [address(part) for part in parts]
        taken = rows.copy(places) if candidates is None else rows.look(step, places)[0]
        for (k, _), part, length in zip(found, parts, taken):
            # A short last run leaves some of its part free.
            samples[k] = part if length == len(part) else part[:length]
    return samples


@functools.cache
def _no_counting() -> Counting:
    return Counting(Candidates(()), count_in_blocks)


def sampled(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy of a contiguous tensor's sampled elements, in float32 (float64 of float64), on the CPU."""
    return look([Look(flat, key)])[0]


def look_by_reference(one: Look, candidates: Candidates | None = None, step: int = 0) -> torch.Tensor:
    """Look at a tensor in plain torch, and return its sample."""
    flat = one.tensor.reshape(-1)
    sample = sample_of(flat, one.key)
    if candidates is not None and one.totals is not None and one.dtype is not None:
        one.totals.open(step)
        count_whole(flat, largest_of(one.dtype), one.totals)
        count_sample(sample, candidates, one.totals)
    return sample


def prepare_kernels(dtypes: Iterable[torch.dtype]) -> None:
    """Compile, or load, the kernels for tensors of some dtypes on the CPU."""
    for dtype in set(dtypes) & set(KERNEL_DTYPES) if select_engine("cpu") == "llvm" else ():
        check_kernels(dtype)


_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")


def to_wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floating-point numbers as bfloat16, which holds them all, and others as they are, contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor


@functools.lru_cache(64)
def largest_of(dtype: torch.dtype) -> float:
    """Return the largest finite number of a dtype."""
    return torch.finfo(dtype).max


def signed(key: int) -> int:
    """Return a key of 64 bits as a table of int64 holds it."""
    return key - 2**64 if key >= 2**63 else key


def _buffers(sizes: list[int]) -> Sequence[torch.Tensor]:
    """Memory for samples of tensors of some sizes."""
    wanted = [sample_size(size) for size in sizes]
    if len(wanted) == 1:
        return (torch.empty(wanted[0], dtype=torch.float32, device="cpu"),)
    return torch.empty(sum(wanted), dtype=torch.float32, device="cpu").split(wanted)


@functools.cache
@undisturbed()
def check_kernels(dtype: torch.dtype) -> None:
    """Compare the kernels of a dtype with the reference, before their first use in a process."""
    candidates = Candidates(DEFAULT_FORMATS)
    ramp = torch.linspace(-3, 3, 5000, dtype=torch.float64, device="cpu")
    x = (torch.sinh(ramp * 9) * 2.0 ** (ramp * 20)).to(dtype)
    x[7], x[77], x[777], x[1777:1900] = torch.inf, torch.nan, 0.0, 0.0

    def counts(fast: bool) -> list[torch.Tensor]:
        totals = Totals(TensorRecord("weight", "", "", dtype), candidates)
        key, counting = 0x0123456789ABCDEF, Counting(candidates, count_in_blocks)
        if fast:
            rows = Rows(dtype, 1, counting, [(totals, dtype)], is_wide=True)
            rows.widen(torch.empty(MOST, dtype=torch.float64, device="cpu"), np.array([0, MOST]))
            rows.point([address(x)], [len(x)], [key])
            rows.look(0)
            totals.take(totals)
        else:
            look_by_reference(Look(x, key, dtype, totals), candidates)
        # Sums of squares depend on the order of the sum.
        reals = torch.tensor([totals.amax, totals.amin, totals.last_amax], dtype=torch.float64, device="cpu")
        counted = map(torch.from_numpy, (totals.singles, totals.blocks, totals.histogram))
        whole = [totals.elements, totals.zeros, totals.nonfinite, totals.largest, totals.sampled, int(totals.finite)]
        return [torch.tensor(whole, dtype=torch.int64, device="cpu"), *counted, reals]

    check_bits(f"sample of {dtype}", lambda: counts(True), lambda: counts(False))


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
    nonfinite, zeros = flat.numel() - int(finite.sum()), int((wide == 0).sum())
    amax, amin = float(torch.where(finite, wide, 0.0).max()), math.inf
    if zeros + nonfinite < flat.numel():
        amin = float(torch.where(finite & (wide > 0), wide.double(), math.inf).min())
    totals.add_extremes(flat.numel(), zeros, nonfinite, int((wide == largest).sum()), amax, amin)


def count_sample(sample: torch.Tensor, candidates: Candidates, totals: Totals) -> None:
    """Add a sample's counts: histogram, squares, and what each candidate makes of it."""
    finite = sample[sample.isfinite()]
    totals.sampled += len(sample)
    totals.squares += float(finite.double().square().sum())
    totals.finite += len(finite)
    exponents = torch.frexp(finite[finite != 0].double())[1].long() - 1
    totals.histogram += torch.bincount(exponents - totals.lowest, minlength=len(totals.histogram)).numpy()
    for k, format in enumerate(candidates.single):
        rounded = quantize(sample, format, Nearest(), overflow="nan") if len(sample) else sample
        known = sample.isfinite()
        size = rounded.abs()
        found = (known & (sample != 0) & (size == 0), known & (size > 0) & (size < format.smallest_normal))
        beyond = known & ~rounded.isfinite()
        totals.singles[k] += [int(one.sum()) for one in (*found, beyond)]
    for k, block in enumerate(candidates.blocks):
        totals.blocks[k] += count_in_blocks(sample, block)


def count_in_blocks(sample: torch.Tensor, format: BlockFormat) -> tuple[int, int, int, int]:
    """Return elements in finite blocks, those that become zero, subnormals, and zeros in blocks whose largest stays."""
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
