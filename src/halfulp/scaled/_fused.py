"""Results of rules on an accelerator by one kernel each: scale arithmetic, factors, rounding, saturation.

A kernel is two device functions: one of scales in float64, in which no product of them leaves the range, and one of an
element in float32, which takes the first one's results as factors. Triton's form of them is compared with torch's
before its first use. Without Triton, or for tensors that are no plain memory on a device, `has_fused_kernels` is False,
and rules compute operator by operator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels import power_of_two_below, record_function, round_to_float32, run_trace_on_tensors, select, sqrt
from ..kernels._operations import bit_and, bit_or, real, word
from ..kernels._plain_memory import is_non_overlapping_and_dense
from ..kernels._trace import Trace
from ..kernels.triton._launch import find_checked_kernel, use_device
from ..kernels.triton._writer import COMPILE_OPTIONS, load_triton_module, write_functions, write_module
from ..rounding._device_functions import (
    E4M3FN_FUNCTIONS,
    E5M2_FUNCTIONS,
    encode_bfloat16,
    encode_float16,
    widen_bfloat16,
    widen_float16,
)
from . import _powers_of_two as _powers

SMALLEST_SCALE, LARGEST_SCALE = _powers.SMALLEST_SCALE, _powers.LARGEST_SCALE
HUGE_SCALE, MASK_SCALE_THRESHOLD = _powers.HUGE_SCALE, _powers.MASK_SCALE_THRESHOLD
INFINITY = float("inf")
# Where rounding to a power of two goes up, as a mantissa in float32: next to sqrt(2).
LEAST_MANTISSA_ROUNDED_UP = float(np.uint32(0x3F800000 | _powers.SQRT2_MANTISSA_BITS).view(np.float32))
BLOCK_ELEMENTS = 1024
# Blocks of which a measurement has parts at most.
MAX_PARTIAL_SUMS = 1024
# Elements on which kernels are compared.
SELF_TEST_ROWS, SELF_TEST_COLUMNS = 8, 515
SELF_TEST_NUMBERS = (
    *(0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, -1e9, 57344.0, 448.0, 464.0, 2.0**-25, 1e-30),
)
ONE_WORD, MAGNITUDE_MASK_BY_ITEMSIZE = np.uint32(1), {1: np.uint32(0x7F), 2: np.uint32(0x7FFF)}


# a payload's elements --------------------------------------------------------------------------------------------


class PayloadCodec(NamedTuple):
    """Device functions of a payload's dtype: from a word of memory to float32, and back to the nearest word."""

    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any]


PAYLOAD_CODEC_BY_DTYPE = {
    torch.float32: PayloadCodec(real, word),
    torch.bfloat16: PayloadCodec(lambda w: real(widen_bfloat16(w)), lambda x: encode_bfloat16(word(x))),
    torch.float16: PayloadCodec(
        lambda w: real(widen_float16(w)), lambda x: encode_float16(word(clamp_finite_values(x, 65504.0)))
    ),
    torch.float8_e5m2: PayloadCodec(
        E5M2_FUNCTIONS.decode_code, lambda x: E5M2_FUNCTIONS.round_to_nearest(clamp_finite_values(x, 57344.0), None)
    ),
    torch.float8_e4m3fn: PayloadCodec(
        E4M3FN_FUNCTIONS.decode_code, lambda x: E4M3FN_FUNCTIONS.round_to_nearest(x, None)
    ),
}


def clamp_finite_values(x, largest):
    """Device function: a finite number within a range; infinities and NaN as they are."""
    inside = select(x > largest, largest, select(x < -largest, -largest, x))
    return select(abs(x) == INFINITY, x, inside)


# scales, in float64 ----------------------------------------------------------------------------------------------


def take_smaller_number(a, b):
    """Device function: the smaller of two numbers; b where either is NaN."""
    return select(a < b, a, b)


