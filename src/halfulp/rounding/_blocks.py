"""Rounding in blocks of elements that share a scale: the target, the device functions, and the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from ..formats import BlockFormat
from ..kernels import address, check_bits, note_fallback, run_chunks, run_trace_on_tensors
from ..kernels._device_function import ElementRecording, Table, bind_names
from ..kernels._operations import add, bit_and, bit_or, bit_xor, divide, real, select, shl, shr, sub, word
from ..kernels._trace import RecordedFunction, block_largest
from ..kernels.triton._launch import TensorKernel
from ..kernels.vector._machine_function import get_array_address
from ..kernels.vector._table_loop import compile_table_kernel
from ._device_functions import compute_nearest_addend, round_word
from ._kernels import (
    CANARY_KEY,
    TritonPlan,
    check_device,
    choose_container_functions,
    choose_mode_functions,
    choose_rounding_engine,
    find_row_length,
    has_partial_overlap,
    increment_tensor_version,
    index_constants,
    make_check_elements,
    round_by_triton,
    run_recorded_kernel_on_tensors,
)
from ._modes import Nearest, Rounding, Up
from ._random_bits import WEYL_STEP, draw_first_word, trace_stream_start
from ._target import (
    DOWN,
    FLOAT_DTYPES,
    STOCHASTIC,
    UP,
    WORD32_LAYOUT,
    WORD64_LAYOUT,
    WORD_COUNT,
    RoundingWords,
    Target,
    WordLayout,
    choose_word_layout,
    floor_log2,
    make_target,
    make_target_constants,
)

# ruff: noqa: F821  names that are free here (scale_of, payload, ...) are bound when a kernel is compiled


class BlockConstants(NamedTuple):
    """The constants of a kernel about blocks: for scales that are powers of two, and for any."""

    first: Any = 0
    second: Any = 0
    smallest: Any = 0
    greatest: Any = 0
    twice_bias: Any = 0
    below_normal: Any = 0
    unit: Any = 0
    tensor: Any = 0
    amax: Any = 0
    divisor: Any = 0


SMALLEST_TENSOR_SCALE = np.float32(2.0**-126)


def round_block_element(w, u, c, d, b):
    """Device function: an element rounded over its block's scale, times the scale."""
    scale = scale_of(block_largest(bit_and(w, c.magnitude)), c, d, b)
    inverse, factor = inverse_of(scale, c, b), factor_of(scale, c, b)
    return word(real(round_word(payload(w, inverse, c), u, c)) * real(factor))


def compute_block_scale(a, c, d, b):
    """Device function: the scale of a block from its largest magnitude."""
    return factor_of(scale_of(a, c, d, b), c, b)


# scales that are powers of two: the word of a scale is its exponent ------------------------------------------


def compute_scale_exponent(a, c, d, b):
    """Device function: e - FIRST + (f >= SECOND) for amax = 2^e (1 + f), within the scale's range; all ones for NaN."""
    e = shr(a, c.field)
    e = select(bit_and(a, c.significand) >= b.second, add(e, 1), e)
    lowest = add(b.smallest, b.first)
    e = sub(select(e > lowest, e, lowest), b.first)
    e = select(e < b.greatest, e, b.greatest)
    return select(a >= c.infinity, c.ones, e)


def make_power_of_two(e, c, b):
    """Device function: 2^e; 2^-127 is subnormal in float32."""
    w = select(e < 1, b.below_normal, shl(e, c.field))
    return select(e == c.ones, c.nan, w)


def make_inverse_power_of_two(e, c, b):
    """Device function: 2^-e."""
    return select(e == c.ones, c.nan, shl(sub(b.twice_bias, e), c.field))


def multiply_by_inverse(w, inverse, c):
    """Device function: an element over a power of two; one far below its block becomes 0, which it rounds to."""
    return word(real(w) * real(inverse))


def divide_without_underflow(w, inverse, c):
    """Device function: an element over its scale for modes in which a small number is not 0, and never becomes it."""
    y = quotient(w, inverse, c)
    lost = (bit_and(y, c.magnitude) == 0) & (bit_and(w, c.magnitude) > 0)
    return select(lost, bit_or(y, 1), y)


# any scale: the word of a scale is that of the product with the tensor's -------------------------------------


