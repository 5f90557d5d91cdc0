"""The sampler: the numbers behind a tensor, extremes of the whole, and counts of a sample in candidate formats.

A sample is 32 aligned runs of 128 elements. The k-th run is floor((k + u_k) R / 32) of the tensor's R runs in row-major
order, u_k uniform in [0, 1) and a pure function of (step, name): every run has the same chance 32 / R, whatever R
is, so that counts over the sample are unbiased, and no period of the tensor's rows can hide from them. A tensor of up
to 4096 elements is taken whole.

A tensor's extremes, and a sample's counts, are found by compiled kernels where they run and else by plain torch.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...formats import BlockFormat, Format, block_names, get, get_block
from ...kernels import (
    address,
    address_of,
    check_bits,
    disable_callers_modes,
    keeping_subnormals,
    plain_address,
    run_on_tensors,
    select_engine,
    to_plain_memory,
)
from ...kernels._device_function import CHUNK_COLUMNS, Table
from ...kernels._trace import COUNTER_COPIES
from ...kernels.vector._machine_function import Kernel
from ...kernels.vector._table_loop import compile_table
from ...mctensor import MCTensor
from ...optim.parameters._local_tensors import get_local
from ...rounding import Nearest, mix64, mix64_all, quantize
from ...rounding._blocks import (
    BlockKind,
    choose_block_layout,
    compute_block_scales,
    make_block_constants,
    make_block_target,
    record_block_table,
)
from ...rounding._target import WORD32
from ...scaled import ScaledTensor
from .._record import FormatCounts, TensorRecord
from . import _device_functions as d

RUN_LENGTH = 128
RUNS_PER_SAMPLE = 32
SAMPLE_SIZE = RUN_LENGTH * RUNS_PER_SAMPLE


@functools.lru_cache(2**14)
def hash_name(name: str) -> int:
    """Return 64 bits that stand for a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def make_place_key(step: int, name: str) -> int:
    """Return the key of a tensor's places at a step."""
    return mix64(0, step, hash_name(name))


MOST_CACHED_DRAWS = 4096
_drawn_runs: dict[tuple[int, int], torch.Tensor] = {}