def take_larger_else_second(a, b):
    """Device function: the larger of two numbers; b where either is NaN."""
    return select(a > b, a, b)


def clamp_scale(x):
    """Device function: a number brought into the range of scales, 2^-126 to 2^127."""
    return take_smaller_number(take_larger_else_second(x, SMALLEST_SCALE), LARGEST_SCALE)


def split_product_into_scale_and_factor(scales, number):
    """Device function: a product as a scale, and the factor by which it is beyond."""
    total = math.prod(scales, start=number)
    return clamp_scale(total), total / clamp_scale(total)


def compute_rescaling_factor(scale: Any, other: Any) -> Any:
    """Device function: the factor of a payload that is brought from one scale under another, at most 2^100."""
    return take_smaller_number(take_larger_else_second(scale / other, SMALLEST_SCALE), HUGE_SCALE)


# By mode: the scale, if there is one, and the factors of the payload.
SCALE_FUNCTION_BY_MULTIPLY_MODE: dict[str, Callable[..., tuple[Any, ...]]] = {
    "product": lambda s, number, factor: split_product_into_scale_and_factor(s, number),
    "values": lambda s, number, factor: (s[0], take_larger_else_second(1.0 / s[0], SMALLEST_SCALE)),
    "factor": lambda s, number, factor: (clamp_scale(math.prod(s, start=number)),),
    "levelled": lambda s, number, factor: (*split_product_into_scale_and_factor(s, number), 1.0 / s[1]),
    "brought": lambda s, number, factor: (s[1], compute_rescaling_factor(*s)),
}


def choose_sum_scale_and_factors(scales, sign, least):
    """Device function: the larger of two scales, but no mask's beside another and a least one, and both factors."""
    a, b = scales
    largest = take_larger_else_second(a, b)
    usual = take_larger_else_second(
        select(a < MASK_SCALE_THRESHOLD, a, SMALLEST_SCALE), select(b < MASK_SCALE_THRESHOLD, b, SMALLEST_SCALE)
    )
    held = take_larger_else_second(usual, take_smaller_number(largest, least))
    scale = select(usual == SMALLEST_SCALE, largest, held)
    return scale, compute_rescaling_factor(a, scale), compute_rescaling_factor(b, scale)


def choose_addmm_scale_and_factors(scales, beta_power, power):
    """Device function: the scale of beta base + alpha a b, and the factors of base and of a b."""
    base, s, t = scales
    both = s * t
    scale = take_larger_else_second(clamp_scale(base * beta_power), clamp_scale(both * power))
    return scale, clamp_scale(base / scale), clamp_scale(both / scale)


def choose_rms_scale(largest, squares, count, limit, zero_scale):
    """Device function: the power of two next to the root mean square, or what the largest needs."""
    rms = round_to_float32(clamp_scale(sqrt(squares / take_larger_else_second(count, 1.0))))
    needed = round_to_float32(clamp_scale(largest / limit))
    below, beneath = power_of_two_below(rms), power_of_two_below(needed)
    nearest = select(rms < below * LEAST_MANTISSA_ROUNDED_UP, below, take_smaller_number(below + below, LARGEST_SCALE))
    above = select(needed > beneath, beneath + beneath, beneath)
    return (select(largest > 0.0, take_larger_else_second(nearest, above), zero_scale),)


# elements, in float32 --------------------------------------------------------------------------------------------


def multiply_by_factors(values, factors, number, factor):
    """Device function: an element times its factors, the rest of the scale last."""
    made = values[0] * factor
    for one in reversed(factors):
        made = made * one
    return made


def add_rescaled_elements(values, factors, sign, least):
    """Device function: a sum under a common scale, and whether both numbers have one sign."""
    u, v = values[0] * factors[0], values[1] * factors[1] * sign
    total = u + v
    is_one_sign = ((u >= 0.0) & (v >= 0.0)) | ((u <= 0.0) & (v <= 0.0))
    return total, is_one_sign & (total != 0.0) & (total == total)


