"""The reference of rounding in blocks: its device function on tensors, on any device."""

from __future__ import annotations

from functools import cache

import torch

from ...kernels import run_on_tensors
from ...kernels._device_function import Recording, bound
from ...kernels._trace import Piece
from .._kernel_constants import COUNT, WORD32, WORD64, Layout
from .._random_bits import random_words
from .._reference import from_words, inputs_of, to_words
from .._target import STOCHASTIC
from . import _device_functions as b
from ._table import Kind, bound_names, layout_of, words_of
from ._target import BlockTarget

_SMALLEST_NORMAL = 2.0**-126


def blocks_by_reference(x: torch.Tensor, target: BlockTarget, key: int) -> torch.Tensor:
    """The result on any device.

    Args:
        x: tensor of any shape; blocks lie along its last dimension, and the last one of a row may be shorter.
        target: what to round to.
        key: of the random bits; an element's index is its position in x.
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
    return _run("block", blocks, largest, target, {"draw": drawn})


def scales_of_blocks(largest: torch.Tensor, target: BlockTarget) -> torch.Tensor:
    """Return the scales of all of a tensor's blocks from their largest magnitudes; NaN where that is not finite."""
    return _run("scale", largest, largest, target, {})


def tensor_scale(amax: float, target: BlockTarget) -> tuple[float, float]:
    """The tensor's scale, and its product with the largest element, as float32 numbers."""
    if not target.tensor_scale:
        return 1.0, target.element.max
    numbers = [amax, target.element.max * target.scale.max, target.element.max]
    single = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    scale = (single[0] / single[1]).clamp(min=_SMALLEST_NORMAL)
    return float(scale), float(scale * single[2])


def _run(what: str, x: torch.Tensor, largest: torch.Tensor, target: BlockTarget, inputs: dict) -> torch.Tensor:
    layout = _layout(x.dtype)
    amax = float(torch.where(largest.isfinite(), largest, 0).max()) if target.tensor_scale else 0.0
    numbers = inputs_of(words_of(target, layout, *tensor_scale(amax, target)))
    piece = _recorded(what, Kind.of(x.dtype, target, layout), layout.width)
    given = {**numbers, **inputs, "word": to_words(x.contiguous())}
    block = target.block if what == "block" else None
    return from_words(run_on_tensors(piece.trace, (), given, piece.results, block)[0][0], x.dtype)


def _layout(dtype: torch.dtype) -> Layout:
    return WORD64 if dtype == torch.float64 else WORD32


@cache
def _recorded(what: str, kind: Kind, width: int) -> Piece:
    """Return the device function that rounds an element of a block, or makes a scale of a block's largest magnitude."""
    element = Recording(0, 2 * COUNT + b.WORDS, f"w{width}")
    word, words, names = element.given("word", f"w{width}"), element.constants, bound_names(kind, width == 64)
    c, d, of_block = words[:COUNT], words[COUNT : 2 * COUNT], words[2 * COUNT :]
    if what == "block":
        made = bound(b.block_element, names)(word, element.given("draw", "w32"), c, d, of_block)
    else:
        made = bound(b.block_scale, names)(word, c, d, of_block)
    return Piece(element.trace, (made.number,))
