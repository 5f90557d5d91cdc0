"""The sampler: many tensors looked at in one call, by the compiled kernel where it runs, else by the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, check_bits, run_chunks, select_engine, undisturbed
from ...rounding import Nearest, quantize
from ...rounding.blocks._quantize import scales_of_blocks
from .._record import TensorRecord
from ._candidates import DEFAULT_FORMATS, Candidates, target_of
from ._kernel import (
    BINS,
    BROKEN,
    COLUMNS,
    COUNT,
    DATA,
    FRESH,
    INFINITE_WORD,
    INFINITE_WORDS,
    INTEGERS,
    KERNEL_DTYPES,
    KEY,
    LARGEST_WORD,
    NONZERO,
    REALS_AT,
    ROOM,
    SAMPLE,
    TAKEN,
    WIDE,
    copy_kernel,
    look_kernel,
)
from ._sample_places import MOST, sample_size, sampled_places
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


def look(tensors: Sequence[Look], candidates: Candidates | None = None) -> list[torch.Tensor]:
    """Sample tensors, by the compiled kernel where it runs and else by the reference; with candidates count them too.

    Returns:
        One float32 tensor (float64 of a float64 tensor) per look, on the CPU, of at most 4096 elements; those of one
        dtype lie one after another in memory.
    """
    samples, engine = [_EMPTY] * len(tensors), select_engine("cpu")
    by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for k, one in enumerate(tensors):
        tensor = to_wide(one.tensor)
        if engine == "llvm" and tensor.dtype in KERNEL_DTYPES and tensor.is_cpu:
            by_dtype.setdefault(tensor.dtype, []).append((k, tensor))
        else:
            samples[k] = look_by_reference(one, candidates)
    for dtype, found in by_dtype.items():
        parts = _buffers([tensor.numel() for _, tensor in found])
        table = np.array([_row(tensor, tensors[k], address(part)) for (k, tensor), part in zip(found, parts)], np.int64)
        kernel = checked_kernel(dtype)
        if candidates is None:
            copy_kernel(dtype)(0, len(table), table.ctypes.data)
        else:
            room, table[:, BINS] = rooms(len(table), ROOM - MOST)
            run_chunks(kernel, table[:, COUNT], table.ctypes.data, *candidates.arguments)
            del room
        # A short last run leaves some of its part free.
        for (k, _), part, taken in zip(found, parts, table[:, TAKEN].tolist()):
            samples[k] = part if taken == len(part) else part[:taken]
    return samples


def sampled(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy of a contiguous tensor's sampled elements, in float32 (float64 of float64), on the CPU."""
    return look([Look(flat, key)])[0]


def look_by_reference(one: Look, candidates: Candidates | None = None) -> torch.Tensor:
    """Look at a tensor in plain torch, and return its sample."""
    flat = one.tensor.reshape(-1)
    sample = sample_of(flat, one.key)
    if candidates is not None and one.totals is not None and one.dtype is not None:
        count_whole(flat, largest_of(one.dtype), one.totals)
        count_sample(sample, candidates, one.totals)
    return sample


def prepare_kernels(dtypes: Iterable[torch.dtype]) -> None:
    """Compile, or load, the kernels for tensors of some dtypes on the CPU."""
    for dtype in set(dtypes) & set(KERNEL_DTYPES) if select_engine("cpu") == "llvm" else ():
        checked_kernel(dtype)


_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")


def to_wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floating-point numbers as bfloat16, which holds them all, and others as they are, contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor


@functools.lru_cache(64)
def largest_of(dtype: torch.dtype) -> float:
    """Return the largest finite number of a dtype."""
    return torch.finfo(dtype).max


@functools.lru_cache(64)
def _largest_word(dtype: torch.dtype, memory: torch.dtype) -> int:
    """The word of a storage format's largest number in the dtype of the memory that is read."""
    largest = torch.tensor(largest_of(dtype), dtype=memory, device="cpu")
    return int(largest.view(torch.int16 if memory.itemsize == 2 else torch.int32))


def _row(tensor: torch.Tensor, one: Look, sample: int) -> tuple[int, ...]:
    counted = (0, 0, 0, 0)
    if one.totals is not None and one.dtype is not None:
        counted = constants(one.totals, one.dtype, tensor.dtype)
    fields = (address(tensor), tensor.numel(), signed(one.key), sample, sample + 4 * MOST, *counted)
    return *fields, *[0] * (COLUMNS - len(fields))


def constants(totals: Totals, storage: torch.dtype, memory: torch.dtype) -> tuple[int, int, int, int]:
    """Return what a row holds of totals, in order: where they are, and the words of the largest number and infinity.

    Args:
        storage: the dtype whose largest number is counted.
        memory: the dtype of the memory that is read.
    """
    return *totals.addresses, _largest_word(storage, memory), INFINITE_WORDS[memory]