def compute_scale_under_tensor_scale(a, c, d, b):
    """Device function: amax / (largest element x tensor scale), rounded within the scale's range, x tensor scale."""
    q = word(real(a) / real(b.unit))
    e = shr(q, d.field)
    e = select(e < d.lowest, d.lowest, e)
    s = sub(d.base, select(e > d.highest, d.highest, e))
    keep = shl(d.ones, s)
    r = bit_and(add(q, scale_addend(q, q, q, s, keep, d)), keep)
    r = select(q < d.tiny, d.tiny, r)
    r = select(r < d.largest, r, d.largest)
    return select(a >= c.infinity, c.nan, word(real(r) * real(b.tensor)))


def compute_upward_addend(w, a, u, s, keep, c):
    """Device function: away from zero."""
    return bit_xor(keep, c.ones)


def use_scale_itself(scale, c, b):
    """Device function: the scale's word is the scale."""
    return scale


def add_tensor_scale(b):
    """Device function: the words about blocks, `unit` times the tensor's scale, which is amax / divisor."""
    scale = divide(real(b.amax), real(b.divisor))
    scale = select(scale > SMALLEST_TENSOR_SCALE, scale, SMALLEST_TENSOR_SCALE)
    return b._replace(tensor=word(scale), unit=word(scale * real(b.unit)))


def divide_by_scale(w, inverse, c):
    """Device function: an element over its scale."""
    return word(real(w) / real(inverse))


SCALE_DOWN, SCALE_UP, SCALE_NEAREST = range(3)
_SCALE_ROUNDING_BY_NAME = {"floor": SCALE_DOWN, "up": SCALE_UP, "nearest": SCALE_NEAREST}


class BlockTarget(NamedTuple):
    """The format of elements and scales, and the way a block gets its scale.

    Attributes:
        element: what payloads are rounded to.
        scale: what scales are rounded to, saturating.
        block: elements that share a scale.
        scale_rounding: SCALE_DOWN, SCALE_UP or SCALE_NEAREST.
        tensor_scale: whether the tensor has a scale of its own.
    """

    element: Target
    scale: Target
    block: int
    scale_rounding: int
    tensor_scale: bool

    def to_integers(self) -> tuple[int, ...]:
        """Return the target as an operator's argument."""
        return (*self.element, *self.scale, self.block, self.scale_rounding, int(self.tensor_scale))

    @classmethod
    def from_integers(cls, flat: list[int]) -> BlockTarget:
        """Return the target that an operator's argument encodes."""
        size = len(Target._fields)
        element, scale = Target(*flat[:size]), Target(*flat[size : 2 * size])
        return cls(element, scale, flat[-3], flat[-2], bool(flat[-1]))

    @property
    def has_power_scales(self) -> bool:
        """Whether scales are powers of two, so that scaling is exact."""
        return self.scale.mantissa_bits == 0 and not self.tensor_scale


