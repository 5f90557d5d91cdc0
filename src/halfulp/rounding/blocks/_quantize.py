"""Rounding in blocks by the kernels of the processor, of Triton and of torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ...kernels import address, check_bits, note, run_chunks, run_on_tensors
from ...kernels._device_function import Recording, bound
from ...kernels._trace import Piece
from ...kernels.triton._launch import ready
from ...kernels.triton._tensor_kernel import TensorKernel, fixed_memory, is_aligned
from ...kernels.vector._machine_function import address_of
from ...kernels.vector._table_loop import compile_table
from .._kernels import check_device, collide, engine_for, note_write
from .._random_bits import random_words
from .._table import FIXED_KEY, from_words, inputs_of, to_words
from .._target import COUNT, STOCHASTIC, WORD32, WORD64, Layout
from . import _device_functions as b
from ._device_functions import AMAX
from ._table import (
    BlockTarget,
    Kind,
    bound_names,
    fixed_rows,
    has_wide_results,
    largest_table,
    layout_of,
    rounding_table,
    words_of,
)

_SMALLEST_NORMAL = 2.0**-126


def blocks_by_reference(x: torch.Tensor, target: BlockTarget, key: int) -> torch.Tensor:
    """Return the result on any device.

    Blocks lie along the last dimension of x, and the last one of a row may be shorter; the index of an element's random
    bits is its position in x.
    """
    if x.numel() == 0:
        return x.clone()
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    bits = None
    if target.element.mode == STOCHASTIC:
        bits = random_words(key, torch.arange(x.numel(), device=x.device, dtype=torch.int64)).view(rows.shape)
        bits = in_blocks(bits, target.block)
    layout = layout_of(x.dtype, target) or _layout(x.dtype)
    blocks = in_blocks(rows.to(torch.float64 if layout is WORD64 else torch.float32), target.block)
    result = round_blocks(blocks, target, bits).flatten(1)[:, : rows.shape[1]]
    return result.to(x.dtype).reshape(x.shape)


def in_blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Cut rows into blocks, the last of each filled up with zeros."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))


def round_blocks(blocks: torch.Tensor, target: BlockTarget, bits: torch.Tensor | None) -> torch.Tensor:
    """Round whole blocks, float32 or float64, with random bits for STOCHASTIC."""
    drawn = 0 if bits is None else bits.to(torch.int32)
    largest = blocks.abs().amax(-1)
    return _run_reference("block", blocks, largest, target, {"draw": drawn})


def scales_of_blocks(largest: torch.Tensor, target: BlockTarget) -> torch.Tensor:
    """Return the scales of all of a tensor's blocks from their largest magnitudes; NaN where that is not finite."""
    return _run_reference("scale", largest, largest, target, {})


def tensor_scale(amax: float, target: BlockTarget) -> tuple[float, float]:
    """Return the tensor's scale, and its product with the largest element, as float32 numbers."""
    if not target.tensor_scale:
        return 1.0, target.element.max
    numbers = [amax, target.element.max * target.scale.max, target.element.max]
    single = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    scale = (single[0] / single[1]).clamp(min=_SMALLEST_NORMAL)
    return float(scale), float(scale * single[2])


def _run_reference(
    what: str, x: torch.Tensor, largest: torch.Tensor, target: BlockTarget, inputs: dict
) -> torch.Tensor:
    layout = _layout(x.dtype)
    amax = float(torch.where(largest.isfinite(), largest, 0).max()) if target.tensor_scale else 0.0
    numbers = inputs_of(words_of(target, layout, *tensor_scale(amax, target)))
    piece = _record_block_function(what, Kind.of(x.dtype, target, layout), layout.width)
    given = {**numbers, **inputs, "word": to_words(x.contiguous())}
    block = target.block if what == "block" else None
    return from_words(run_on_tensors(piece.trace, (), given, piece.results, block)[0][0], x.dtype)


def _layout(dtype: torch.dtype) -> Layout:
    return WORD64 if dtype == torch.float64 else WORD32


