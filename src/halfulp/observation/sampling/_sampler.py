"""The sampler: many tensors looked at in one call, by the compiled kernel where it runs, else by the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels import address, check_bits, run_chunks, select_engine, undisturbed
from .._record import TensorRecord
from ._candidates import DEFAULT_FORMATS, Candidates
from ._kernel import BINS, COLUMNS, COUNT, INFINITE_WORDS, KERNEL_DTYPES, ROOM, TAKEN, copy_kernel, look_kernel
from ._reference import count_sample, count_whole, sample_of
from ._sample_places import MOST, sample_size
from ._totals import Totals


@dataclass(slots=True)
class Look:
    """One tensor to look at.

    Attributes:
        tensor: contiguous plain memory.
        dtype: of its storage, whose largest number is counted; the tensor's own but for eight bits and expansions.
        key: of its places.
        totals: what the counts are added to.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    key: int
    totals: Totals


class Sampler:
    """Looks at tensors: exact extremes, and counts of samples in candidate formats.

    Args:
        candidates: the formats.

    Attributes:
        scratch: address of room for one sample in float32, and for the counts of its exponents behind.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self._scratch: np.ndarray = np.empty(ROOM, np.float32)
        self.scratch: int = self._scratch.ctypes.data
        self._row: np.ndarray = np.zeros((1, COLUMNS), np.int64)

    def look(self, one: Look) -> None:
        """Add one tensor's counts to its totals."""
        tensor = to_wide(one.tensor)
        if not _by_kernel(tensor, select_engine("cpu")):
            self.look_by_reference(one)
            return
        self._row[0] = _row(tensor, one, self.scratch)
        checked_kernel(tensor.dtype)(0, 1, self._row.ctypes.data, *self.candidates.arguments)

    def look_all(self, looks: Sequence[Look]) -> list[torch.Tensor]:
        """Add many tensors' counts to their totals, and return their samples.

        Returns:
            One float32 tensor (float64 of a float64 tensor) per look, on the CPU, of at most 4096 elements; those of
            one dtype lie one after another in memory.
        """
        samples, engine = [_EMPTY] * len(looks), select_engine("cpu")
        by_dtype: dict[torch.dtype, list[int]] = {}
        wide = [to_wide(one.tensor) for one in looks]
        for k, tensor in enumerate(wide):
            if _by_kernel(tensor, engine):
                by_dtype.setdefault(tensor.dtype, []).append(k)
            else:
                samples[k] = self.look_by_reference(looks[k])
        for dtype, positions in by_dtype.items():
            parts = _buffers([wide[k].numel() for k in positions])
            rows = [_row(wide[k], looks[k], address(part)) for k, part in zip(positions, parts)]
            table = np.array(rows, np.int64)
            room, table[:, BINS] = rooms(len(rows), ROOM - MOST)
            arguments = table.ctypes.data, *self.candidates.arguments
            run_chunks(checked_kernel(dtype), table[:, COUNT], *arguments)
            del room
            _cut(samples, positions, parts, table)
        return samples

    def prepare(self, dtypes: Iterable[torch.dtype]) -> None:
        """Compile, or load, the kernels for tensors of some dtypes on the CPU."""
        for dtype in set(dtypes) & set(KERNEL_DTYPES) if select_engine("cpu") == "llvm" else ():
            checked_kernel(dtype)

    def look_by_reference(self, one: Look) -> torch.Tensor:
        """Add one tensor's counts in plain torch, and return its sample."""
        flat = one.tensor.reshape(-1)
        count_whole(flat, largest_of(one.dtype), one.totals)
        sample = sample_of(flat, one.key)
        count_sample(sample, self.candidates, one.totals)
        return sample


_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")


def to_wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floating-point numbers as bfloat16, which holds them all, and others as they are, contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor


def _by_kernel(tensor: torch.Tensor, engine: str) -> bool:
    return engine == "llvm" and tensor.dtype in KERNEL_DTYPES and tensor.is_cpu


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
    data, count, key = address(tensor), tensor.numel(), signed(one.key)
    integers, reals, largest, infinite = constants(one.totals, one.dtype, tensor.dtype)
    return data, count, key, sample, sample + 4 * MOST, integers, reals, largest, infinite, *[0] * (COLUMNS - 9)


def constants(totals: Totals, storage: torch.dtype, memory: torch.dtype) -> tuple[int, int, int, int]:
    """Return what a row holds of totals, in order: where they are, and the words of the largest number and infinity.

    Args:
        totals: the counts.
        storage: the dtype whose largest number is counted.
        memory: the dtype of the memory that is read.
    """
    return *totals.addresses, _largest_word(storage, memory), INFINITE_WORDS[memory]


def signed(key: int) -> int:
    """Return a key of 64 bits as a table of int64 holds it."""
    return key - 2**64 if key >= 2**63 else key


def sampled(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy of a contiguous tensor's sampled elements, in float32 (float64 of float64), on the CPU."""
    return sampled_all([(flat, key)])[0]


def sampled_all(given: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Return the samples of many tensors; those of one dtype lie one after another in memory."""
    samples, engine = [_EMPTY] * len(given), select_engine("cpu")
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, (flat, key) in enumerate(given):
        flat = to_wide(flat)
        if _by_kernel(flat, engine):
            by_dtype.setdefault(flat.dtype, []).append(k)
        else:
            samples[k] = sample_of(flat.reshape(-1), key)
    for dtype, positions in by_dtype.items():
        flats = [to_wide(given[k][0]) for k in positions]
        parts = _buffers([flat.numel() for flat in flats])
        rows = [
            (address(flat), flat.numel(), signed(given[k][1]), address(part), *[0] * (COLUMNS - 4))
            for k, flat, part in zip(positions, flats, parts)
        ]
        table = np.array(rows, np.int64)
        checked_kernel(dtype)
        copy_kernel(dtype)(0, len(rows), table.ctypes.data)
        _cut(samples, positions, parts, table)
    return samples


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


def _cut(samples: list, positions: list[int], parts: Sequence[torch.Tensor], table: np.ndarray) -> None:
    """Keep of each part what was taken: a short last run leaves some of it free."""
    for k, part, taken in zip(positions, parts, table[:, TAKEN].tolist()):
        samples[k] = part if taken == len(part) else part[:taken]


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
        one = Look(x, dtype, 0x0123456789ABCDEF, totals)
        if fast:
            sample = np.empty(ROOM, np.float32)
            table = np.array([_row(x, one, sample.ctypes.data)], np.int64)
            kernel(0, 1, table.ctypes.data, *candidates.arguments)
        else:
            Sampler(candidates).look_by_reference(one)
        # Sums of squares depend on the order of the sum.
        return [torch.from_numpy(totals.integers), torch.from_numpy(totals.reals)[:3]]

    check_bits(f"sample of {dtype}", lambda: counts(True), lambda: counts(False))
    return kernel
