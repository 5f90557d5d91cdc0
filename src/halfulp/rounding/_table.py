"""An element's rounding bound from its device functions: as a table's loop, and on tensors, the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from ..kernels import run_on_tensors
from ..kernels._device_function import Recording, bound
from ..kernels._table import Table
from ..kernels._trace import Piece
from ..kernels.scalar._operations import load32, load64, store32, store64
from . import _device_functions as p
from ._device_functions import rounded
from ._modes import own_mode
from ._random_bits import WEYL, draw, random_words, recorded_start
from ._target import COUNT, DOWN, NEAREST, STOCHASTIC, TOWARD_ZERO, UP, WORD32, WORD64, Layout, Target, constants

_MODES: dict[int, dict[str, Callable]] = {
    NEAREST: {"addend": p.half_addend, "reaches_smallest": p.half_reaches_smallest, "limited": p.limited_outward},
    STOCHASTIC: {
        "addend": p.random_addend,
        "reaches_smallest": p.randomly_reaches_smallest,
        "limited": p.limited_outward,
    },
    UP: {"outward": p.positive},
    DOWN: {"outward": p.negative},
}
_TOWARD_ZERO: dict[str, Callable] = {
    "addend": p.no_addend,
    "reaches_smallest": p.never_reaches_smallest,
    "outward": p.never,
    "limited": p.limited_directed,
}
_DIRECTED: dict[str, Callable] = {
    "addend": p.away_addend,
    "reaches_smallest": p.away_reaches_smallest,
    "limited": p.limited_directed,
}
_OWN: dict[str, Callable] = {
    "addend": p.chosen_addend,
    "reaches_smallest": p.chosen_reaches_smallest,
    "limited": p.limited_outward,
}
_PATHS = {"fixed": p.fixed, "adder": p.adder, "scaled": p.scaled, "packed": p.packed}
_CONTAINERS: dict[torch.dtype, dict[str, Callable]] = {
    torch.float32: {"load": load32, "store": store32},
    torch.float64: {"load": load64, "store": store64},
    torch.bfloat16: {"load": p.load_bfloat16, "store": p.store_bfloat16},
    torch.float16: {"load": p.load_float16, "store": p.store_float16},
}


@cache
def rounding_table(dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool], streams: bool = False) -> Table:
    """Return the table whose columns are what is rounded and where it goes: in place too, unless it streams."""
    width = 64 if dtype == torch.float64 else 32
    element, pieces = Recording(2, COUNT, f"w{width}"), container_pieces(dtype)
    i, (source, target) = element.index, element.arrays
    rounded = bound(p.rounded, mode_pieces(mode, kind, width == 64))
    pieces["store"](target, i, rounded(pieces["load"](source, i), draw(*element.stream), element.constants))
    return Table(element.trace, 2, COUNT, recorded_start(), int(WEYL), streams=streams)


def mode_pieces(mode: int, kind: tuple[str, bool, bool], wide: bool) -> dict[str, Callable]:
    """Return the functions bound to the free names of `rounded`, for a mode and a kind of `Constants`."""
    path, plain, saturating = kind
    own = own_mode(mode)
    bind: dict[str, Callable] = {
        # A partial function: names of its module are not those that are bound here.
        **({} if own is None else _OWN | {"goes_away": functools.partial(own.goes_away)}),
        **(_DIRECTED if mode in (UP, DOWN) else _TOWARD_ZERO if mode == TOWARD_ZERO else {}),
        **_MODES.get(mode, {}),
        **(p.WIDE if wide else {}),
        "magnitude": _PATHS[path],
        "aligned": p.aligned64 if wide else p.aligned32,
        "fraction": p.fraction64 if wide else p.fraction32,
        "has_residue": p.has_residue64 if wide else p.has_residue32,
        "signed": p.signed_plain if plain else p.signed_special,
    }
    if mode == NEAREST and path == "fixed":
        bind["addend"] = p.half_addend_fixed
    if (mode in (NEAREST, STOCHASTIC) or own is not None) and saturating:
        bind["limited"] = p.saturated
    if path == "adder" and saturating:
        bind |= {"magnitude": p.saturating_adder, "limited": p.unlimited}
    elif path == "adder":
        bind["limited"] = p.limited_by_input
    return bind


def container_pieces(dtype: torch.dtype, inexact: bool = False) -> dict[str, Callable]:
    """Return the device functions that convert elements of a dtype to words and back.

    `inexact` words may lie between two numbers of 16 bits and are rounded to the nearest.
    """
    rounds = inexact and dtype == torch.bfloat16  # float16's codes are those of the nearest in any case
    return _CONTAINERS[dtype] | ({"store": p.round_to_bfloat16} if rounds else {})


FIXED_KEY = 0x0123456789ABCDEF


@cache
def fixed_elements(dtype: torch.dtype) -> torch.Tensor:
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


def by_reference(x: torch.Tensor, target: Target, key: int) -> torch.Tensor:
    """Return the result in plain torch, on any device; the random index is the position in x's logical order."""
    layout = WORD64 if x.dtype == torch.float64 else WORD32
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    bits = None
    if target.mode == STOCHASTIC:
        bits = random_words(key, torch.arange(x.numel(), device=x.device, dtype=torch.int64)).view(x.shape)
    words = round_words(to_words(wide), target, layout, bits)
    return from_words(words, wide.dtype).to(x.dtype)


def round_words(words: torch.Tensor, target: Target, layout: Layout, bits: torch.Tensor | None) -> torch.Tensor:
    """Round words, the bits of float32 (int32 tensors) or float64 numbers (int64), as the layout says; NaNs are quiet.

    For STOCHASTIC, `bits` are an int64 tensor of the same shape, uniform in [0, 2^32); the upper ones are used.
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
    """Return the bits of a float32 or float64 tensor, as int32 or int64."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def from_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 or float64 tensor with these bits."""
    return words.view(dtype)
