"""Rounding in blocks: MX, NVFP4, and any elements that share a scale."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import cache, lru_cache

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels import address, check_bits, define_operator, note, run_chunks
from ...kernels._device_function import Recording, bound
from ...kernels.vector._machine_function import address_of
from ...kernels.vector._table_loop import Table, compile_table
from .._graph_constants import traced_block_target
from .._kernel_constants import COUNT, WORD32, WORD64, Layout, constants, layout_for
from .._kernels import FIXED_KEY, check_device, collide, container_pieces, fixed_elements, mode_pieces, on_cpu_kernels
from .._modes import Rounding, Stochastic, drawn_key
from .._random_bits import WEYL, draw, mix64, recorded_start
from .._target import DOWN, STOCHASTIC, UP
from . import _device_functions as b
from ._reference import blocks_by_reference, tensor_scale
from ._target import CLOSEST, BlockTarget, make_block_target, scale_threshold

GROUP = 16_384
# Kernels hold a block on the stack, of which threads may have no more than 512 KiB.
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


def _round_into(x: torch.Tensor, target: BlockTarget, key: int, out: torch.Tensor) -> None:
    layout = _layout(x.dtype, target)
    if not on_cpu_kernels(x) or layout is None or target.block > _MOST_BLOCK:
        if target.block > _MOST_BLOCK:
            note("blocks", f"blocks of more than {_MOST_BLOCK} elements are rounded by the reference")
        elif layout is None:
            note("blocks", f"{x.dtype} with scales that are not powers of two is rounded by the reference")
        out.copy_(blocks_by_reference(x, target, key))
        return
    # Products, and what a largest element scaled down makes of a larger one, may lie between two 16-bit numbers.
    single = layout is WORD32 and (not target.powers or target.choice == CLOSEST)
    work = torch.float64 if layout is WORD64 else torch.float32 if single else x.dtype
    source = x.to(work).contiguous()
    direct = work == x.dtype and out.is_contiguous() and not collide(source, out) and address(source) != address(out)
    result = out if direct else torch.empty_like(source)
    _run(source, target, layout, key, result)
    if not direct:
        out.copy_(result)


def _layout(dtype: torch.dtype, target: BlockTarget) -> Layout | None:
    """The words in which blocks are rounded; None where only the reference does it."""
    narrow = layout_for(target.element) is WORD32 and dtype != torch.float64
    if not target.powers:
        fits = layout_for(target.scale) is WORD32 and target.scale.tiny_exponent >= -126
        return WORD32 if narrow and fits else None
    first, _ = scale_threshold(target, 0)
    return WORD32 if narrow and first >= 2 and target.scale.emin >= -127 else WORD64


def _run(x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> None:
    kernel, measure = _kernels(x.dtype, target, layout)
    _check(kernel, measure, x.dtype, target, layout)
    _call(kernel, measure, x, target, layout, key, out)


def _call(kernel, measure, x: torch.Tensor, target: BlockTarget, layout: Layout, key: int, out: torch.Tensor) -> None:
    length = x.shape[-1] if x.dim() else 1
    table, sizes = _groups(x.numel() // length, length, target.block)
    of_scale = constants(target.scale, WORD32 if not target.powers else layout).words
    tensor, unit = 1.0, target.element.max
    numbers = array("Q", (address(x), address(out), key, 0))
    pointers = numbers.buffer_info()[0]
    given = (address_of(table), pointers, pointers + 24)
    of_element, of_block = constants(target.element, layout).words, _block_words(target, layout, tensor, unit)
    words = np.concatenate([of_element, of_scale, of_block])
    if measure is not None:
        found = np.zeros((len(table), 4))
        run_chunks(measure, sizes, *given, address_of(words), pointers + 16, address_of(found), 0)
        tensor, unit = tensor_scale(float(found[:, 0].max()), target)
        words[2 * COUNT :] = _block_words(target, layout, tensor, unit)
    run_chunks(kernel, sizes, *given, address_of(words), pointers + 16, 0, 0)


def _block_words(target: BlockTarget, layout: Layout, tensor: float, unit: float) -> np.ndarray:
    words = dict.fromkeys(range(b.WORDS), 0)
    if target.powers:
        first, second = scale_threshold(target, layout.mantissa)
        highest = int(np.frexp(target.scale.max)[1]) - 1
        words |= {b.FIRST: first % (1 << layout.width), b.SECOND: second, b.TWICE_BIAS: 2 * layout.bias}
        words[b.SMALLEST] = max(0, target.scale.tiny_exponent + layout.bias)
        words[b.GREATEST] = min(highest + layout.bias, 2 * layout.bias - 1)
        words[b.BELOW_NORMAL] = layout.power(-layout.bias)
    else:
        words |= {b.UNIT: layout.word(unit), b.TENSOR: layout.word(tensor)}
    return np.array([words[i] for i in range(b.WORDS)], np.uint32 if layout.width == 32 else np.uint64)


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


def _kernels(dtype: torch.dtype, target: BlockTarget, layout: Layout):
    kind = constants(target.element, layout)[:3]
    return _compiled(dtype, target.element.mode, kind, target.block, target.powers, target.choice == CLOSEST)


@cache
def _compiled(
    dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool], block: int, powers: bool, closest: bool
) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """The kernel that rounds, and that which finds the largest of the blocks' largest magnitudes where it is needed."""
    names: dict[str, object] = {**mode_pieces(mode, kind, dtype == torch.float64)}
    kept = mode in (UP, DOWN)
    if powers:
        names |= {"scale_of": b.exponent_of_scale, "factor_of": b.power, "inverse_of": b.inverse_power}
        names |= {"payload": b.multiplied_kept if kept else b.multiplied}
    else:
        names |= {"scale_of": b.product_of_scale, "factor_of": b.itself, "inverse_of": b.itself}
        names |= {"payload": b.divided_kept if kept else b.divided}
        names["scale_addend"] = b.nearest_scale if closest else b.raised_scale
    kernel = compile_table("quantize_blocks", _table(dtype, block, names, rounds=True))
    return kernel, None if powers else compile_table("largest_blocks", _table(dtype, block, names, rounds=False))


