"""Rounding in blocks: MX, NVFP4, and any elements that share a scale."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import cache, lru_cache

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, check_bits, define_operator, note, run_chunks
from ...kernels.vector._machine_function import address_of
from ...kernels.vector._table_loop import compile_table
from .._graph_constants import traced_block_target
from .._kernel_constants import WORD32, WORD64, Layout
from .._kernels import check_device, collide, engine_for, note_write
from .._modes import Rounding, Stochastic, drawn_key
from .._random_bits import mix64
from .._table import FIXED_KEY
from .._target import STOCHASTIC
from ._reference import blocks_by_reference, tensor_scale
from ._table import Kind, fixed_rows, has_wide_results, largest_table, layout_of, rounding_table, words_of
from ._target import BlockTarget, make_block_target
from ._triton_kernels import round_blocks_by_triton

GROUP = 16_384
# Kernels hold a block on the stack, of which threads may have no more than 512 KiB, or in a program's registers.
_MOST_BLOCK = 4096


def quantize_block_format(
    x: torch.Tensor,
    format: BlockFormat,
    rounding: Rounding,
    overflow: str | None,
    dim: int,
    counter: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`quantize` for a block format; x is detached, and x and out have been checked."""
    flat = block_target_for(format, rounding, overflow, x.dtype).flat()
    if x.dim() and not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is from {-x.dim()} to {x.dim() - 1} for a tensor of shape {tuple(x.shape)}, got {dim}")
    moved = x.movedim(dim, -1) if x.dim() > 1 else x
    drawing = isinstance(rounding, Stochastic) and rounding.seed is None
    seed = rounding.signed_seed if isinstance(rounding, Stochastic) else 0
    if out is not None:
        into = out.movedim(dim, -1) if x.dim() > 1 else out
        if drawing:
            _blocks_drawing_into(moved, flat, counter, into)
        else:
            _blocks_into(moved, flat, seed, counter, into)
        return out
    result = _blocks_drawing(moved, flat, counter) if drawing else _blocks(moved, flat, seed, counter)
    return result.movedim(-1, dim) if x.dim() > 1 else result


def block_target_for(format: BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> BlockTarget:
    """`make_block_target`, of constants where a compiler traces."""
    make = traced_block_target if torch.compiler.is_compiling() else make_block_target
    return make(format, rounding, overflow, dtype)


def _new(x: torch.Tensor, flat: list[int], seed: int, counter: int) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _into(x, flat, seed, counter, out)
    return out


def _into(x: torch.Tensor, flat: list[int], seed: int, counter: int, out: torch.Tensor) -> None:
    target = BlockTarget.of(flat)
    key = mix64(seed, counter) if target.element.mode == STOCHASTIC else 0
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
    kernel, measure = _compiled(x.dtype, kind)
    _check(kernel, measure, x.dtype, target, layout, kind)
    _call(kernel, measure, x, target, layout, key, out)


@cache
def _compiled(dtype: torch.dtype, kind: Kind) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """The kernel that rounds, and that which finds the largest of the blocks' largest magnitudes where it is needed."""
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
    """Rows cut into chunks of whole blocks, of which the last may be incomplete, and the chunks' lengths."""
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


def _new_drawing(x: torch.Tensor, flat: list[int], counter: int) -> torch.Tensor:
    return _new(x, flat, drawn_key(), counter)


def _into_drawing(x: torch.Tensor, flat: list[int], counter: int, out: torch.Tensor) -> None:
    _into(x, flat, drawn_key(), counter, out)


def _like(x: torch.Tensor, *arguments) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _nothing(*arguments) -> None:
    return None


_blocks = define_operator("quantize_blocks(Tensor x, int[] target, int seed, SymInt counter) -> Tensor", _new, _like)
_blocks_into = define_operator(
    "quantize_blocks_into(Tensor x, int[] target, int seed, SymInt counter, Tensor(a!) out) -> ()", _into, _nothing
)
_blocks_drawing = define_operator(
    "quantize_blocks_drawing(Tensor x, int[] target, SymInt counter) -> Tensor", _new_drawing, _like, random=True
)
_blocks_drawing_into = define_operator(
    "quantize_blocks_drawing_into(Tensor x, int[] target, SymInt counter, Tensor(a!) out) -> ()",
    _into_drawing,
    _nothing,
    random=True,
)
