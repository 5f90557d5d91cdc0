"""Rounding by kernels, of the processor and of Triton, compared with the reference before their first use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import (
    MOST_SERIAL_ELEMENTS,
    IndexMap,
    address,
    check_bits,
    cut_into_chunks,
    keeping_subnormals,
    require_same_bits_as_cpu,
    run_chunks,
    run_trace_on_tensors,
    select_engine,
)
from ..kernels._device_function import (
    RANDOM_STREAM_INPUT_NAMES,
    STREAMING_STORE_ALIGNMENT_BYTES,
    ElementTraceBuilder,
    PointerTableFunction,
    bind_free_variables,
)
from ..kernels._engine import use_reference_in_thread
from ..kernels._operations import load16, load32, load64, shr, store16, store32, store64
from ..kernels._threads import count_kernel_threads, flushes_subnormals
from ..kernels.triton._launch import VECTOR_BYTES, TensorKernel, copy_with_alignment, find_checked_kernel, is_aligned
from ..kernels.vector._machine_function import Kernel, get_array_address
from ..kernels.vector._table_loop import compile_single_row_kernel
from . import _device_functions as p
from ._modes import get_rounding
from ._random_bits import WEYL_STEP, compute_stream_counters, draw_first_word, get_stream_position_trace, random_words
from ._target import WORD64_LAYOUT, Target, TargetConstants, choose_word_layout, get_word_layout, make_target_constants

_ROUNDING_FUNCTION_BY_PATH = {
    "fixed": p.round_by_fixed_shift,
    "adder": p.round_by_float_addition,
    "scaled": p.round_in_fixed_point,
    "packed": p.round_by_exponent,
}
_MEMORY_FUNCTIONS_BY_DTYPE: dict[torch.dtype, dict[str, Callable]] = {
    torch.float32: {"load": load32, "store": store32},
    torch.float64: {"load": load64, "store": store64},
    torch.bfloat16: {
        "load": lambda address, i: p.widen_bfloat16(load16(address, i)),
        "store": lambda address, i, w: store16(address, i, shr(w, p.SIXTEEN)),  # its low half is zero
    },
    torch.float16: {
        "load": lambda address, i: p.widen_float16(load16(address, i)),
        "store": lambda address, i, w: store16(address, i, p.encode_float16(w)),
    },
}


@lru_cache(maxsize=1024)
def record_rounding_kernel(dtype: torch.dtype, target: Target, streams: bool = False) -> PointerTableFunction:
    """Return the table whose columns are what is rounded and where it goes: in place too, unless it streams."""
    layout, pieces = get_word_layout(dtype), choose_container_functions(dtype)
    known = make_target_constants(target, layout)
    element = ElementTraceBuilder(2, len(known.words), f"w{layout.width}")
    i, (source, goal), words = element.index, element.arrays, bind_words_to_names(known.words, element.constants)
    rounded = bind_free_variables(p.round_word, choose_mode_functions(target, known))
    pieces["store"](goal, i, rounded(pieces["load"](source, i), draw_first_word(*element.random_stream_inputs), words))
    start = get_stream_position_trace()
    return get_shared_table(
        PointerTableFunction(element.trace, 2, len(known.words), start, int(WEYL_STEP), uses_nontemporal_stores=streams)
    )


def bind_words_to_names(names: Iterable[str], values: Iterable[Any]) -> SimpleNamespace:
    """Return a table's constants under the names by which device functions know them."""
    return SimpleNamespace(**dict(zip(names, values)))


_TABLE_BY_KEY: dict[str, PointerTableFunction] = {}


def get_shared_table(table: PointerTableFunction) -> PointerTableFunction:
    """Return the first table of these instructions: targets that differ in constants alone share their kernels."""
    return _TABLE_BY_KEY.setdefault(table.make_cache_key(), table)