def compute_size_square_and_nonzero(x):
    """Device function: a finite element's size, its square in float64, and whether it is not zero."""
    size = select(abs(x) < INFINITY, abs(x), 0.0)
    wide = size.trace.emit("to_float64", (size,), None, "f64")
    return size, wide * wide, select(size > 0.0, 1.0, 0.0)


class FusedKernel(NamedTuple):
    """A kernel's device functions, its operands and its result."""

    name: str  # for messages
    scale_function: Callable[..., tuple[Any, ...]]  # of scales and numbers, in float64
    # Of values, factors and numbers, in float32: an element, and whether it may not become 0.
    element_function: Callable[..., Any] | None
    # Of scales, of numbers, and of results of scales that are kept; the other results are factors.
    scale_number_and_kept_counts: tuple[int, int, int]
    payload_dtypes: tuple[torch.dtype, ...] = ()
    result_dtype: torch.dtype = torch.float32
    rounds_underflow_to_smallest: bool = False  # whether elements that say so become the smallest number instead of 0


_INTEGER_DTYPE_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@functools.cache
def record_scale_and_element_traces(kernel: FusedKernel) -> tuple[Trace, tuple[int, ...], Trace, tuple[int, ...]]:
    """Return the traces of a kernel's scales and elements, each with the instructions of its results."""
    scales, numbers, kept = kernel.scale_number_and_kept_counts
    wide, found = record_function(
        lambda *x: kernel.scale_function(x[:scales], *x[scales:]), torch.float64, scales + numbers
    )
    element = Trace(torch.float32)
    codes: tuple[int, ...] = ()
    if kernel.element_function is not None:
        words = [element.emit("input", (), k, "w32") for k in range(len(kernel.payload_dtypes))]
        reals = [element.emit("input", (), len(words) + k) for k in range(len(found) - kept + numbers)]
        values = [PAYLOAD_CODEC_BY_DTYPE[dtype].decode(w) for dtype, w in zip(kernel.payload_dtypes, words)]
        made = kernel.element_function(values, reals[: len(found) - kept], *reals[len(found) - kept :])
        value, is_kept = made if isinstance(made, tuple) else (made, None)
        code = PAYLOAD_CODEC_BY_DTYPE[kernel.result_dtype].encode(value)
        if kernel.rounds_underflow_to_smallest:
            is_zero = bit_and(code, MAGNITUDE_MASK_BY_ITEMSIZE[kernel.result_dtype.itemsize]) == ONE_WORD - ONE_WORD
            code = select(is_kept & is_zero, bit_or(code, ONE_WORD), code)
        codes = (code.number,)
    return wide, tuple(x.number for x in found), element, codes


def run_kernel_by_torch(kernel: FusedKernel, numbers: Sequence[float], *given: Tensor) -> list[Tensor]:
    """Return the results of a kernel's traces on payloads and scales: its payload, if any, and the kept scales."""
    scale_trace, scale_results, element_trace, element_results = record_scale_and_element_traces(kernel)
    kept, count = kernel.scale_number_and_kept_counts[2], len(kernel.payload_dtypes)
    payloads, scales = given[:count], given[count:]
    wide = [torch.full((), x, dtype=torch.float64, device=given[0].device) for x in numbers]
    made, _ = run_trace_on_tensors(
        scale_trace, [], dict(enumerate([*(s.double() for s in scales), *wide])), scale_results
    )
    found = [x.to(torch.float32) for x in made]
    if kernel.element_function is None:
        return found
    like = payloads[0]
    words = [_view_payload_as_words(x.expand(like.shape)) for x in payloads]
    inputs: dict[Any, torch.Tensor | float] = dict(enumerate([*words, *found[kept:], *numbers]))
    ((code,), _) = run_trace_on_tensors(element_trace, [], inputs, element_results)
    bits = _INTEGER_DTYPE_BY_ITEMSIZE[kernel.result_dtype.itemsize]
    out = torch.empty_like(like, dtype=kernel.result_dtype)
    out.view(bits).copy_(code & 0xFF if bits == torch.uint8 else code)
    return [out, *found[:kept]]