def make_block_target(format: BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> BlockTarget:
    """Return the target of rounding tensors of a dtype to a block format.

    Raises:
        ValueError: If the overflow policy is not saturation, or the formats are such that no scale fits.
    """
    if overflow not in (None, "saturate"):
        raise ValueError(f"the elements of {format.name} saturate: overflow is 'saturate' or None, got {overflow!r}")
    if not format.element.zero or not format.element.signed:
        raise ValueError(f"{format.name}: elements need a zero and a sign, and {format.element.name} lacks one")
    choice = _SCALE_ROUNDING_BY_NAME[format.scale_rounding]
    mode = Nearest() if choice == SCALE_NEAREST else Up()
    element = make_target(format.element, rounding, "saturate", torch.float64)
    scale = make_target(format.scale, mode, "saturate", torch.float64)
    if element is None or scale is None or format.element.mantissa_bits > 10 or format.scale.mantissa_bits > 22:
        raise ValueError(
            f"{format.name}: elements of up to 10 and scales of up to 22 mantissa bits are rounded in blocks; got "
            f"{format.element.name} and {format.scale.name}"
        )
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is float16, bfloat16, float32 or float64; got {dtype}")
    return BlockTarget(element, scale, format.block, choice, format.tensor_scale)


def compute_scale_threshold(target: BlockTarget, mantissa: int) -> tuple[int, int]:
    """Return how a power-of-two scale follows from largest = 2^e (1 + f): exponent e - first + (f >= second).

    `second` is in units of 2^-mantissa; a value that f never reaches stands for never.
    """
    largest = Fraction(target.element.max)
    never = 1 << mantissa
    if target.scale_rounding == SCALE_DOWN:
        return floor_log2(target.element.max), never
    if target.scale_rounding == SCALE_NEAREST:
        largest = largest * 3 / 2
    first = floor_log2(float(largest))
    second = (largest / Fraction(2) ** first - 1) * never
    return first, int(second) + (target.scale_rounding == SCALE_UP)


class BlockKind(NamedTuple):
    """The parameters that determine the instructions of a block kernel beside the dtype.

    Attributes:
        mode: of the elements' rounding.
        rounding_path, keeps_signs, saturates: as in `TargetConstants`, of the elements.
        block: elements that share a scale.
        has_power_scales: whether scales are powers of two.
        rounds_to_nearest: whether a scale is the closest.
        is_inexact: whether results may lie between two numbers of the dtype, which has 16 bits, and are
            rounded to it.
        scales_by_amax: whether the tensor has a scale of its own that the kernel computes from the word `amax`.
    """

    mode: int
    rounding_path: str
    keeps_signs: bool
    saturates: bool
    block: int
    has_power_scales: bool
    rounds_to_nearest: bool
    is_inexact: bool
    scales_by_amax: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype, target: BlockTarget, layout: WordLayout) -> BlockKind:
        """Return the kind of a target, of tensors of a dtype."""
        inexact, to_nearest = dtype.itemsize == 2 and has_wide_results(target), target.scale_rounding == SCALE_NEAREST
        known = make_target_constants(target.element, layout)[:3]
        return cls(target.element.mode, *known, target.block, target.has_power_scales, to_nearest, inexact)


def has_wide_results(target: BlockTarget) -> bool:
    """Return whether results may lie between two 16-bit numbers.

    So may products, and what a largest element scaled down makes of a larger one.
    """
    return not target.has_power_scales or target.scale_rounding == SCALE_NEAREST


def choose_block_layout(dtype: torch.dtype, target: BlockTarget) -> WordLayout | None:
    """Return the words in which blocks are rounded; None where only the reference does it."""
    narrow = choose_word_layout(target.element) is WORD32_LAYOUT and dtype != torch.float64
    if not target.has_power_scales:
        fits = choose_word_layout(target.scale) is WORD32_LAYOUT and target.scale.tiny_exponent >= -126
        return WORD32_LAYOUT if narrow and fits else None
    first, _ = compute_scale_threshold(target, 0)
    return WORD32_LAYOUT if narrow and first >= 2 and target.scale.emin >= -127 else WORD64_LAYOUT


def bind_device_functions(kind: BlockKind) -> dict[str, object]:
    """Return the functions bound to the free names of the device functions."""
    names: dict[str, object] = {
        **choose_mode_functions(kind.mode, (kind.rounding_path, kind.keeps_signs, kind.saturates))
    }
    names["quotient"] = multiply_by_inverse if kind.has_power_scales else divide_by_scale
    names["payload"] = divide_without_underflow if kind.mode in (UP, DOWN) else names["quotient"]
    if kind.has_power_scales:
        names |= {
            "scale_of": compute_scale_exponent,
            "factor_of": make_power_of_two,
            "inverse_of": make_inverse_power_of_two,
        }
    else:
        names |= {
            "scale_of": compute_scale_under_tensor_scale,
            "factor_of": use_scale_itself,
            "inverse_of": use_scale_itself,
        }
        names["scale_addend"] = compute_nearest_addend if kind.rounds_to_nearest else compute_upward_addend
    return names