def choose_mode_functions(target: Target, known: TargetConstants) -> dict[str, Callable]:
    """Return the functions bound to the free names of `round_word`."""
    mode, path = target.mode, known.rounding_path
    bind: dict[str, Callable] = {
        "magnitude": _ROUNDING_FUNCTION_BY_PATH[path],
        "limited": p.limit_to_largest if known.saturates else p.replace_overflow,
        "signed": p.copy_sign if known.keeps_signs else p.copy_allowed_sign,
    }
    if mode == "nearest":
        bind["addend"] = p.compute_nearest_addend_at_fixed_shift if path == "fixed" else p.compute_nearest_addend
        bind["reaches_smallest"] = p.exceeds_half_smallest
    elif mode == "stochastic":
        bind |= {"addend": p.compute_random_addend, "reaches_smallest": p.rounds_up_to_smallest_at_random}
    else:
        bind |= {"addend": p.compute_mode_addend, "reaches_smallest": p.is_smallest_chosen_by_mode}
        # A partial function: names of its module are not those that are bound here.
        bind["goes_away"] = functools.partial(get_rounding(mode).goes_away)
    if mode in ("toward_zero", "up", "down"):
        bind["limited"] = p.replace_directed_overflow
    elif path == "adder":
        bind["limited"] = p.round_limited_input if known.saturates else p.replace_overflow_of_input
    return bind


def choose_container_functions(dtype: torch.dtype, inexact: bool = False) -> dict[str, Callable]:
    """Return the device functions that convert elements of a dtype to words and back.

    `inexact` words may lie between two numbers of 16 bits and are rounded to the nearest.
    """
    found = _MEMORY_FUNCTIONS_BY_DTYPE[dtype]
    if inexact and dtype == torch.bfloat16:  # float16's codes are those of the nearest in any case
        return found | {"store": lambda address, i, w: store16(address, i, p.encode_bfloat16(w))}
    return found


CHECK_KEY = 0x0123456789ABCDEF


@cache
def make_check_elements(dtype: torch.dtype) -> torch.Tensor:
    """1,024 numbers of all magnitudes, and the special ones."""
    index = torch.arange(1024, dtype=torch.int64, device="cpu")
    words = random_words(1, index) | random_words(2, index) << 32
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, 1.5, -448.0, 464.0, 2.0**-24, 1e-45]
    if dtype == torch.float64:
        x = words.view(torch.float64)
    elif dtype == torch.float32:
        x = words.to(torch.int32).view(torch.float32)
    else:
        x = words.to(torch.int16).view(dtype)
    small = torch.linspace(-4, 4, 1001, dtype=torch.float64, device="cpu").to(dtype)
    return torch.cat([x, small, torch.tensor(special, dtype=torch.float64, device="cpu").to(dtype)])


def round_by_reference(x: torch.Tensor, target: Target, key: int, first: int = 0) -> torch.Tensor:
    """Return the result in plain torch, on any device.

    The index of an element's random bits is its position in x's logical order, counted from `first` on.
    """
    index = torch.arange(first, first + x.numel(), device=x.device, dtype=torch.int64).view(x.shape)
    words = make_target_constants(target, get_word_layout(x.dtype)).array
    return run_table_on_tensors(record_rounding_kernel(x.dtype, target), x, words, index, key, target.mode)


def run_table_on_tensors(
    table: PointerTableFunction, x: torch.Tensor, words: np.ndarray, index: torch.Tensor, key: int, mode: str
) -> torch.Tensor:
    """Return what a table that rounds gives for x, or for whole blocks, in plain torch.

    `words` are the table's constants; the int64 index, of x's shape, numbers the elements of the key's random words.
    """
    signed = words.view(np.int32 if words.itemsize == 4 else np.int64)
    given: dict[Any, Any] = {("constant", k): word for k, word in enumerate(signed.tolist())}
    if mode == "stochastic":
        given |= dict(zip(RANDOM_STREAM_INPUT_NAMES, compute_stream_counters(key, index)))
    out = torch.empty_like(x)
    run_trace_on_tensors(table.trace, [x, out], given, block=table.block_size)
    return out


