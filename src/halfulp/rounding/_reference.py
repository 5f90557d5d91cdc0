"""The reference of every rounding: its device function on tensors, on any device."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..kernels import run_on_tensors
from ..kernels._device_function import Recording, bound
from ..kernels._trace import Piece
from ._device_functions import rounded
from ._kernel_constants import COUNT, WORD32, WORD64, Layout, constants
from ._random_bits import random_words
from ._table import mode_pieces
from ._target import STOCHASTIC, Target


def by_reference(x: torch.Tensor, target: Target, key: int) -> torch.Tensor:
    """The result in plain torch, on any device; the random index is the position in x's logical order."""
    layout = WORD64 if x.dtype == torch.float64 else WORD32
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    bits = None
    if target.mode == STOCHASTIC:
        bits = random_words(key, torch.arange(x.numel(), device=x.device, dtype=torch.int64)).view(x.shape)
    words = round_words(to_words(wide), target, layout, bits)
    return from_words(words, wide.dtype).to(x.dtype)


def round_words(words: torch.Tensor, target: Target, layout: Layout, bits: torch.Tensor | None) -> torch.Tensor:
    """Round the words of floats.

    Args:
        words: int32 or int64 tensor of any shape, the bits of float32 or float64 numbers.
        target: what to round to.
        layout: which of the two.
        bits: for STOCHASTIC, int64 tensor of the same shape, uniform in [0, 2^32); the upper ones are used.

    Returns:
        The bits of the results, NaNs quiet.
    """
    piece, numbers = _recorded(target.mode, constants(target, layout)[:3], layout.width), _numbers(target, layout)
    drawn = 0 if bits is None else bits.to(torch.int32)
    return run_on_tensors(piece.trace, (), {**numbers, "word": words, "draw": drawn}, piece.results)[0][0]


@functools.cache
def _recorded(mode: int, kind: tuple[str, bool, bool], width: int) -> Piece:
    element = Recording(0, COUNT, f"w{width}")
    given = element.given("word", f"w{width}"), element.given("draw", "w32"), element.constants
    return Piece(element.trace, (bound(rounded, mode_pieces(mode, kind, width == 64))(*given).number,))


@functools.lru_cache(1024)
def _numbers(target: Target, layout: Layout) -> dict[tuple[str, int], int]:
    return inputs_of(constants(target, layout).words)


def inputs_of(words: np.ndarray) -> dict[tuple[str, int], int]:
    """Return constants as signed integers, by the names of a trace's inputs."""
    signed = words.view(np.int32 if words.itemsize == 4 else np.int64)
    return {("constant", k): word for k, word in enumerate(signed.tolist())}


def to_words(x: torch.Tensor) -> torch.Tensor:
    """The bits of a float32 or float64 tensor, as int32 or int64."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def from_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float32 or float64 tensor with these bits."""
    return words.view(dtype)