@cache
def record_block_kernel(dtype: torch.dtype, kind: BlockKind, rounds: bool = True) -> Table:
    """Return the table that rounds, or that finds the largest of the finite blocks' largest magnitudes.

    Its columns are what is rounded and where it goes.
    """
    pieces, wide = choose_container_functions(dtype, kind.is_inexact), dtype == torch.float64
    element = ElementRecording(2, 2 * WORD_COUNT + len(BlockConstants._fields), "w64" if wide else "w32")
    i, (source, target), (c, d, of_block) = element.index, element.arrays, split_words(element.constants)
    w, names = pieces["load"](source, i), bind_device_functions(kind)
    if rounds:
        of_block = add_tensor_scale(of_block) if kind.scales_by_amax else of_block
        random = draw_first_word(*element.stream)
        pieces["store"](target, i, bind_names(round_block_element, names)(w, random, c, d, of_block))
    else:
        largest = block_largest(bit_and(w, c.magnitude))
        element.trace.emit_total("max", select(largest < c.infinity, largest, 0))
    start, count = trace_stream_start(), len(element.constants)
    return Table(element.trace, 2, count, start, int(WEYL_STEP), kind.block, partial=True)


def split_words(constants: Sequence[Any]) -> tuple[RoundingWords, RoundingWords, BlockConstants]:
    """Return the words of a table's constants: of the elements, of the scales, and of blocks."""
    of_element, of_scale = constants[:WORD_COUNT], constants[WORD_COUNT : 2 * WORD_COUNT]
    return RoundingWords(*of_element), RoundingWords(*of_scale), BlockConstants(*constants[2 * WORD_COUNT :])


def make_block_constants(target: BlockTarget, layout: WordLayout, tensor: float, unit: float) -> np.ndarray:
    """Return the constants of a table: of the elements, of the scales, and of blocks.

    `tensor` is the tensor's scale, and `unit` its product with the largest element.
    """
    if target.has_power_scales:
        first, second = compute_scale_threshold(target, layout.mantissa)
        highest = floor_log2(target.scale.max)
        words = BlockConstants(
            first=first % (1 << layout.width),
            second=second,
            smallest=max(0, target.scale.tiny_exponent + layout.bias),
            greatest=min(highest + layout.bias, 2 * layout.bias - 1),
            twice_bias=2 * layout.bias,
            below_normal=layout.make_power_word(-layout.bias),
        )
    else:
        with np.errstate(over="ignore"):  # an infinity, as in `compute_tensor_scale`
            divisor = float(np.float32(target.element.max * target.scale.max)) if target.tensor_scale else 0.0
        words = BlockConstants(
            unit=layout.encode_number(unit), tensor=layout.encode_number(tensor), divisor=layout.encode_number(divisor)
        )
    of_block = np.array(words, np.uint32 if layout.width == 32 else np.uint64)
    return np.concatenate([*(make_target_constants(t, layout).words for t in (target.element, target.scale)), of_block])