class TritonPlan(NamedTuple):
    """The kernel that rounds tensors of a dtype to a target, with the target's constants and how it is checked."""

    kernel: TensorKernel
    constants: tuple[int, ...]
    name: str  # for messages
    # (Whether whole vectors are wanted, whether blocks are ragged) -> fixed elements; what plain torch makes of them.
    make_elements: Callable[[bool, bool], torch.Tensor]
    reference: Callable[[torch.Tensor], torch.Tensor]
    # Where a tensor has a scale of its own: what finds the largest of the finite blocks' largest magnitudes.
    largest_kernel: TensorKernel | None = None
    largest_constants: tuple[int, ...] = ()

    def round_tensor(self, x: torch.Tensor, key: int, out: torch.Tensor, aligned: bool) -> None:
        """Round contiguous x, whose blocks lie along its last dimension, into out, which may be x."""
        device, count, length, at = x.device, x.numel(), find_row_length(x), 0
        addresses = address(x), address(out)
        if self.largest_kernel is not None:
            # The device alone reads it, so that nothing waits.
            amax = torch.zeros(1, dtype=torch.int32, device=device)
            at = address(amax)
            self.largest_kernel.launch(device, addresses, count, self.largest_constants, 0, length, at, aligned)
        self.kernel.launch(device, addresses, count, self.constants, key, length, at, aligned)


def find_row_length(x: torch.Tensor) -> int:
    """Return the length of the rows along which blocks lie."""
    return x.shape[-1] if x.dim() else 1


def round_by_triton(plan: TritonPlan, x: torch.Tensor, key: int, out: torch.Tensor) -> bool:
    """Round contiguous x into out, which may be x; return False if there is no Triton kernel."""
    if not x.numel():
        return True
    aligned, ragged = (
        is_aligned((address(x), address(out)), x.numel()),
        plan.kernel.has_ragged_blocks(find_row_length(x)),
    )

    def run(plan: TritonPlan, device: torch.device) -> list[torch.Tensor]:
        elements = plan.make_elements(aligned, ragged)
        here, there = (copy_with_alignment(elements, device, aligned) for _ in range(2))
        plan.round_tensor(here, CHECK_KEY, there, aligned)
        return [there.cpu()]

    def reference() -> list[torch.Tensor]:
        return [plan.reference(plan.make_elements(aligned, ragged))]

    key_of_use = plan.kernel, aligned, ragged
    if find_checked_kernel(key_of_use, plan.name, x.device, lambda: plan, run, reference) is None:
        return False
    plan.round_tensor(x, key, out, aligned)
    return True