def _view_payload_as_words(x: Tensor) -> Tensor:
    """Return a payload's bits as words, in the signed integers that hold them."""
    bits = x.view(_INTEGER_DTYPE_BY_ITEMSIZE[x.dtype.itemsize]).to(torch.int32)
    return bits & 0xFFFF if x.dtype.itemsize == 2 else bits


# Triton's form ---------------------------------------------------------------------------------------------------

# How elements of a payload's dtype become words, and words become elements.
_TRITON_LOAD_CAST_BY_ITEMSIZE = {
    4: ".to(tl.uint32, bitcast=True)",
    2: ".to(tl.uint16, bitcast=True).to(tl.uint32)",
    1: ".to(tl.uint32)",
}
_TRITON_REPEAT_SOURCE = """@triton.jit
def repeat(program, period, BLOCK: tl.constexpr, same: tl.constexpr):
    start = program.to(tl.int64) * BLOCK
    if same:
        return start + tl.arange(0, BLOCK)
    else:
        return ((start % period).to(tl.int32) + tl.arange(0, BLOCK)) % period"""
_TRITON_STORE_CAST_BY_DTYPE = {
    torch.float32: "{}.to(tl.float32, bitcast=True)",
    torch.bfloat16: "{}.to(tl.uint16).to(tl.bfloat16, bitcast=True)",
    torch.float16: "{}.to(tl.uint16).to(tl.float16, bitcast=True)",
    torch.float8_e5m2: "{}.to(tl.uint8)",
    torch.float8_e4m3fn: "{}.to(tl.uint8)",
}


def write_kernel_source(kernel: FusedKernel) -> str:
    """Return the source of a Triton module, whose `kernel` takes payloads, scales, results, sizes and numbers."""
    scale_trace, scale_results, element_trace, element_results = record_scale_and_element_traces(kernel)
    scales, numbers, kept = kernel.scale_number_and_kept_counts
    made = [f"y{k}" for k in range(len(scale_results))]
    given = [f"tl.load(s{k}).to(tl.float64)" for k in range(scales)]
    given += [f"tl.full([], 1.0, tl.float64) * c{k}" for k in range(numbers)]
    functions = write_functions("scales", scale_trace, scale_results)
    lines = ["program = tl.program_id(0)", f"{', '.join(made)} = scales({', '.join(given)})"]
    if kept:
        lines += ["if program == 0:", *(f"    tl.store(r{k}, y{k}.to(tl.float32))" for k in range(kept))]
    names = [*(f"s{k}" for k in range(scales)), *(f"r{k}" for k in range(kept)), *(f"c{k}" for k in range(numbers))]
    if kernel.element_function is not None:
        functions += [_TRITON_REPEAT_SOURCE, *write_functions("element", element_trace, element_results)]
        places = ("x0 + i", "x1 + repeat(program, period, BLOCK, same)")
        words = [
            f"tl.load({place}, mask=lanes, other=0){_TRITON_LOAD_CAST_BY_ITEMSIZE[dtype.itemsize]}"
            for place, dtype in zip(places, kernel.payload_dtypes)
        ]
        elements = [*words, *(f"{y}.to(tl.float32)" for y in made[kept:]), *(f"c{k}" for k in range(numbers))]
        lines += [
            "i = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
            "lanes = i < n",
            f"code = element({', '.join(elements)})",
            f"tl.store(out + i, {_TRITON_STORE_CAST_BY_DTYPE[kernel.result_dtype].format('code')}, mask=lanes)",
        ]
        names = [*(f"x{k}" for k in range(len(words))), "out", "n", "period", *names]
        names += ["same: tl.constexpr", "BLOCK: tl.constexpr"]
    body = "\n".join(f"    {line}" for line in lines)
    return write_module(functions, f"@triton.jit\ndef kernel({', '.join(names)}):\n{body}\n")


