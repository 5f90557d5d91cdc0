"""Rounding in blocks of elements that share a scale: the target, the device functions, and the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from ..formats import BlockFormat
from ..formats._block import ScaleRounding
from ..kernels import address, check_bits, note_fallback, run_chunks
from ..kernels._device_function import ElementTraceBuilder, PointerTableFunction, bind_free_variables
from ..kernels._operations import add, bit_and, bit_or, bit_xor, divide, real, select, shl, shr, sub, word
from ..kernels._trace import block_largest
from ..kernels.vector._machine_function import Kernel, get_array_address
from ..kernels.vector._table_loop import compile_pointer_table_kernel
from ._device_functions import compute_nearest_addend, round_word
from ._kernels import (
    CHECK_KEY,
    TritonPlan,
    bind_words_to_names,
    check_device_rounding,
    choose_container_functions,
    choose_mode_functions,
    choose_rounding_engine,
    find_row_length,
    get_shared_table,
    has_partial_overlap,
    increment_tensor_version,
    make_check_elements,
    make_tensor_kernel,
    round_by_triton,
    run_table_on_tensors,
)
from ._modes import Nearest, Rounding, Up
from ._random_bits import WEYL_STEP, draw_first_word, get_stream_position_trace
from ._target import (
    FLOAT_DTYPES,
    WORD32_LAYOUT,
    Target,
    WordLayout,
    choose_word_layout,
    floor_log2,
    get_word_layout,
    make_target,
    make_target_constants,
)

# ruff: noqa: F821  names that are free here (scale_of, payload, ...) are bound when a kernel is compiled


# The words about blocks: for scales that are powers of two, and for any.
BLOCK_CONSTANT_NAMES: tuple[str, ...] = ("first", "second", "smallest", "greatest", "twice_bias", "below_normal")
BLOCK_CONSTANT_NAMES += ("unit", "tensor", "amax", "divisor")
SMALLEST_TENSOR_SCALE = np.float32(2.0**-126)


def round_block_element(w, u, c, d, b):
    """Device function: an element rounded over its block's scale, times the scale."""
    scale = scale_of(block_largest(bit_and(w, c.magnitude)), c, d, b)
    inverse, factor = inverse_of(scale, c, b), factor_of(scale, c, b)
    return word(real(round_word(payload(w, inverse, c), u, c)) * real(factor))


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


def return_scale(scale, c, b):
    """Device function: the scale's word is the scale."""
    return scale


def compute_tensor_scale_constants(b):
    """Device function: the words about blocks, `unit` times the tensor's scale, which is amax / divisor."""
    scale = divide(real(b.amax), real(b.divisor))
    scale = select(scale > SMALLEST_TENSOR_SCALE, scale, SMALLEST_TENSOR_SCALE)
    return SimpleNamespace(tensor=word(scale), unit=word(scale * real(b.unit)))


def divide_by_scale(w, inverse, c):
    """Device function: an element over its scale."""
    return word(real(w) / real(inverse))


class BlockTarget(NamedTuple):
    """The format of elements and scales, and the way a block gets its scale."""

    element: Target
    scale: Target  # what scales are rounded to, saturating
    block: int  # elements that share a scale
    scale_rounding: ScaleRounding
    tensor_scale: bool  # whether the tensor has a scale of its own

    @property
    def mode(self) -> str:
        """The mode of the elements' rounding."""
        return self.element.mode

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
    mode = Nearest() if format.scale_rounding == "nearest" else Up()
    element = make_target(format.element, rounding, "saturate", torch.float64)
    scale = make_target(format.scale, mode, "saturate", torch.float64)
    if element is None or scale is None or format.element.mantissa_bits > 10 or format.scale.mantissa_bits > 22:
        raise ValueError(
            f"{format.name}: elements of up to 10 and scales of up to 22 mantissa bits are rounded in blocks; got "
            f"{format.element.name} and {format.scale.name}"
        )
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is float16, bfloat16, float32 or float64; got {dtype}")
    return BlockTarget(element, scale, format.block, format.scale_rounding, format.tensor_scale)


def compute_scale_offset_and_threshold(target: BlockTarget, mantissa: int) -> tuple[int, int]:
    """Return how a power-of-two scale follows from largest = 2^e (1 + f): exponent e - first + (f >= second).

    `second` is in units of 2^-mantissa; a value that f never reaches stands for never.
    """
    largest = Fraction(target.element.max)
    never = 1 << mantissa
    if target.scale_rounding == "floor":
        return floor_log2(target.element.max), never
    if target.scale_rounding == "nearest":
        largest = largest * 3 / 2
    first = floor_log2(float(largest))
    second = (largest / Fraction(2) ** first - 1) * never
    return first, int(second) + (target.scale_rounding == "up")


def has_inexact_16_bit_results(target: BlockTarget) -> bool:
    """Return whether results may lie between two 16-bit numbers.

    So may products, and what a largest element scaled down makes of a larger one.
    """
    return not target.has_power_scales or target.scale_rounding == "nearest"