def signed(key: int) -> int:
    """Return a key of 64 bits as a table of int64 holds it."""
    return key - 2**64 if key >= 2**63 else key


def rooms(rows: int, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return memory that the rows of a table use in turn, or each its own where threads share them, and its places."""
    several = torch.get_num_threads() > 1
    room = np.empty((rows if several else 1, words), np.uint32)
    return room, room.ctypes.data + np.arange(rows, dtype=np.int64) * (4 * words * several)


def _buffers(sizes: list[int]) -> Sequence[torch.Tensor]:
    """Memory for samples of tensors of some sizes."""
    wanted = [sample_size(size) for size in sizes]
    if len(wanted) == 1:
        return (torch.empty(wanted[0], dtype=torch.float32, device="cpu"),)
    return torch.empty(sum(wanted), dtype=torch.float32, device="cpu").split(wanted)


@functools.cache
@undisturbed()
def checked_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """Return the kernel of a dtype, compared with the reference before its first use in a process."""
    kernel = look_kernel(dtype)
    candidates = Candidates(DEFAULT_FORMATS)
    ramp = torch.linspace(-3, 3, 5000, dtype=torch.float64, device="cpu")
    x = (torch.sinh(ramp * 9) * 2.0 ** (ramp * 20)).to(dtype)
    x[7], x[77], x[777], x[1777:1900] = torch.inf, torch.nan, 0.0, 0.0

    def counts(fast: bool) -> list[torch.Tensor]:
        totals = Totals(TensorRecord("weight", "", "", dtype), candidates)
        one = Look(x, 0x0123456789ABCDEF, dtype, totals)
        if fast:
            sample = np.empty(ROOM, np.float32)
            table = np.array([_row(x, one, sample.ctypes.data)], np.int64)
            kernel(0, 1, table.ctypes.data, *candidates.arguments)
        else:
            look_by_reference(one, candidates)
        # Sums of squares depend on the order of the sum.
        return [torch.from_numpy(totals.integers), torch.from_numpy(totals.reals)[:3]]

    check_bits(f"sample of {dtype}", lambda: counts(True), lambda: counts(False))
    return kernel


class Rows:
    """Tensors of one dtype on the CPU, whose samples are taken together at every sampled step.

    Args:
        dtype: of their memory, one that kernels are made for.
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.

    Attributes:
        written: float64, to which the samples are written; None where they are not.
    """

    def __init__(self, dtype: torch.dtype, count: int, totals: Sequence[tuple[Totals, torch.dtype]] = ()) -> None:
        self.dtype, self._totals = dtype, [one for one, _ in totals]
        self.written: torch.Tensor | None = None
        self._room: np.ndarray | None = None
        self._threads: int = 0
        self._table: np.ndarray = np.zeros((count, COLUMNS), np.int64)
        self._at: int = self._table.ctypes.data
        for row, (one, storage) in enumerate(totals):
            self._table[row, [INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD]] = constants(one, storage, dtype)

    def point(self, data: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, keys: np.ndarray) -> None:
        """Say where the tensors lie, how many elements they have, and the keys of their places."""
        table = self._table
        table[:, DATA], table[:, COUNT], table[:, KEY] = data, counts, keys

    def widen(self, packed: torch.Tensor, ends: np.ndarray) -> None:
        """Write the samples to float64 too, from the ends of parts that hold as many as are sampled at most."""
        self.written = packed
        self._table[:, WIDE] = address(packed) + 8 * ends[:-1]

    def look(self, candidates: Candidates, step: int) -> np.ndarray:
        """Count the tensors, and return how many elements of each are sampled."""
        table = self._table
        table[:, FRESH] = [one.opens(step) for one in self._totals]
        self._place_samples()
        run_chunks(checked_kernel(self.dtype), table[:, COUNT], self._at, *candidates.arguments)
        return table[:, TAKEN]

    def copy(self) -> np.ndarray:
        """Copy the samples alone, and return how many elements of each are sampled."""
        self._place_samples()
        copy_kernel(self.dtype)(0, len(self._table), self._at)
        return self._table[:, TAKEN]

    @property
    def nonzero(self) -> list[int]:
        """How many elements of each sample that was made float64 are not zero."""
        return self._table[:, NONZERO].tolist()

    @property
    def broken(self) -> list[int]:
        """Rows whose tensors hold NaN or infinity in this step."""
        return [row for row, count in enumerate(self._table[:, BROKEN].tolist()) if count]

    def _place_samples(self) -> None:
        """Make room for the samples in float32 and the counts of their exponents."""
        threads = torch.get_num_threads()
        if self._threads != threads:
            self._threads = threads
            self._room, places = rooms(len(self._table), ROOM)
            self._table[:, SAMPLE], self._table[:, BINS] = places, places + 4 * MOST


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
