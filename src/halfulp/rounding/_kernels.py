"""Compiled rounding: a target's device functions, compiled once each, checked against the reference, run in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import cache, lru_cache

import numpy as np
import torch

from ..kernels import IndexMap, address, check_bits, chunks, require_same_bits, run_chunks, select_engine
from ..kernels._device_function import Recording, bound
from ..kernels.scalar._operations import load32, load64, store32, store64
from ..kernels.vector._machine_function import address_of
from ..kernels.vector._table_loop import Table, compile_table
from . import _device_functions as p
from ._kernel_constants import COUNT, WORD32, WORD64, Layout, constants, layout_for
from ._random_bits import WEYL, draw, random_words, recorded_start
from ._reference import from_words, round_words, to_words
from ._target import DOWN, NEAREST, STOCHASTIC, UP, Target

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
_PATHS = {"fixed": p.fixed, "adder": p.adder, "scaled": p.scaled, "packed": p.packed}
_CONTAINERS: dict[torch.dtype, dict[str, Callable]] = {
    torch.float32: {"load": load32, "store": store32},
    torch.float64: {"load": load64, "store": store64},
    torch.bfloat16: {"load": p.load_bfloat16, "store": p.store_bfloat16},
    torch.float16: {"load": p.load_float16, "store": p.store_float16},
}


def run(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    """Round x into out (which may be x): contiguous tensors of one dtype and shape, or equally strided dense ones.

    Raises:
        NotImplementedError: the device does not round as the CPU does.
    """
    if x.device.type != "cpu":
        check_device(x, target, lambda elements, out: _run(elements, target, FIXED_KEY, out))
    _run(x, target, key, out)


def check_device(x: torch.Tensor, target: Hashable, round_into: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Raise NotImplementedError if the device of x rounds fixed elements of x's dtype otherwise than the CPU."""

    def rounded(device: torch.device) -> list[torch.Tensor]:
        elements = fixed_elements(x.dtype).to(device)
        out = torch.empty_like(elements)
        round_into(elements, out)
        return [out.cpu()]

    require_same_bits(x.device, f"quantize of {x.dtype}", (x.dtype, target), rounded, "Give x.cpu()")


def _run(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    if x.dtype != torch.float64 and layout_for(target) is WORD64:
        wide = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        _run(x.to(torch.float64).contiguous(), target, key, wide)
        out.copy_(wide)
    elif on_cpu_kernels(x):
        _run_compiled(x, target, key, out)
    else:
        out.copy_(by_reference(x, target, key))


def on_cpu_kernels(x: torch.Tensor) -> bool:
    """Whether compiled kernels run; devices other than the CPU run the reference."""
    return x.device.type == "cpu" and select_engine("cpu") == "numba"


def by_reference(x: torch.Tensor, target: Target, key: int) -> torch.Tensor:
    """The result in plain torch, on any device; the random index is the position in x's logical order."""
    layout = WORD64 if x.dtype == torch.float64 else WORD32
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    bits = None
    if target.mode == STOCHASTIC:
        bits = random_words(key, torch.arange(x.numel(), device=x.device, dtype=torch.int64)).view(x.shape)
    words = round_words(to_words(wide.contiguous()), target, layout, bits)
    return from_words(words, wide.dtype).to(x.dtype)


def _run_compiled(x: torch.Tensor, target: Target, key: int, out: torch.Tensor) -> None:
    if x.numel() == 0:
        return
    layout = WORD64 if x.dtype == torch.float64 else WORD32
    known = constants(target, layout)
    kernel = _kernel(x.dtype, target.mode, known[:3])
    check_kernel(kernel, x.dtype, target, known[:3])
    _call(kernel, x, target, layout, key, out)


def _call(kernel, x: torch.Tensor, target: Target, layout: Layout, key: int, out: torch.Tensor) -> None:
    lengths, chunk_table = _table(x.numel())
    known = constants(target, layout)
    numbers = array("Q", (address(x), address(out), key, 0))
    pointers = numbers.buffer_info()[0]
    words = address_of(known.words)
    run_chunks(kernel, lengths, chunk_table, pointers, pointers + 24, words, pointers + 16, 0, 0)


def collide(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether x and out overlap partly."""
    a, b = address(x), address(out)
    return a != b and a < b + out.numel() * out.element_size() and b < a + x.numel() * x.element_size()


@lru_cache(maxsize=256)
def _table(numel: int) -> tuple[np.ndarray, int]:
    """Return the lengths of the chunks, a view of their table, and the table's address."""
    table = chunks(IndexMap.whole((numel,)), 0)
    return table[:, 2], address_of(table)


@cache
def _kernel(dtype: torch.dtype, mode: int, kind: tuple[str, bool, bool]) -> Callable:
    """The kernel of a table whose columns are what is rounded and where it goes, which may be one place."""
    width = 64 if dtype == torch.float64 else 32
    element, pieces = Recording(2, COUNT, f"w{width}", counters=1), container_pieces(dtype)
    i, (source, target) = element.index, element.arrays
    rounded = bound(p.rounded, mode_pieces(mode, kind, width == 64))
    pieces["store"](target, i, rounded(pieces["load"](source, i), draw(element.counters[0]), element.constants))
    return compile_table(f"quantize_{kind[0]}", Table(element.trace, 2, COUNT, 1, recorded_start(), int(WEYL)))


def mode_pieces(mode: int, kind: tuple[str, bool, bool], wide: bool) -> dict[str, Callable]:
    """Return what binds the free names of `rounded`; kind is the path, plainness and saturation of `Constants`."""
    path, plain, saturating = kind
    bind: dict[str, Callable] = {
        **(_DIRECTED if mode in (UP, DOWN) else _TOWARD_ZERO if mode not in _MODES else {}),
        **_MODES.get(mode, {}),
        **(p.WIDE if wide else {}),
        "magnitude": _PATHS[path],
        "aligned": p.aligned64 if wide else p.aligned32,
        "fraction": p.fraction64 if wide else p.fraction32,
        "signed": p.signed_plain if plain else p.signed_special,
    }
    if mode == NEAREST and path == "fixed":
        bind["addend"] = p.half_addend_fixed
    if mode in (NEAREST, STOCHASTIC) and saturating:
        bind["limited"] = p.saturated
    if path == "adder":
        bind["limited"] = p.limited_by_input
    return bind


def container_pieces(dtype: torch.dtype) -> dict[str, Callable]:
    """Return the device functions that convert elements of a dtype to words and back."""
    return _CONTAINERS[dtype]


_checked: set = set()
FIXED_KEY = 0x0123456789ABCDEF


def check_kernel(kernel, dtype: torch.dtype, target: Target, kind: tuple[str, bool, bool]) -> None:
    """The canary: once per compiled kernel, its bits on fixed elements are the reference's."""
    if (dtype, target.mode, kind) in _checked:
        return
    x = fixed_elements(dtype)
    layout = WORD64 if dtype == torch.float64 else WORD32

    def fast() -> list[torch.Tensor]:
        out = torch.empty_like(x)
        _call(kernel, x, target, layout, FIXED_KEY, out)
        return [out]

    check_bits(f"quantize ({dtype}, {kind[0]})", fast, lambda: [by_reference(x, target, FIXED_KEY)])
    _checked.add((dtype, target.mode, kind))


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