def choose_block_dtype(dtype: torch.dtype, target: BlockTarget) -> torch.dtype | None:
    """Return the dtype that blocks are rounded in, theirs or float64; None where only the reference does it."""
    narrow = choose_word_layout(target.element) is WORD32_LAYOUT and dtype != torch.float64
    if not target.has_power_scales:
        fits = choose_word_layout(target.scale) is WORD32_LAYOUT and target.scale.tiny_exponent >= -126
        return dtype if narrow and fits else None
    first, _ = compute_scale_offset_and_threshold(target, 0)
    return dtype if narrow and first >= 2 and target.scale.emin >= -127 else torch.float64


def choose_block_functions(target: BlockTarget, layout: WordLayout) -> dict[str, Callable]:
    """Return the functions bound to the free names of the device functions."""
    has_powers, to_nearest = target.has_power_scales, target.scale_rounding == "nearest"
    quotient = multiply_by_inverse if has_powers else divide_by_scale
    return {
        **choose_mode_functions(target.element, make_target_constants(target.element, layout)),
        "quotient": quotient,
        "payload": divide_without_underflow if target.mode in ("up", "down") else quotient,
        "scale_of": compute_scale_exponent if has_powers else compute_scale_under_tensor_scale,
        "factor_of": make_power_of_two if has_powers else return_scale,
        "inverse_of": make_inverse_power_of_two if has_powers else return_scale,
        "scale_addend": compute_nearest_addend if to_nearest else compute_upward_addend,
    }


@lru_cache(maxsize=1024)
def record_block_kernel(
    dtype: torch.dtype, target: BlockTarget, rounds: bool = True, scales_by_amax: bool = False
) -> PointerTableFunction:
    """Return the table that rounds, or that finds the largest of the finite blocks' largest magnitudes.

    Its columns are what is rounded and where it goes. Where it scales by amax, the kernel computes the tensor's own
    scale from the word `amax`.
    """
    layout = get_word_layout(dtype)
    names = make_target_constants(target.element, layout).words
    first, count = 2 * len(names), 2 * len(names) + len(BLOCK_CONSTANT_NAMES)
    element = ElementTraceBuilder(2, count, f"w{layout.width}")
    i, (source, goal), words = element.index, element.arrays, element.constants
    c, d = bind_words_to_names(names, words), bind_words_to_names(names, words[len(names) :])
    pieces = choose_container_functions(dtype, dtype.itemsize == 2 and has_inexact_16_bit_results(target))
    w = pieces["load"](source, i)
    if rounds:
        of_block = bind_words_to_names(BLOCK_CONSTANT_NAMES, words[first:])
        of_block = compute_tensor_scale_constants(of_block) if scales_by_amax else of_block
        rounded = bind_free_variables(round_block_element, choose_block_functions(target, layout))
        pieces["store"](goal, i, rounded(w, draw_first_word(*element.random_stream_inputs), c, d, of_block))
    else:
        largest = block_largest(bit_and(w, c.magnitude))
        element.trace.emit_total("max", select(largest < c.infinity, largest, 0))
    return get_shared_table(
        PointerTableFunction(
            element.trace, 2, count, get_stream_position_trace(), int(WEYL_STEP), target.block, has_partial_blocks=True
        )
    )


def make_block_constants(target: BlockTarget, layout: WordLayout, tensor: float, unit: float) -> np.ndarray:
    """Return the constants of a table: of the elements, of the scales, and of blocks.

    `tensor` is the tensor's scale, and `unit` its product with the largest element.
    """
    words = dict.fromkeys(BLOCK_CONSTANT_NAMES, 0)
    if target.has_power_scales:
        first, second = compute_scale_offset_and_threshold(target, layout.mantissa)
        words |= {
            "first": first % (1 << layout.width),
            "second": second,
            "smallest": max(0, target.scale.tiny_exponent + layout.bias),
            "greatest": min(floor_log2(target.scale.max) + layout.bias, 2 * layout.bias - 1),
            "twice_bias": 2 * layout.bias,
            "below_normal": layout.make_power_of_two_word(-layout.bias),
        }
    else:
        with np.errstate(over="ignore"):  # an infinity, as in `compute_tensor_scale`
            divisor = float(np.float32(target.element.max * target.scale.max)) if target.tensor_scale else 0.0
        numbers = {"unit": unit, "tensor": tensor, "divisor": divisor}
        words |= {name: layout.get_float_bits(number) for name, number in numbers.items()}
    known = [make_target_constants(one, layout).array for one in (target.element, target.scale)]
    return np.concatenate([*known, np.array([*words.values()], known[0].dtype)])


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
    dtype = torch.float64 if (choose_block_dtype(x.dtype, target) or x.dtype) == torch.float64 else torch.float32
    # The last block of each row is filled up with zeros.
    filled = (pad(one, (0, -rows.shape[1] % target.block)) for one in (rows.to(dtype), index))
    blocks, index = (one.unflatten(1, (-1, target.block)) for one in filled)
    amax = 0.0
    if target.tensor_scale:
        largest = blocks.abs().amax(-1)
        amax = float(torch.where(largest.isfinite(), largest, 0).max())
    words = make_block_constants(target, get_word_layout(dtype), *compute_tensor_scale(amax, target))
    rounded = run_table_on_tensors(record_block_kernel(dtype, target), blocks, words, index, key, target.mode)
    return rounded.flatten(1)[:, : rows.shape[1]].to(x.dtype).reshape(x.shape)