@functools.cache
def record_rms_scale_traces(dtype: torch.dtype) -> tuple[Trace, tuple[int, ...], Trace, tuple[int, ...]]:
    """Return the traces that measure an element of a payload, and that turn the whole into a scale."""
    element = Trace(torch.float32)
    measured = compute_size_square_and_nonzero(
        PAYLOAD_CODEC_BY_DTYPE[dtype].decode(element.emit("input", (), 0, "w32"))
    )
    wide, made = record_function(choose_rms_scale, torch.float64, 5)
    return element, tuple(x.number for x in measured), wide, tuple(x.number for x in made)


def write_rms_scale_source(dtype: torch.dtype) -> str:
    """Return the source of a Triton module: `measure` makes parts of a payload, and `level` a scale of these."""
    element, measured, wide, made = record_rms_scale_traces(dtype)
    functions = [*write_functions("element", element, measured), *write_functions("level_of", wide, made)]
    return write_module(
        functions, _TRITON_RMS_SCALE_TEMPLATE.replace("READ", _TRITON_LOAD_CAST_BY_ITEMSIZE[dtype.itemsize])
    )


_TRITON_RMS_SCALE_TEMPLATE = """@triton.jit
def measure(y, parts, n, programs, loops, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    largest = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.float32)
    k = 0
    while k < loops:
        i = (program + k * programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        size, square, one = element(tl.load(y + i, mask=i < n, other=0)READ)
        largest = tl.maximum(largest, size)
        squares += square
        count += one
        k += 1
    tl.store(parts + program, tl.max(largest, axis=0).to(tl.float64))
    tl.store(parts + programs + program, tl.sum(squares, axis=0))
    tl.store(parts + 2 * programs + program, tl.sum(count.to(tl.float64), axis=0))


@triton.jit
def level(parts, out, programs, limit, zero_scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    lanes = i < programs
    largest = tl.max(tl.load(parts + i, mask=lanes, other=0.0), axis=0)
    squares = tl.sum(tl.load(parts + programs + i, mask=lanes, other=0.0), axis=0)
    count = tl.sum(tl.load(parts + 2 * programs + i, mask=lanes, other=0.0), axis=0)
    one = tl.full([], 1.0, tl.float64)
    tl.store(out, level_of(largest, squares, count, one * limit, one * zero_scale).to(tl.float32))
"""


# what rules call -------------------------------------------------------------------------------------------------


def multiply_payload(
    y: Tensor,
    scales: Sequence[Tensor],
    storage: torch.dtype,
    mode: str = "product",
    number: float = 1.0,
    factor: float = 1.0,
) -> tuple[Tensor, Any]:
    """Return a payload, y times two factors rounded once to a storage, and its scale.

    `number` is a power of two, `factor` one of the payload; there are at most three scales. The mode says the scale:
    "product": of all scales and the number, within the range of scales; what is beyond multiplies the payload;
    "values": one scale, of values; "factor": none, the product multiplies the payload; "levelled": as "product", the
    payload divided by the second scale; "brought": the second of two scales, of a payload under the first.
    """
    kernel = _make_multiplying_kernel(mode, len(scales), y.dtype, storage)
    found = _run_fused_kernel(kernel, (y,), tuple(scales), (number, factor))
    return found[0], found[1] if kernel.scale_number_and_kept_counts[2] else None


@functools.cache
def _make_multiplying_kernel(
    mode: str, scale_count: int, payload_dtype: torch.dtype, result_dtype: torch.dtype
) -> FusedKernel:
    kept = int(mode != "factor")
    return FusedKernel(
        "finish",
        SCALE_FUNCTION_BY_MULTIPLY_MODE[mode],
        multiply_by_factors,
        (scale_count, 2, kept),
        (payload_dtype,),
        result_dtype,
    )