@lru_cache(maxsize=1024)
def make_triton_plan(dtype: torch.dtype, target: Target) -> TritonPlan:
    """Return the plan of a dtype and a target."""
    kernel = make_tensor_kernel(record_rounding_kernel(dtype, target))
    constants = kernel.select_launch_constants(make_target_constants(target, get_word_layout(dtype)).array)

    def make_elements(aligned: bool, ragged: bool) -> torch.Tensor:
        elements = make_check_elements(dtype)
        return elements[: elements.numel() // VECTOR_BYTES * VECTOR_BYTES] if aligned else elements

    reference = functools.partial(round_by_reference, target=target, key=CHECK_KEY)
    return TritonPlan(kernel, constants, f"quantize of {dtype}", make_elements, reference)


make_tensor_kernel = cache(TensorKernel)


def round_into(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    """Round x into out (which may be x): contiguous tensors of one dtype and shape, or equally strided dense ones.

    Raises:
        NotImplementedError: the device does not round as the CPU does.
    """
    if x.device.type != "cpu":
        check_device_rounding(x, target, lambda elements, out: _round_by_engine(elements, target, CHECK_KEY, out))
    _round_by_engine(x, target, key, out)


def check_device_rounding(
    x: torch.Tensor, target: Hashable, round_into: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Raise NotImplementedError if the device of x rounds fixed elements of x's dtype otherwise than the CPU."""

    def round_check_elements(device: torch.device) -> list[torch.Tensor]:
        elements = make_check_elements(x.dtype).to(device)
        out = torch.empty_like(elements)
        with use_reference_in_thread():  # what is asked is whether plain torch rounds there as here
            round_into(elements, out)
        return [out.cpu()]

    require_same_bits_as_cpu(
        x.device, f"quantize of {x.dtype}", (x.dtype, target), round_check_elements, "Give x.cpu()"
    )


def _round_by_engine(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    if is_rounded_as_float64(target, x.dtype):
        wide = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        with keeping_subnormals():
            _round_by_engine(x.to(torch.float64).contiguous(), target, key, wide)
            out.copy_(wide)
    else:
        chosen = choose_rounding_engine(x)
        if chosen == "llvm":
            if x.numel():
                round_memory(prepare_rounding_plan(target, x.dtype), address(x), address(out), x.numel(), key)
        elif chosen == "reference" or not round_by_triton(make_triton_plan(x.dtype, target), x, key, out):
            out.copy_(round_by_reference(x, target, key))


def is_rounded_as_float64(target: Target, dtype: torch.dtype) -> bool:
    """Return whether tensors of a narrower dtype are rounded as float64."""
    return dtype != torch.float64 and choose_word_layout(target) is WORD64_LAYOUT


class RoundingPlan(NamedTuple):
    """A target's kernel for tensors of a dtype, checked, its constants with their address, and an element's bytes."""

    kernel: Kernel
    words_address: int
    element_size: int
    target: Target
    dtype: torch.dtype
    words: np.ndarray


# Bytes of a result from which on it fits in no cache beside its input: stored past them it takes a fifth less time.
LEAST_STREAMED_BYTES = 1 << 24


def choose_rounding_engine(x: torch.Tensor) -> str:
    """Return the engine that rounds a tensor: devices other than the CPU and CUDA have the reference alone."""
    return select_engine(x.device.type) if x.device.type in ("cpu", "cuda") else "reference"


def increment_tensor_version(out: torch.Tensor) -> None:
    """Increment a tensor's version after a kernel wrote its memory, so that autograd and optimizers notice."""
    if not out.is_inference():
        increment_version((out,))


@lru_cache(maxsize=1024)
def prepare_rounding_plan(target: Target, dtype: torch.dtype, streams: bool = False) -> RoundingPlan:
    """Return the plan of rounding tensors of a dtype by a compiled kernel; it may store past the caches."""
    words, table = (
        make_target_constants(target, get_word_layout(dtype)).array,
        record_rounding_kernel(dtype, target, streams),
    )
    kernel, at, x = _compile_kernel(table), get_array_address(words), make_check_elements(dtype)

    def fast() -> list[torch.Tensor]:
        out = torch.empty_like(x)
        number, _, table = _make_chunk_table(x.numel())
        kernel(0, number, table, at, 0, CHECK_KEY, address(x), address(out))
        return [out]

    check_bits(f"quantize of {dtype}", fast, lambda: [round_by_reference(x, target, CHECK_KEY)], table)
    return RoundingPlan(kernel, at, dtype.itemsize, target, dtype, words)


@cache
def _compile_kernel(table: PointerTableFunction) -> Kernel:
    return compile_single_row_kernel("quantize", table)


def round_memory(plan: RoundingPlan, source: int, goal: int, count: int, key: int) -> None:
    """Round so many elements from one address to another."""
    kernel, words, size, target, dtype, _ = plan
    if count * size >= LEAST_STREAMED_BYTES and goal != source and goal % STREAMING_STORE_ALIGNMENT_BYTES == 0:
        kernel = prepare_rounding_plan(target, dtype, True).kernel
    number, lengths, table = _make_chunk_table(count)
    key -= key >> 63 << 64
    if (count < MOST_SERIAL_ELEMENTS or count_kernel_threads() == 1) and not flushes_subnormals():
        kernel.run(kernel.pack(0, number, table, words, 0, key, source, goal))
    else:
        run_chunks(kernel, lengths, table, words, 0, key, source, goal)


def has_partial_overlap(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether x and out overlap partly."""
    a, b = address(x), address(out)
    return a != b and a < b + out.numel() * out.element_size() and b < a + x.numel() * x.element_size()


@lru_cache(maxsize=256)
def _make_chunk_table(numel: int) -> tuple[int, np.ndarray, int]:
    """Return the number of chunks, their lengths, a view of their table, and the table's address."""
    table = cut_into_chunks(IndexMap.whole((numel,)), 0)
    return len(table), table[:, 2], get_array_address(table)


increment_version = torch._C._increment_version  # torch.autograd.graph's, which first asks what it was given