def draw_runs(wanted: Collection[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Draw the numbers, in ascending order, of the sampled runs of tensors of more than 4096 elements, and keep them.

    Args:
        wanted: the key of each tensor's places, and how many elements it has.

    >>> (runs,) = draw_runs([(7, 10_000)])
    >>> len(runs), bool(((0 <= runs) & (runs < 79)).all())
    (32, True)
    """
    if len(_drawn_runs) + len(wanted) > MOST_CACHED_DRAWS:
        _drawn_runs.clear()
    keys = np.array([key for key, _ in wanted], np.uint64)[:, None]
    runs = np.array([-(-elements // RUN_LENGTH) for _, elements in wanted], np.uint64)[:, None]
    k = np.arange(RUNS_PER_SAMPLE, dtype=np.uint64)
    drawn = (k << np.uint64(32)) | (mix64_all(keys, k) >> np.uint64(32))
    found: Sequence[torch.Tensor] = torch.from_numpy((drawn * runs >> np.uint64(37)).astype(np.int64)).unbind()
    _drawn_runs.update(zip(wanted, found))
    return found


_SIXTEEN_BIT_DTYPES = (torch.float16, torch.bfloat16)
_PLAIN_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


class StoredNumbers(NamedTuple):
    """A tensor's numbers.

    Attributes:
        flat: contiguous, without history, of any shape; payload of a scaled tensor, values of an expansion.
        dtype: of its storage: a payload's, a component's.
        scale: its values are `flat` times this.
    """

    flat: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0


def read_numbers(tensor: torch.Tensor) -> StoredNumbers | None:
    """Return a tensor's numbers in row-major order; None where it holds none that can be read.

    Floating-point tensors only; of a DTensor the shard on this process. A sparse, quantized, nested, fake or meta
    tensor, and one inside a transform of torch.func, has none.
    """
    if tensor.dtype in _PLAIN_DTYPES and plain_address(tensor):
        return StoredNumbers(tensor.detach(), tensor.dtype)
    tensor = get_local(tensor)
    if not tensor.dtype.is_floating_point:
        return None
    try:
        if isinstance(tensor, ScaledTensor):
            payload = to_plain_memory(tensor.payload.detach())
            return StoredNumbers(payload.contiguous(), payload.dtype, float(tensor.scale))
        if isinstance(tensor, MCTensor):
            dtype = tensor.components[0].dtype
            decoded = tensor.detach().decode(torch.float32 if dtype in _SIXTEEN_BIT_DTYPES else torch.float64)
            return StoredNumbers(to_plain_memory(decoded).contiguous(), dtype)
        flat = to_plain_memory(tensor.detach())
    except TypeError:
        return None
    return StoredNumbers(flat if flat.is_contiguous() else flat.contiguous(), flat.dtype)


FormatLike = Format | BlockFormat | str | torch.dtype
DEFAULT_FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn", "mxfp8_e4m3", "nvfp4")
# Exponent of the smallest subnormal of float32.
LOWEST_EXPONENT = -149


class CandidateFormats:
    """The formats that samples are counted in: those of single elements first."""

    def __init__(self, formats: Sequence[FormatLike]) -> None:
        found = [find_format(format) for format in formats]
        self.single: list[Format] = [format for format in found if isinstance(format, Format)]
        self.blocks: list[BlockFormat] = [format for format in found if isinstance(format, BlockFormat)]

    @functools.cached_property
    def kernels(self) -> SampleKernels:
        """The kernels that count, whose memory is this object's alone."""
        return SampleKernels(self)


def find_format(format: FormatLike) -> Format | BlockFormat:
    """Return a format or block format by its name or dtype.

    Raises:
        ValueError: unknown, or blocks that the sampled runs do not hold a whole number of.
        TypeError: neither a format, nor a name, nor a dtype.
    """
    key = format.strip().lower().replace("-", "_") if isinstance(format, str) else ""
    is_block_name = key in block_names() or key.startswith(("mx", "nvfp"))
    if isinstance(format, BlockFormat) or (isinstance(format, str) and is_block_name):
        block = get_block(format)
        if RUN_LENGTH % block.block:
            raise ValueError(
                f"formats: {block.name} has blocks of {block.block} elements, and samples are runs of {RUN_LENGTH}: "
                f"give block formats whose block divides {RUN_LENGTH}"
            )
        return block
    return get(format)


@functools.lru_cache(256)
def find_format_thresholds(format: Format) -> tuple[int, int, int]:
    """Return the first words of float32 magnitudes that become nonzero, normal, and larger than the largest number.

    They are found by bisection over `quantize` itself, so that ties and missing subnormals are as it has them.
    """

    def first(holds: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Return the least word of a positive number for which a monotone condition holds, or infinity's."""
        low, high = 0, d.INFINITE_WORD
        while low < high:
            middle = (low + high) // 2
            x = torch.tensor([middle], dtype=torch.int32, device="cpu").view(torch.float32).double()
            low, high = (low, middle) if bool(holds(quantize(x, format, overflow="nan"))) else (middle + 1, high)
        return low

    return (
        first(lambda x: x != 0),
        first(lambda x: ~(x < format.smallest_normal)),
        first(lambda x: ~x.isfinite()),
    )


SUMS_PER_BLOCK_FORMAT = 4


class TensorTotals:
    """Counts of a tensor role; `finish` makes the record of them.

    Attributes:
        record: with what whole tensors show, and how many elements were sampled.
        step: the last sampled step in which the tensor was seen; -1 before.
        step_nonfinite: infinities and NaN in that step.
        sums: of samples, in the order of `_device_functions`: the sum of squares and the number of finite elements in
            the last sampled step; finite elements, zeros, and for each format of single elements what is below its
            three thresholds; for each block format elements, underflow, subnormal, hidden.
        counters: int64: sampled nonzero finite elements by exponent, in as many copies as kernels add to.
    """

    __slots__ = ("counters", "record", "step", "step_nonfinite", "sums")

    def __init__(self, record: TensorRecord, candidates: CandidateFormats) -> None:
        self.record: TensorRecord = record
        self.step: int = -1
        self.step_nonfinite: int = 0
        self.sums: np.ndarray = np.zeros(
            d.FIRST_FORMAT_SUM + 3 * len(candidates.single) + SUMS_PER_BLOCK_FORMAT * len(candidates.blocks)
        )
        self.counters: np.ndarray = np.zeros((COUNTER_COPIES, d.EXPONENT_BINS + 1), np.int64)

    @property
    def histogram(self) -> np.ndarray:
        """Sampled nonzero finite elements by exponent."""
        bins: np.ndarray = self.counters.sum(0)[:-1]
        return bins

    def begin_step(self, step: int) -> None:
        """Start a step at a tensor's first appearance in it: count it, reset the sums of the last sampled step."""
        if self.step != step:
            self.step, self.step_nonfinite = step, 0
            self.record.steps += 1
            self.record.last_amax = 0.0
            self.sums[: d.FINITE_SUM] = 0.0

    def add_extremes(self, elements: int, zeros: int, nonfinite: int, largest: int, amax: float, amin: float) -> None:
        """Add the counts and extremes of a whole tensor."""
        record = self.record
        record.elements += elements
        record.zeros += zeros
        record.nonfinite += nonfinite
        self.step_nonfinite += nonfinite
        record.largest += largest
        record.last_amax, record.amax = max(record.last_amax, amax), max(record.amax, amax)
        record.amin = min(record.amin, amin)

    def finish_record(self, candidates: CandidateFormats) -> TensorRecord:
        """Return the record with all that was counted so far."""
        record = self.record
        squares, now, finite, zeros = self.sums[: d.FIRST_FORMAT_SUM].tolist()
        record.rms = math.sqrt(squares / now) if now else 0.0
        record.formats, record.block_hidden = {}, {}
        counts, end = self.sums[d.FIRST_FORMAT_SUM :].astype(np.int64), 3 * len(candidates.single)
        for single, (gone, small, fit) in zip(candidates.single, counts[:end].reshape(-1, 3).tolist()):
            under, over = gone - int(zeros), int(finite) - fit
            record.formats[single.name] = FormatCounts(record.sampled, under, small - gone, over)
        blocks = counts[end:].reshape(-1, SUMS_PER_BLOCK_FORMAT).tolist()
        for block, (elements, under, subnormal, hidden) in zip(candidates.blocks, blocks):
            record.formats[block.name] = FormatCounts(elements, under, subnormal, 0)
            record.block_hidden[block.name] = hidden
        record.histogram = {LOWEST_EXPONENT + k: count for k, count in enumerate(self.histogram.tolist()) if count}
        return record


@keeping_subnormals()
def measure_extremes(
    numbers: Sequence[StoredNumbers], totals: Sequence[TensorTotals], candidates: CandidateFormats, step: int
) -> None:
    """Count all elements of tensors, and add their extremes, at a step."""
    runs_kernels = select_engine("cpu") == "llvm"
    by_dtype: dict[torch.dtype | None, list[tuple[torch.Tensor, float, TensorTotals]]] = {}
    for one, own in zip(numbers, totals):
        own.begin_step(step)
        flat = widen_eight_bit_floats(one.flat)
        is_read = runs_kernels and flat.dtype in d.KERNEL_DTYPES and flat.is_cpu
        by_dtype.setdefault(flat.dtype if is_read else None, []).append((flat, torch.finfo(one.dtype).max, own))
    others = by_dtype.pop(None, [])
    for dtype, read in by_dtype.items():
        assert dtype is not None
        check_kernels(dtype)
        found = candidates.kernels.read_extremes([flat for flat, _, _ in read])
        for (flat, largest, own), (zeros, amax, amin) in zip(read, found):
            if amax < largest:
                own.add_extremes(flat.numel(), zeros, 0, 0, amax, amin)
            else:
                others.append((flat, largest, own))
    for flat, largest, own in others:
        compute_extremes_by_torch(flat, largest, own)


@keeping_subnormals()
def count_samples(samples: Iterable[tuple[torch.Tensor, TensorTotals]], candidates: CandidateFormats) -> None:
    """Count samples in the candidate formats; of float64 each number as the nearest of float32 of its kind."""
    narrow = [(_narrow_sample(sample), totals) for sample, totals in samples]
    if select_engine("cpu") == "llvm":
        for k in range(0, len(narrow), TENSORS_PER_CALL):
            candidates.kernels.count_samples(narrow[k : k + TENSORS_PER_CALL])
    else:
        for sample, totals in narrow:
            count_sample_by_torch(sample, candidates, totals)


def widen_eight_bit_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floating-point numbers as bfloat16, which holds them all, and others as they are, contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor


@functools.cache
def compile_table_once(table: Table) -> Kernel:
    """Return the kernel of a table, compiled once in a process."""
    return compile_table("look", table)


# Tensors that a kernel looks at in one call.
TENSORS_PER_CALL = 64
_ROW_NUMBERS = np.arange(TENSORS_PER_CALL)


class SampleKernels:
    """The kernels that look at up to `TENSORS_PER_CALL` tensors, with their arguments in memory; for one thread."""

    def __init__(self, candidates: CandidateFormats) -> None:
        self._tensors, self._samples = TensorTable(1), TensorTable(2)
        self._whole: dict[torch.dtype, TableKernel] = {}
        words = [word for one in candidates.single for word in find_format_thresholds(one)]
        self._single = TableKernel(d.make_counts_table(len(candidates.single)), self._samples, words)
        self._blocks = [self._make_block_kernels(format) for format in candidates.blocks]

    def _make_block_kernels(self, format: BlockFormat) -> Callable[[Sequence[torch.Tensor]], np.ndarray]:
        """Return a function that counts samples in a block format: kernels, or torch where scales have no 32 bits."""
        target = make_block_target(format, Nearest(), None, torch.float32)
        if choose_block_layout(torch.float32, target) is not WORD32:
            return lambda samples: np.array([count_sample_in_blocks(sample, format) for sample in samples], np.float64)
        kind = BlockKind.of(torch.float32, target, WORD32)
        words = make_block_constants(target, WORD32, 1.0, target.element.max)
        table = d.make_block_counts_table(kind._replace(scales_by_amax=target.tensor_scale))
        # The last two constants are the largest magnitude of a tensor's finite blocks, a float64.
        blocks = TableKernel(table, self._samples, [*find_format_thresholds(format.element)[:2], *words, 0, 0])
        largest = (
            TableKernel(record_block_table(torch.float32, kind, False), self._samples, words)
            if target.tensor_scale
            else None
        )

        def count(samples: Sequence[torch.Tensor]) -> np.ndarray:
            if largest is not None:
                blocks.constants[: len(samples), -2:] = largest.run_kernel(len(samples))[:, :1].view(np.uint32)
            return blocks.run_kernel(len(samples))

        return count

    def read_extremes(self, flats: Sequence[torch.Tensor]) -> list[tuple[int, float, float]]:
        """Return the zeros and the largest and smallest magnitudes of tensors of one dtype.

        Of a tensor with infinity or NaN the largest is no finite number, and the others have no meaning.
        """
        dtype = flats[0].dtype
        kernel = self._whole.get(dtype)
        if kernel is None:
            kernel = self._whole[dtype] = TableKernel(d.make_extremes_table(dtype), self._tensors, [])
        # Of float16 the kernel's numbers are smaller: its fraction stands where that of float32 does.
        factor, found = 2.0**112 if dtype == torch.float16 else 1.0, []
        for k in range(0, len(flats), TENSORS_PER_CALL):
            part = flats[k : k + TENSORS_PER_CALL]
            self._tensors.set_tensors([flat.numel() for flat in part], [(address(flat),) for flat in part])
            for smallest, zeros, top, _ in kernel.run_kernel(len(part)).tolist():
                found.append(
                    (int(zeros), top * factor, _decode_smallest_magnitude(smallest) * factor if top < math.inf else 0.0)
                )
        return found

    def count_samples(self, counted: Sequence[tuple[torch.Tensor, TensorTotals]]) -> None:
        """Add the counts of at most `TENSORS_PER_CALL` float32 samples."""
        samples = [sample for sample, _ in counted]
        lengths = [sample.numel() for sample in samples]
        self._samples.set_tensors(lengths, [(address(one), address_of(totals.counters)) for one, totals in counted])
        sums = np.concatenate([self._single.run_kernel(len(samples)), *(count(samples) for count in self._blocks)], 1)
        for length, (_, totals), found in zip(lengths, counted, sums):
            totals.record.sampled += length
            totals.sums += found


class TensorTable:
    """The chunks and pointers of up to `TENSORS_PER_CALL` tensors that are looked at together, each one chunk.

    Args:
        columns: how many pointers a tensor has.
    """

    def __init__(self, columns: int) -> None:
        self.chunks, self.pointers = (
            np.zeros((TENSORS_PER_CALL, CHUNK_COLUMNS), np.int64),
            np.zeros((TENSORS_PER_CALL, columns), np.int64),
        )
        self.chunks[:, 0] = _ROW_NUMBERS

    def set_tensors(self, lengths: Sequence[int], pointers: Sequence[tuple[int, ...]]) -> None:
        """Set the elements and pointers of the tensors that are looked at next."""
        self.chunks[: len(lengths), 2], self.pointers[: len(lengths)] = lengths, pointers


class TableKernel:
    """A kernel over some `TensorTable`, with its constants and sums.

    Attributes:
        constants: uint32, a row per tensor.
    """

    def __init__(self, table: Table, rows: TensorTable, constants: Sequence[int] | np.ndarray) -> None:
        self.constants = np.tile(np.array(constants, np.uint32), (TENSORS_PER_CALL, 1))
        self._kernel, self._rows, self._sums = compile_table_once(table), rows, np.zeros((TENSORS_PER_CALL, table.sums))
        given: tuple[np.ndarray, ...] = (rows.chunks, rows.pointers, _ROW_NUMBERS, self.constants)
        self._arguments = (*map(address_of, given), 0, address_of(self._sums))

    def run_kernel(self, count: int) -> np.ndarray:
        """Return the sums of the first tensors, which the next call overwrites."""
        self._kernel(0, count, *self._arguments)
        return self._sums[:count]


@functools.cache
@disable_callers_modes()
def check_kernels(dtype: torch.dtype) -> None:
    """Compare the kernels of a dtype with the reference, before their first use in a process."""
    candidates = CandidateFormats(DEFAULT_FORMATS)
    ramp = torch.linspace(-3, 3, 5000, dtype=torch.float64, device="cpu")
    x = (torch.sinh(ramp * 9) * 2.0 ** (ramp * 20)).to(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    x[1777:1900] = 0.0
    sample = take_sample(x, 0x0123456789ABCDEF)
    sample[::97], sample[1::97], sample[2::97] = math.inf, -math.inf, math.nan

    def counts(by_kernel: bool) -> list[torch.Tensor]:
        totals = TensorTotals(TensorRecord("weight", "", "", dtype), candidates)
        if by_kernel:
            ((zeros, amax, amin),) = candidates.kernels.read_extremes([x])
            totals.add_extremes(len(x), zeros, 0, 0, amax, amin)
            candidates.kernels.count_samples([(sample, totals)])
        else:
            compute_extremes_by_torch(x, math.inf, totals)
            count_sample_by_torch(sample, candidates, totals)
        totals.sums[d.SQUARES_SUM] = 0.0  # which depends on the order of the sum
        record = totals.record
        extremes = torch.tensor([record.amax, record.amin, record.zeros], dtype=torch.float64, device="cpu")
        return [extremes, *map(torch.from_numpy, (totals.sums, totals.histogram))]

    check_bits(f"sample of {dtype}", lambda: counts(True), lambda: counts(False))


def take_sample(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy of a contiguous tensor's sampled elements, in float32 (float64 of float64), on the CPU.

    The tensor has no history.
    """
    taken = _pick_elements(flat, key)
    wide = _widen_sample(taken)
    return wide.clone() if wide is taken and flat.numel() <= SAMPLE_SIZE else wide


class PackedSamples(NamedTuple):
    """Samples of several tensors, one behind another.

    Attributes:
        packed: float32 or float64, on the CPU.
        counts: the elements of each.
    """

    packed: torch.Tensor
    counts: list[int]


@keeping_subnormals()
def take_samples(numbers: Sequence[StoredNumbers], keys: Iterable[int]) -> PackedSamples:
    """Return copies of the sampled elements of contiguous tensors, in float32, or float64 where one of them is."""
    taken = [_pick_elements(one.flat, key) for one, key in zip(numbers, keys, strict=True)]
    if len({one.device for one in taken}) > 1:
        taken = [one.cpu() for one in taken]
    return PackedSamples(_widen_sample(torch.cat(taken)), [one.numel() for one in taken])


def _pick_elements(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a tensor's sampled elements, flat; the last run may be shorter than 128."""
    given, elements = widen_eight_bit_floats(flat), flat.numel()
    if elements <= SAMPLE_SIZE:
        return given.view(-1)
    known, rest = _drawn_runs.get((key, elements)), elements % RUN_LENGTH
    runs = draw_runs([(key, elements)])[0] if known is None else known
    runs = runs if given.is_cpu else runs.to(given.device)
    if not rest:
        return given.view(-1, RUN_LENGTH).index_select(0, runs).view(-1)
    given = given.view(-1)
    short = runs[runs == elements // RUN_LENGTH]
    taken = given[: elements - rest].view(-1, RUN_LENGTH).index_select(0, runs[: RUNS_PER_SAMPLE - len(short)]).view(-1)
    return torch.cat([taken, given[elements - rest :]]) if len(short) else taken


def _widen_sample(taken: torch.Tensor) -> torch.Tensor:
    """Return numbers in float32, float64 ones as they are, on the CPU."""
    if taken.is_cpu:
        return taken if taken.dtype == torch.float64 else taken.float()
    return taken.to("cpu", torch.float64 if taken.dtype == torch.float64 else torch.float32)


def _narrow_sample(sample: torch.Tensor) -> torch.Tensor:
    """Return numbers in float32; what is finite, or not zero, stays so."""
    if sample.dtype != torch.float64:
        return sample
    info = torch.finfo(torch.float32)
    bounded = torch.where(sample.isinf(), sample, sample.clamp(info.min, info.max))
    smallest = torch.where(sample == 0, 0.0, 2.0**LOWEST_EXPONENT)
    return torch.where(bounded.abs() < smallest, smallest.copysign(sample), bounded).float()


def compute_extremes_by_torch(flat: torch.Tensor, largest: float, totals: TensorTotals) -> None:
    """Add the extremes of a tensor with any numbers, by torch."""
    if not flat.numel():
        return
    magnitude = flat.abs()
    finite = magnitude.isfinite()
    nonfinite, zeros = flat.numel() - int(finite.sum()), int((magnitude == 0).sum())
    amax, amin = float(torch.where(finite, magnitude, 0.0).max()), math.inf
    if zeros + nonfinite < flat.numel():
        amin = float(torch.where(finite & (magnitude > 0), magnitude.double(), math.inf).min())
    totals.add_extremes(flat.numel(), zeros, nonfinite, int((magnitude == largest).sum()), amax, amin)


def _decode_smallest_magnitude(smallest: float) -> float:
    """Return the smallest magnitude from the number that `make_extremes_table` finds."""
    word = d.INFINITE_WORD - struct.unpack("<I", struct.pack("<f", smallest))[0]
    amin: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return amin


def count_sample_by_torch(sample: torch.Tensor, candidates: CandidateFormats, totals: TensorTotals) -> None:
    """Add a sample's counts without kernels."""
    words = [word for one in candidates.single for word in find_format_thresholds(one)]
    constants = {("constant", k): word for k, word in enumerate(words)}
    counters = torch.from_numpy(totals.counters)[:1]
    singles = run_on_tensors(d.make_counts_table(len(candidates.single)).trace, [sample, counters], constants)[1]
    blocks = [count for format in candidates.blocks for count in count_sample_in_blocks(sample, format)]
    totals.record.sampled += len(sample)
    totals.sums += [*singles, *blocks]


def count_sample_in_blocks(sample: torch.Tensor, format: BlockFormat) -> tuple[int, int, int, int]:
    """Return elements in finite blocks, those that become zero, subnormals, and zeros in blocks whose largest stays."""
    if not len(sample):
        return 0, 0, 0, 0
    target = make_block_target(format, Nearest(), None, torch.float32)
    rounded = quantize(sample, format)
    padding = -len(sample) % format.block
    x, y = (torch.nn.functional.pad(t, (0, padding)).view(-1, format.block) for t in (sample, rounded))
    work = x.double() if target.has_power_scales or x.dtype == torch.float64 else x
    amax = work.abs().amax(-1, keepdim=True)
    good = amax.isfinite()
    known = torch.where(good, amax, 0)
    scale = compute_block_scales(known.double() if target.has_power_scales else known, target)
    gone = good & (x != 0) & (y == 0)
    smallest = (format.element.smallest_normal * scale).to(y.dtype)
    subnormal = good & (y != 0) & (y.abs() < smallest)
    shown = good & (y.abs().amax(-1, keepdim=True) > 0)
    counted = int(good.expand_as(x).flatten()[: len(sample)].sum())
    return counted, int(gone.sum()), int(subnormal.sum()), int((gone & shown).sum())