def add_payloads(
    x: Tensor,
    y: Tensor,
    x_scale: Tensor,
    y_scale: Tensor,
    storage: torch.dtype,
    sign: float = 1.0,
    avoids_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + sign y of an elementwise pair of payloads, under the larger scale, rounded once, and the scale.

    No mask decides the scale. With `avoids_zero`, sums of numbers of one sign do not become 0.
    """
    kernel = FusedKernel(
        "add", choose_sum_scale_and_factors, add_rescaled_elements, (2, 2, 1), (x.dtype, y.dtype), storage, avoids_zero
    )
    numbers = sign, _powers.find_least_scale_beside_mask(storage)
    payload, scale = _run_fused_kernel(kernel, (x, y), (x_scale, y_scale), numbers)
    return payload, scale


def compute_addmm_scale_and_factors(s_base: Tensor, sa: Tensor, sb: Tensor, beta_power: float, power: float) -> Any:
    """Return the scale of beta base + alpha a b, and the factors that bring the payloads of base and a b under it."""
    kernel = FusedKernel("affine_factors", choose_addmm_scale_and_factors, None, (3, 2, 3))
    return _run_fused_kernel(kernel, (), (s_base, sa, sb), (beta_power, power))


def measure_rms_scale(y: Tensor, storage: torch.dtype, zero_scale: float) -> Tensor:
    """Return the scale next to a payload's root mean square, or what its largest element needs; of zeros another."""
    limit = torch.finfo(storage).max

    def launch_kernels(kernels: dict[str, Any], y: Tensor) -> list[Tensor]:
        y = _get_dense_kernel_array(y)
        blocks = -(-y.numel() // BLOCK_ELEMENTS)
        programs = min(blocks, MAX_PARTIAL_SUMS)
        parts = torch.empty(3 * programs, dtype=torch.float64, device=y.device)
        out = torch.empty((), dtype=torch.float32, device=y.device)
        loops = -(-blocks // programs)
        kernels["measure"][(programs,)](y, parts, y.numel(), programs, loops, BLOCK_ELEMENTS, **COMPILE_OPTIONS)
        kernels["level"][(1,)](parts, out, programs, limit, zero_scale, MAX_PARTIAL_SUMS, **COMPILE_OPTIONS)
        return [out]

    def compute_by_torch(y: Tensor) -> list[Tensor]:
        element, measured, wide, made = record_rms_scale_traces(y.dtype)
        (size, square, one), _ = run_trace_on_tensors(element, [], {0: _view_payload_as_words(y)}, measured)
        whole = [size.amax().double(), square.sum(), one.sum(dtype=torch.float64)]
        whole += [torch.full((), x, dtype=torch.float64, device=y.device) for x in (limit, zero_scale)]
        return [run_trace_on_tensors(wide, [], dict(enumerate(whole)), made)[0][0].to(torch.float32)]

    build = lambda: load_triton_module(write_rms_scale_source(y.dtype))  # noqa: E731
    return _launch_or_run_by_torch(("level", y.dtype, storage), build, launch_kernels, compute_by_torch, (y,), ())[0]


def has_equal_or_repeating_layout(x: Tensor, y: Tensor) -> bool:
    """Return whether two payloads lie alike, or the second repeats along the first."""
    if x.shape == y.shape:
        return x.stride() == y.stride() and is_non_overlapping_and_dense(x)
    is_suffix = 0 < y.dim() <= x.dim() and x.shape[x.dim() - y.dim() :] == y.shape
    return is_suffix and x.is_contiguous() and y.is_contiguous()


def _run_fused_kernel(
    kernel: FusedKernel, payloads: tuple[Tensor, ...], scales: tuple[Tensor, ...], numbers: tuple[float, ...]
) -> list[Tensor]:
    """Return a kernel's payload, if it has one, and the scales that it keeps."""
    same = len(payloads) < 2 or payloads[0].shape == payloads[1].shape

    def launch_kernels(module: dict[str, Any], *given: Tensor) -> list[Tensor]:
        dense = [_get_dense_kernel_array(x) for x in given[: len(payloads)]]
        made = [
            torch.empty((), dtype=torch.float32, device=given[0].device)
            for _ in range(kernel.scale_number_and_kept_counts[2])
        ]
        constants = *given[len(payloads) :], *made, *numbers
        if not dense:
            module["kernel"][(1,)](*constants, **COMPILE_OPTIONS)
            return made
        out = torch.empty_like(dense[0], dtype=kernel.result_dtype)
        count, period = dense[0].numel(), dense[-1].numel()
        arrays = *dense, _get_dense_kernel_array(out)
        grid = (max(1, -(-count // BLOCK_ELEMENTS)),)
        module["kernel"][grid](*arrays, count, period, *constants, same, BLOCK_ELEMENTS, **COMPILE_OPTIONS)
        return [out, *made]

    key = kernel.name, kernel, same
    build = lambda: load_triton_module(write_kernel_source(kernel))  # noqa: E731
    compute_by_torch = functools.partial(run_kernel_by_torch, kernel, numbers)
    return _launch_or_run_by_torch(key, build, launch_kernels, compute_by_torch, payloads, scales)


def _launch_or_run_by_torch(
    key: tuple[Any, ...],
    build: Callable[[], Any],
    launch_kernels: Callable[..., list[Tensor]],
    compute_by_torch: Callable[..., list[Tensor]],
    payloads: tuple[Tensor, ...],
    scales: tuple[Tensor, ...],
) -> list[Tensor]:
    """Launch a kernel, compared with torch's form before its first use on a device; else run torch's form."""
    device = (*payloads, *scales)[0].device
    if any(x.device != device for x in (*payloads, *scales)):
        return compute_by_torch(*payloads, *scales)  # torch says which lies where

    def run_self_test(run: Callable[..., list[Tensor]], device: torch.device) -> list[Tensor]:
        with use_device(device):
            return [x.cpu() for x in run(*(x.to(device) for x in _make_self_test_inputs(payloads, len(scales))))]

    module = find_checked_kernel(
        key,
        f"{key[0]} of scaled tensors",
        device,
        build,
        lambda module, device: run_self_test(functools.partial(launch_kernels, module), device),
        lambda: run_self_test(compute_by_torch, torch.device("cpu")),
    )
    if module is None:
        return compute_by_torch(*payloads, *scales)
    with use_device(device):
        return launch_kernels(module, *payloads, *scales)


def _make_self_test_inputs(payloads: tuple[Tensor, ...], scale_count: int) -> list[Tensor]:
    """Return fixed payloads of the same dtypes, the second one row where its shape is not the first's, and scales."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for x in payloads:
        is_repeated = bool(found) and x.shape != payloads[0].shape
        shape = (SELF_TEST_COLUMNS,) if is_repeated else (SELF_TEST_ROWS, SELF_TEST_COLUMNS)
        values = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
        values *= torch.empty_like(values).uniform_(-24, 20, generator=generator).exp2()
        values.view(-1)[: len(SELF_TEST_NUMBERS)] = torch.tensor(SELF_TEST_NUMBERS, dtype=torch.float32, device="cpu")
        values = _powers.clamp_finite_values(values, torch.finfo(x.dtype).max)
        found.append((values.flip(-1) if found else values).to(x.dtype))
    powers = (2.0**-3, 2.0**5, 2.0, 2.0**-2)[:scale_count]
    return found + [torch.full((), power, dtype=torch.float32, device="cpu") for power in powers]


def _get_dense_kernel_array(x: Tensor) -> Tensor:
    """Return a payload whose elements lie without gaps, those of eight bits as bytes."""
    x = x if is_non_overlapping_and_dense(x) else x.contiguous()
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