@cache
def make_check_rows(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Return rows of a length, of numbers of all magnitudes and the special ones."""
    x = make_check_elements(dtype)
    x = x.repeat(-(-length // x.numel()))
    return x[: x.numel() // length * length].view(-1, length)


def round_blocks_by_reference(x: torch.Tensor, target: BlockTarget, key: int, first: int = 0) -> torch.Tensor:
    """Return the result on any device.

    Blocks lie along the last dimension of x, and the last one of a row may be shorter; the index of an element's random
    bits is its position in x, counted from `first` on.
    """
    if x.numel() == 0:
        return x.clone()
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    index = torch.arange(first, first + x.numel(), device=x.device, dtype=torch.int64).view(rows.shape)
    layout = choose_block_layout(x.dtype, target) or _get_reference_layout(x.dtype)
    dtype = torch.float64 if layout is WORD64_LAYOUT else torch.float32
    # The last block of each row is filled up with zeros.
    filled = (pad(one, (0, -rows.shape[1] % target.block)) for one in (rows.to(dtype), index))
    blocks, index = (one.unflatten(1, (-1, target.block)) for one in filled)
    table = record_block_kernel(dtype, BlockKind.of(dtype, target, layout))
    words = _make_reference_constants(blocks.abs().amax(-1), target)
    rounded = run_recorded_kernel_on_tensors(
        table, blocks, words, key if target.element.mode == STOCHASTIC else None, index
    )
    return rounded.flatten(1)[:, : rows.shape[1]].to(x.dtype).reshape(x.shape)


def compute_block_scales(largest: torch.Tensor, target: BlockTarget) -> torch.Tensor:
    """Return the scales of all of a tensor's blocks from their largest magnitudes; NaN where that is not finite."""
    layout = _get_reference_layout(largest.dtype)
    piece = _record_block_scale(BlockKind.of(largest.dtype, target, layout), layout.width)
    bits = largest.contiguous().view(torch.int64 if layout is WORD64_LAYOUT else torch.int32)
    given: dict[Any, Any] = {**index_constants(_make_reference_constants(largest, target)), "word": bits}
    return run_trace_on_tensors(piece.trace, (), given, piece.results)[0][0].view(largest.dtype)


def compute_tensor_scale(amax: float, target: BlockTarget) -> tuple[float, float]:
    """Return the tensor's scale, and its product with the largest element, as float32 numbers."""
    if not target.tensor_scale:
        return 1.0, target.element.max
    numbers = [amax, target.element.max * target.scale.max, target.element.max]
    single = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    scale = (single[0] / single[1]).clamp(min=float(SMALLEST_TENSOR_SCALE))
    return float(scale), float(scale * single[2])


def _make_reference_constants(largest: torch.Tensor, target: BlockTarget) -> np.ndarray:
    """Return the constants of a target, under the tensor's own scale if it has one."""
    amax = float(torch.where(largest.isfinite(), largest, 0).max()) if target.tensor_scale else 0.0
    return make_block_constants(target, _get_reference_layout(largest.dtype), *compute_tensor_scale(amax, target))


def _get_reference_layout(dtype: torch.dtype) -> WordLayout:
    return WORD64_LAYOUT if dtype == torch.float64 else WORD32_LAYOUT


@cache
def _record_block_scale(kind: BlockKind, width: int) -> RecordedFunction:
    """Return the device function that makes a scale of a block's largest magnitude."""
    element = ElementRecording(0, 2 * WORD_COUNT + len(BlockConstants._fields), f"w{width}")
    word = element.add_input("word", f"w{width}")
    scale = bind_names(compute_block_scale, bind_device_functions(kind))(word, *split_words(element.constants))
    return RecordedFunction(element.trace, (scale.number,))


@lru_cache(maxsize=1024)
def make_block_triton_plan(dtype: torch.dtype, target: BlockTarget, layout: WordLayout) -> TritonPlan:
    """Return the plan of a dtype and a target, in words of a layout."""
    words = make_block_constants(target, layout, 1.0, target.element.max)
    kind = BlockKind.of(dtype, target, layout)._replace(scales_by_amax=target.tensor_scale)
    # The largest magnitude on which a tensor's scale depends lies in the device's memory.
    in_memory = (2 * WORD_COUNT + BlockConstants._fields.index("amax"),) if kind.scales_by_amax else ()
    kernel = TensorKernel(record_block_kernel(dtype, kind), in_memory)
    measure = TensorKernel(record_block_kernel(dtype, kind, False)) if target.tensor_scale else None
    measured = () if measure is None else measure.constant_arguments(words)
    # The choice of a scale is a constant of the kernel, with which it is compared.
    told, name = (dtype, kind, target.scale_rounding), f"quantize in blocks of {dtype}"
    return TritonPlan(kernel, kernel.constant_arguments(words), told, name, measure, measured)


def _round_by_triton(x: torch.Tensor, target: BlockTarget, layout: WordLayout, key: int, out: torch.Tensor) -> bool:
    def fixed(aligned: bool, ragged: bool) -> torch.Tensor:
        return make_check_rows(x.dtype, 3 * target.block + 1 if ragged else 16 * target.block)

    plan = make_block_triton_plan(x.dtype, target, layout)
    return round_by_triton(plan, x, key, out, fixed, lambda rows: round_blocks_by_reference(rows, target, CANARY_KEY))


BLOCK_CHUNK_ELEMENTS = 16_384
# Kernels hold a block on the stack, of which threads may have no more than 512 KiB, or in a program's registers.
_LONGEST_BLOCK = 4096


def round_blocks_into(x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor) -> None:
    """Round x, whose blocks lie along its last dimension, into out, which may be x.

    Raises:
        NotImplementedError: the device does not round as the CPU does.
    """
    if x.numel() == 0:
        return
    if x.device.type != "cpu":
        check_device(x, target, lambda elements, rounded: _round_into(elements, target, CANARY_KEY, rounded))
    _round_into(x, target, key, out)
    increment_tensor_version(out)


def _round_into(x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor) -> None:
    layout, engine = choose_block_layout(x.dtype, target), choose_rounding_engine(x)
    if engine == "reference" or layout is None or target.block > _LONGEST_BLOCK:
        if target.block > _LONGEST_BLOCK:
            note_fallback("blocks", f"blocks of more than {_LONGEST_BLOCK} elements are rounded by the reference")
        elif layout is None:
            note_fallback("blocks", f"{x.dtype} with scales that are not powers of two is rounded by the reference")
        out.copy_(round_blocks_by_reference(x, target, key))
        return
    # The processor's kernels store 16-bit numbers without rounding.
    single = engine == "llvm" and layout is WORD32_LAYOUT and has_wide_results(target)
    work = torch.float64 if layout is WORD64_LAYOUT else torch.float32 if single else x.dtype
    source = x.to(work).contiguous()
    direct = work == x.dtype and out.is_contiguous() and not has_partial_overlap(source, out)
    # A Triton program has read all of its blocks before it writes one.
    result = out if direct and (engine == "triton" or address(source) != address(out)) else torch.empty_like(source)
    if engine == "llvm":
        _round_by_llvm(source, target, layout, key, result)
    elif not _round_by_triton(source, target, layout, key, result):
        out.copy_(round_blocks_by_reference(x, target, key))
        return
    if result is not out:
        out.copy_(result)


def _round_by_llvm(x: torch.Tensor, target: BlockTarget, layout: WordLayout, key: int, out: torch.Tensor) -> None:
    kind = BlockKind.of(x.dtype, target, layout)
    kernels, rows = _compile_kernels(x.dtype, kind), make_check_rows(x.dtype, 3 * target.block + 1)

    def fast() -> list[torch.Tensor]:
        rounded = torch.empty_like(rows)
        _call_kernels(*kernels, rows, target, layout, CANARY_KEY, rounded)
        return [rounded]

    name, told = f"quantize in blocks ({x.dtype})", ("blocks", x.dtype, kind, target.scale_rounding)
    check_bits(name, fast, lambda: [round_blocks_by_reference(rows, target, CANARY_KEY)], told)
    _call_kernels(*kernels, x, target, layout, key, out)


@cache
def _compile_kernels(dtype: torch.dtype, kind: BlockKind) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """Return the kernel that rounds, and one that finds the largest magnitude of all blocks, where needed."""
    kernel = compile_table_kernel("quantize_blocks", record_block_kernel(dtype, kind))
    if kind.has_power_scales:
        return kernel, None
    return kernel, compile_table_kernel("largest_blocks", record_block_kernel(dtype, kind, False))


def _call_kernels(
    kernel, measure, x: torch.Tensor, target: BlockTarget, layout: WordLayout, key: int, out: torch.Tensor
) -> None:
    length = find_row_length(x)
    table, sizes = _cut_rows_into_chunks(x.numel() // length, length, target.block)
    numbers = array("Q", (address(x), address(out), key, 0))
    pointers = numbers.buffer_info()[0]
    given = (get_array_address(table), pointers, pointers + 24)
    words = make_block_constants(target, layout, 1.0, target.element.max)
    if measure is not None:
        found = np.zeros((len(table), 4))
        run_chunks(measure, sizes, *given, get_array_address(words), pointers + 16, get_array_address(found))
        words = make_block_constants(target, layout, *compute_tensor_scale(float(found[:, 0].max()), target))
    run_chunks(kernel, sizes, *given, get_array_address(words), pointers + 16, 0)


@lru_cache(maxsize=64)
def _cut_rows_into_chunks(rows: int, length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows into chunks of whole blocks, of which the last may be incomplete; return chunks and lengths."""
    if length % block == 0:
        rows, length = 1, rows * length
    step = max(1, BLOCK_CHUNK_ELEMENTS // block) * block
    starts = np.arange(0, length, step, dtype=np.int64)
    sizes = np.minimum(starts + step, length) - starts
    begin = (starts + np.arange(rows, dtype=np.int64)[:, None] * length).reshape(-1)
    lengths = np.tile(sizes, rows)
    return np.stack([np.zeros_like(begin), begin, lengths, begin], 1), lengths