@cache
def _record_block_function(what: str, kind: Kind, width: int) -> Piece:
    """Return the device function that rounds an element of a block, or makes a scale of a block's largest magnitude."""
    element = Recording(0, 2 * COUNT + b.WORDS, f"w{width}")
    word, words, names = element.given("word", f"w{width}"), element.constants, bound_names(kind, width == 64)
    c, d, of_block = words[:COUNT], words[COUNT : 2 * COUNT], words[2 * COUNT :]
    if what == "block":
        made = bound(b.block_element, names)(word, element.given("draw", "w32"), c, d, of_block)
    else:
        made = bound(b.block_scale, names)(word, c, d, of_block)
    return Piece(element.trace, (made.number,))


class Plan(NamedTuple):
    """The kernels that round tensors of a dtype to a target, each with the target's constants.

    Where the tensor has a scale of its own, `measure` finds the largest of the finite blocks' largest magnitudes.
    `kind` tells kernels apart, which differ in the choice of the scale too where it is a constant.
    """

    kernel: TensorKernel
    constants: tuple[int, ...]
    measure: TensorKernel | None
    measured: tuple[int, ...]
    kind: tuple[torch.dtype, Kind, int]
    name: str


def round_blocks_by_triton(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> bool:
    """Round contiguous x into out, which may be x; return False if there is no Triton kernel."""
    plan, device = plan_for(x.dtype, target, layout), x.device
    aligned, ragged = is_aligned((address(x), address(out)), x.numel()), plan.kernel.is_ragged(_length(x))
    found = ready(
        ("quantize in blocks", *plan.kind, aligned, ragged),
        plan.name,
        device,
        lambda: plan,
        lambda plan, device: [_fixed_by_triton(plan, device, aligned, ragged)],
        lambda: [blocks_by_reference(_fixed_plan(plan, ragged), target, FIXED_KEY)],
    )
    if found is None:
        return False
    _round(plan, x, key, out, aligned)
    return True


@lru_cache(maxsize=1024)
def plan_for(dtype: torch.dtype, target: BlockTarget, layout: Layout) -> Plan:
    """Return the plan of a dtype and a target, in words of a layout."""
    words = words_of(target, layout, 1.0, target.element.max)
    kind = Kind.of(dtype, target, layout)._replace(under_amax=target.tensor_scale)
    kernel, measure = triton_kernel(dtype, kind), triton_measure(dtype, kind) if target.tensor_scale else None
    measured = () if measure is None else measure.arguments(words)
    told, name = (dtype, kind, target.choice), f"quantize in blocks of {dtype}"
    return Plan(kernel, kernel.arguments(words), measure, measured, told, name)


@cache
def triton_kernel(dtype: torch.dtype, kind: Kind) -> TensorKernel:
    """Return the kernel that rounds; the largest magnitude on which a tensor's scale depends lies in memory."""
    return TensorKernel(rounding_table(dtype, kind), (2 * COUNT + AMAX,) if kind.under_amax else ())


@cache
def triton_measure(dtype: torch.dtype, kind: Kind) -> TensorKernel:
    """Return the kernel that finds the largest of the finite blocks' largest magnitudes."""
    return TensorKernel(largest_table(dtype, kind))


def _round(plan: Plan, x: torch.Tensor, key: int, out: torch.Tensor, aligned: bool) -> None:
    device, count, length, at = x.device, x.numel(), _length(x), 0
    addresses = address(x), address(out)
    if plan.measure is not None:
        # The device alone reads it, so that nothing waits.
        amax = torch.zeros(1, dtype=torch.int32, device=device)
        at = address(amax)
        plan.measure.launch(device, addresses, count, plan.measured, (0,), length=length, memory=at, aligned=aligned)
    plan.kernel.launch(device, addresses, count, plan.constants, (key,), length=length, memory=at, aligned=aligned)


def _length(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _fixed_plan(plan: Plan, ragged: bool) -> torch.Tensor:
    dtype, kind = plan.kind[:2]
    return fixed_rows(dtype, 3 * kind.block + 1 if ragged else 16 * kind.block)


def _fixed_by_triton(plan: Plan, device: torch.device, aligned: bool, ragged: bool) -> torch.Tensor:
    rows = _fixed_plan(plan, ragged)
    here, there = (fixed_memory(rows, device, aligned) for _ in range(2))
    _round(plan, here, FIXED_KEY, there, aligned)
    return there.cpu()


GROUP = 16_384
# Kernels hold a block on the stack, of which threads may have no more than 512 KiB, or in a program's registers.
_MOST_BLOCK = 4096


def round_blocks_into(x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor) -> None:
    """Round x, whose blocks lie along its last dimension, into out, which may be x.

    Raises:
        NotImplementedError: the device does not round as the CPU does.
    """
    if x.numel() == 0:
        return
    if x.device.type != "cpu":
        check_device(x, target, lambda elements, rounded: _round_into(elements, target, FIXED_KEY, rounded))
    _round_into(x, target, key, out)
    note_write(out)


def _round_into(x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor) -> None:
    layout, engine = layout_of(x.dtype, target), engine_for(x)
    if engine == "reference" or layout is None or target.block > _MOST_BLOCK:
        if target.block > _MOST_BLOCK:
            note("blocks", f"blocks of more than {_MOST_BLOCK} elements are rounded by the reference")
        elif layout is None:
            note("blocks", f"{x.dtype} with scales that are not powers of two is rounded by the reference")
        out.copy_(blocks_by_reference(x, target, key))
        return
    # The processor's kernels store 16-bit numbers without rounding.
    single = engine == "llvm" and layout is WORD32 and has_wide_results(target)
    work = torch.float64 if layout is WORD64 else torch.float32 if single else x.dtype
    source = x.to(work).contiguous()
    direct = work == x.dtype and out.is_contiguous() and not collide(source, out)
    # A Triton program has read all of its blocks before it writes one.
    result = out if direct and (engine == "triton" or address(source) != address(out)) else torch.empty_like(source)
    if engine == "llvm":
        _run(source, target, layout, key, result)
    elif not round_blocks_by_triton(source, target, layout, key, result):
        out.copy_(blocks_by_reference(x, target, key))
        return
    if result is not out:
        out.copy_(result)


def _run(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> None:
    kind = Kind.of(x.dtype, target, layout)
    kernel, measure = _compile_kernels(x.dtype, kind)
    _check(kernel, measure, x.dtype, target, layout, kind)
    _call(kernel, measure, x, target, layout, key, out)


@cache
def _compile_kernels(dtype: torch.dtype, kind: Kind) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """Return the kernel that rounds, and one that finds the largest magnitude of all blocks, where needed."""
    kernel = compile_table("quantize_blocks", rounding_table(dtype, kind))
    return kernel, None if kind.powers else compile_table("largest_blocks", largest_table(dtype, kind))


def _call(kernel, measure, x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> None:
    length = x.shape[-1] if x.dim() else 1
    table, sizes = _groups(x.numel() // length, length, target.block)
    numbers = array("Q", (address(x), address(out), key, 0))
    pointers = numbers.buffer_info()[0]
    given = (address_of(table), pointers, pointers + 24)
    words = words_of(target, layout, 1.0, target.element.max)
    if measure is not None:
        found = np.zeros((len(table), 4))
        run_chunks(measure, sizes, *given, address_of(words), pointers + 16, address_of(found), 0)
        words = words_of(target, layout, *tensor_scale(float(found[:, 0].max()), target))
    run_chunks(kernel, sizes, *given, address_of(words), pointers + 16, 0, 0)


@lru_cache(maxsize=64)
def _groups(rows: int, length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows into chunks of whole blocks, of which the last may be incomplete; return chunks and lengths."""
    if length % block == 0:
        rows, length = 1, rows * length
    step = max(1, GROUP // block) * block
    starts = np.arange(0, length, step, dtype=np.int64)
    sizes = np.minimum(starts + step, length) - starts
    begin = (starts + np.arange(rows, dtype=np.int64)[:, None] * length).reshape(-1)
    lengths = np.tile(sizes, rows)
    return np.stack([np.zeros_like(begin), begin, lengths, begin], 1), lengths


_checked: set[Hashable] = set()


def _check(kernel, measure, dtype: torch.dtype, target: BlockTarget, layout: Layout, kind: Kind) -> None:
    """Run the canary, with and without an incomplete block."""
    if (dtype, kind, target.choice) in _checked:
        return
    rows = fixed_rows(dtype, 3 * target.block + 1)

    def fast() -> list[torch.Tensor]:
        out = torch.empty_like(rows)
        _call(kernel, measure, rows, target, layout, FIXED_KEY, out)
        return [out]

    check_bits(f"quantize in blocks ({dtype})", fast, lambda: [blocks_by_reference(rows, target, FIXED_KEY)])
    _checked.add((dtype, kind, target.choice))