def compute_tensor_scale(amax: float, target: BlockTarget) -> tuple[float, float]:
    """Return the tensor's scale, and its product with the largest element, as float32 numbers."""
    if not target.tensor_scale:
        return 1.0, target.element.max
    with np.errstate(all="ignore"):  # a divisor that is infinite gives the smallest scale
        scale = max(np.float32(amax) / np.float32(target.element.max * target.scale.max), SMALLEST_TENSOR_SCALE)
        return float(scale), float(scale * np.float32(target.element.max))


@lru_cache(maxsize=1024)
def make_block_triton_plan(dtype: torch.dtype, target: BlockTarget) -> TritonPlan:
    """Return the plan of a dtype and a target."""
    words = make_block_constants(target, get_word_layout(dtype), 1.0, target.element.max)
    # The largest magnitude on which a tensor's scale depends lies in the device's memory.
    in_memory = (
        (len(words) - len(BLOCK_CONSTANT_NAMES) + BLOCK_CONSTANT_NAMES.index("amax"),) if target.tensor_scale else ()
    )
    kernel = make_tensor_kernel(record_block_kernel(dtype, target, True, target.tensor_scale), in_memory)
    reference = partial(round_blocks_by_reference, target=target, key=CHECK_KEY)

    def make_elements(aligned: bool, ragged: bool) -> torch.Tensor:
        return make_check_rows(dtype, 3 * target.block + 1 if ragged else 16 * target.block)

    name = f"quantize in blocks of {dtype}"
    plan = TritonPlan(kernel, kernel.select_launch_constants(words), name, make_elements, reference)
    if not target.tensor_scale:
        return plan
    measure = make_tensor_kernel(record_block_kernel(dtype, target, False))
    return plan._replace(largest_kernel=measure, largest_constants=measure.select_launch_constants(words))


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
        check_device_rounding(x, target, lambda elements, rounded: _round_into(elements, target, CHECK_KEY, rounded))
    _round_into(x, target, key, out)
    increment_tensor_version(out)


def _round_into(x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor) -> None:
    work, engine = choose_block_dtype(x.dtype, target), choose_rounding_engine(x)
    if engine == "reference" or work is None or target.block > _LONGEST_BLOCK:
        if target.block > _LONGEST_BLOCK:
            note_fallback("blocks", f"blocks of more than {_LONGEST_BLOCK} elements are rounded by the reference")
        elif work is None:
            note_fallback("blocks", f"{x.dtype} with scales that are not powers of two is rounded by the reference")
        out.copy_(round_blocks_by_reference(x, target, key))
        return
    # The processor's kernels store 16-bit numbers without rounding.
    if engine == "llvm" and work != torch.float64 and has_inexact_16_bit_results(target):
        work = torch.float32
    source = x.to(work).contiguous()
    direct = work == x.dtype and out.is_contiguous() and not has_partial_overlap(source, out)
    # A Triton program has read all of its blocks before it writes one.
    result = out if direct and (engine == "triton" or address(source) != address(out)) else torch.empty_like(source)
    if engine == "llvm":
        kernel, measure = _prepare_kernels(work, target)
        _round_by_llvm(kernel, measure, source, target, key, result)
    elif not round_by_triton(make_block_triton_plan(work, target), source, key, result):
        out.copy_(round_blocks_by_reference(x, target, key))
        return
    if result is not out:
        out.copy_(result)


@lru_cache(maxsize=1024)
def _prepare_kernels(dtype: torch.dtype, target: BlockTarget) -> tuple[Kernel, Kernel | None]:
    """Return the kernel that rounds, and where needed one that finds the largest magnitude of all blocks, checked."""
    table, rows = record_block_kernel(dtype, target), make_check_rows(dtype, 3 * target.block + 1)
    measure = _compile_kernel(record_block_kernel(dtype, target, False)) if target.tensor_scale else None
    kernels = _compile_kernel(table), measure

    def fast() -> list[torch.Tensor]:
        rounded = torch.empty_like(rows)
        _round_by_llvm(*kernels, rows, target, CHECK_KEY, rounded)
        return [rounded]

    key = table, target.scale_rounding
    check_bits(
        f"quantize in blocks of {dtype}", fast, lambda: [round_blocks_by_reference(rows, target, CHECK_KEY)], key
    )
    return kernels


@cache
def _compile_kernel(table: PointerTableFunction) -> Kernel:
    return compile_pointer_table_kernel("quantize_blocks" if table.trace.stores else "largest_blocks", table)


def _round_by_llvm(
    kernel: Kernel, measure: Kernel | None, x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor
) -> None:
    length = find_row_length(x)
    table, sizes = _cut_rows_into_chunks(x.numel() // length, length, target.block)
    numbers = array("Q", (address(x), address(out), key, 0))
    pointers = numbers.buffer_info()[0]
    given = (get_array_address(table), pointers, pointers + 24)
    layout = get_word_layout(x.dtype)
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