def _table(dtype: torch.dtype, block: int, names: dict[str, object], rounds: bool) -> Table:
    """A table whose columns are what is rounded and where it goes."""
    pieces, kind = container_pieces(dtype), "w64" if dtype == torch.float64 else "w32"
    element = Recording(2, 2 * COUNT + b.WORDS, kind, counters=int(rounds))
    i, (source, target), words = element.index, element.arrays, element.constants
    c, d, of_block = words[:COUNT], words[COUNT : 2 * COUNT], words[2 * COUNT :]
    w = pieces["load"](source, i)
    if rounds:
        random = draw(element.counters[0])
        pieces["store"](target, i, bound(b.block_element, names)(w, random, c, d, of_block))
    else:
        element.trace.gather_sum("max", bound(b.finite_largest, names)(w, c))
    return Table(element.trace, 2, len(words), 1, recorded_start(), int(WEYL), block, partial=True)


_checked: set[Hashable] = set()


def _check(kernel, measure, dtype: torch.dtype, target: BlockTarget, layout: Layout) -> None:
    """Run the canary, with and without an incomplete block."""
    key = dtype, target.element.mode, constants(target.element, layout)[:3], target.block, target.powers, target.choice
    if key in _checked:
        return
    x = fixed_elements(dtype)
    size = 3 * target.block + 1
    x = x.repeat(-(-size // x.numel()))
    rows = x[: x.numel() // size * size].view(-1, size)

    def fast() -> list[torch.Tensor]:
        out = torch.empty_like(rows)
        _call(kernel, measure, rows, target, layout, FIXED_KEY, out)
        return [out]

    check_bits(f"quantize in blocks ({dtype})", fast, lambda: [blocks_by_reference(rows, target, FIXED_KEY)])
    _checked.add(key)


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
