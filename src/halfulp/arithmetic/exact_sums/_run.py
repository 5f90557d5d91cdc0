"""Running an exact sum: terms into windows of integers, these into words with their carries passed on, or a float."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import (
    address,
    address_of,
    check_bits,
    chunks,
    IndexMap,
    plain,
    require_float64,
    run_chunks,
    run_on_tensors,
    select_engine,
)
from ...kernels._trace import COPIES
from ...kernels.triton._launch import ready
from ...kernels.triton._table_kernel import TableKernel
from ...kernels.vector._table_loop import Table, compile_table
from ._accumulator import LAYOUTS, LIMB, LIMBS, LOW, WORDS
from ._device_functions import Reach, block_of, blocks_table, count_of_parts, settling_table, terms_table

_AT_ONCE = {"llvm": 1 << 24, "triton": 1 << 24, "reference": 1 << 20}  # elements whose windows are in memory at a time
_PIECE = 1 << 16  # elements of a row that are added up by themselves, for a thread; 2^18 overflow no window
_SHORT = 128  # elements of rows that are not worth blocks
_ROOM = 1 << 20  # words of counters up to which there are copies
_TILES, _SPREAD = 16, 32  # rows of more tiles have so many counters on an accelerator, for which programs do not queue

Operands = tuple[torch.Tensor, ...]


def summed(a: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The rounded sum of every row of a, or of the products of a and b; (rows, columns), the last stride 1."""
    operands, engine = _operands(a, b), _engine(a, b is not None)
    return _settled(engine, _windows(engine, operands), _reach(operands), dtype)


def partial(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """As `summed`, but the accumulators: int64 (rows, WORDS)."""
    operands, engine = _operands(a, b), _engine(a, b is not None)
    windows, reach = _windows(engine, operands), _reach(operands)
    digits = _settled(engine, windows, reach, None)
    words = torch.zeros(len(windows), WORDS, dtype=torch.int64, device=a.device)
    words[:, reach.first : reach.first + reach.limbs] = digits
    if (end := reach.first + reach.limbs) < LIMBS:
        sign = digits[:, -1:] >> 63
        words[:, end - 1] &= LOW
        words[:, end:LIMBS] = sign & LOW
        words[:, LIMBS - 1 : LIMBS] = sign
    *_, special, minus_zeros, terms = windows.unbind(1)
    words[:, LIMBS:] = torch.stack([special & LOW, special >> 32, minus_zeros, terms], 1)
    return words


def rounded(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float nearest to each accumulator, (rows, WORDS) -> (rows,)."""
    return _settled(_engine(words, False), words, Reach(), dtype)


def _operands(a: torch.Tensor, b: torch.Tensor | None) -> Operands:
    return (a,) if b is None else (a, b)


def _reach(operands: Operands) -> Reach:
    return Reach.of(operands[0].dtype, len(operands) > 1)


def _engine(x: torch.Tensor, product: bool) -> str:
    """Return what runs the kernels of tensors, compared with the reference before its first use."""
    engine = select_engine(x.device.type)
    if x.device.type != "cpu":
        require_float64(x.device, "exact sums")
    dtype = torch.float64 if x.dtype == torch.int64 else x.dtype
    if engine == "llvm":
        _check(dtype, product)
    elif engine == "triton":
        name = f"{'exact_dot' if product else 'exact_sum'} ({dtype})"
        trial = functools.partial(_try, dtype, product)
        found = ready(
            ("exact sums", dtype, product),
            name,
            x.device,
            lambda: "triton",
            lambda engine, device: trial(engine, device),
            lambda: trial("reference", torch.device("cpu")),
        )
        return found or "reference"
    return engine


# terms into windows ------------------------------------------------------------------------------------------


def _windows(engine: str, operands: Operands) -> torch.Tensor:
    """Return the windows of every row, its counters behind, and how many terms it has: int64 (rows, counters + 1)."""
    (rows, columns), reach, most = operands[0].shape, _reach(operands), _AT_ONCE[engine]
    words = torch.zeros(rows, reach.counters + 1, dtype=torch.int64, device=operands[0].device)
    words[:, -1] = columns
    wide, high = min(columns, most), max(1, most // max(columns, 1))
    add = {"llvm": _add_blocks, "triton": _add_tiles, "reference": _add_tensors}[engine]
    for top, left in itertools.product(range(0, rows, high), range(0, columns, wide or 1)):
        part = [x[top : top + high, left : left + wide] for x in operands]
        words[top : top + high, :-1] += add(part, reach)
    return words


def _add_tensors(operands: Sequence[torch.Tensor], reach: Reach) -> torch.Tensor:
    dtype, product = operands[0].dtype, len(operands) > 1
    counters = torch.zeros(len(operands[0]), reach.counters, dtype=torch.int64, device=operands[0].device)
    run_on_tensors(terms_table(dtype, product, reach).trace, [*operands, counters])
    return _spread(counters)


def _add_tiles(operands: Sequence[torch.Tensor], reach: Reach) -> torch.Tensor:
    (rows, columns), dtype, device = operands[0].shape, operands[0].dtype, operands[0].device
    pieces = chunks(IndexMap.whole((columns,)), 0)
    several = _SPREAD if columns > _TILES * 1024 else 1
    counters = torch.zeros(rows, several, reach.counters, dtype=torch.int64, device=device)
    table = np.tile(pieces, (rows, 1))
    row, copy = np.repeat(np.arange(rows), len(pieces)), np.tile(np.arange(len(pieces)) % several, rows)
    table[:, 0] = row * several + copy
    numbers = np.arange(rows * several)
    pointers = [_starts(x, numbers // several) for x in operands]
    pointers.append(counters.data_ptr() + numbers * (8 * reach.counters))
    _kernel("triton", terms_table(dtype, len(operands) > 1, reach))(table, np.stack(pointers, 1), device)
    return _spread(counters).sum(1)


def _add_blocks(operands: Sequence[torch.Tensor], reach: Reach) -> torch.Tensor:
    (rows, columns), dtype, product = operands[0].shape, operands[0].dtype, len(operands) > 1
    found = torch.zeros(rows, reach.counters, dtype=torch.int64, device="cpu")
    if columns <= _SHORT:
        _add_pieces(operands, reach, np.arange(rows), np.zeros(rows, np.int64), np.full(rows, columns), found)
        return found
    size, count, table = block_of(dtype, product), count_of_parts(dtype, product), blocks_table(dtype, product)
    begin = np.arange(0, columns, size)
    cut = np.zeros((rows, len(begin), 4), np.int64)
    cut[:, :, 0], cut[:, :, 1], cut[:, :, 3] = np.arange(rows)[:, None], begin, begin
    cut[:, :, 2] = np.minimum(begin + size, columns) - begin
    pointers = np.stack([_starts(x, np.arange(rows)) for x in operands], 1)
    sums = np.empty((rows, len(begin), table.sums))
    lengths = cut[:, :, 2].reshape(-1)
    run_chunks(_kernel("llvm", table), lengths, address_of(cut), address_of(pointers), 0, 0, 0, address_of(sums), 0)
    lost = sums[:, :, count] != 0
    found[:, -1] += torch.from_numpy(np.where(lost, 0, sums[:, :, count + 1]).sum(1).astype(np.int64))
    parts = torch.from_numpy(np.where(lost[:, :, None], 0.0, sums[:, :, :count]).reshape(rows, -1))
    at = [array.reshape(-1) for array in np.mgrid[0:rows, 0 : parts.shape[1] : _PIECE]]
    _add_pieces([parts], reach, *at, np.minimum(at[1] + _PIECE, parts.shape[1]) - at[1], found)
    if lost.any():
        # Neighbouring blocks together, as far as a piece goes.
        number = np.arange(len(begin))
        first, last = (np.pad(lost, ((0, 0), edge))[:, cut_to] for edge, cut_to in (((1, 0), slice(-1)), ((0, 1), slice(1, None))))
        first = lost & ~(first & (number * size % _PIECE != 0))
        last = lost & ~(last & ((number + 1) * size % _PIECE != 0))
        (row, start), (_, end) = np.nonzero(first), np.nonzero(last)
        _add_pieces(operands, reach, row, begin[start], np.minimum((end + 1) * size, columns) - begin[start], found)
    return found


def _add_pieces(
    operands: Sequence[torch.Tensor], reach: Reach, row: np.ndarray, begin: np.ndarray, count: np.ndarray, to: torch.Tensor
) -> None:
    """Add some pieces of rows, each on its own, to the rows' counters."""
    dtype, words = operands[0].dtype, reach.counters
    copies = COPIES if len(row) * words <= _ROOM else 1
    counters = torch.zeros(len(row), copies, words, dtype=torch.int64, device="cpu")
    table = np.zeros((len(row), 4), np.int64)
    table[:, 0], table[:, 2] = np.arange(len(row)), count
    pointers = [_starts(x, row) + begin * x.element_size() for x in operands]
    pointers = np.stack([*pointers, counters.data_ptr() + table[:, 0] * (8 * words * copies)], 1)
    kernel = _kernel("llvm", terms_table(dtype, len(operands) > 1, reach, words if copies > 1 else 0))
    run_chunks(kernel, table[:, 2], address_of(table), address_of(pointers), *[0] * 5)
    to.index_add_(0, torch.from_numpy(row), _spread(counters).sum(1))


def _starts(x: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """Return where rows begin in memory."""
    return address(x) + rows * (x.stride(0) * x.element_size())


def _spread(windows: torch.Tensor) -> torch.Tensor:
    """Pass what is beyond 32 bits on to the window after the next, so that any number of such sums add up."""
    inner = windows[..., :-2]
    found = torch.cat([inner & LOW, windows[..., -2:]], -1)
    found[..., 2:-2] += inner[..., :-2] >> LIMB
    return found


# windows into words or a float -------------------------------------------------------------------------------


def _settled(engine: str, words: torch.Tensor, reach: Reach, dtype: torch.dtype | None) -> torch.Tensor:
    """Return accumulators rounded, (rows,), or without a dtype their limbs with carries passed on, (rows, limbs)."""
    rows, device, table = len(words), words.device, settling_table(reach, dtype)
    counters = words.t().contiguous()[: reach.counters + (dtype is not None)]
    if dtype is None:
        out = torch.empty(reach.limbs, rows, dtype=torch.int64, device=device)
    else:
        out = torch.empty(1, rows, dtype=LAYOUTS[dtype].word, device=device)
    arrays = [*counters, *out]
    if engine == "reference":
        run_on_tensors(table.trace, arrays)
    elif rows:
        cut, pointers = chunks(IndexMap.whole((rows,)), 0), np.array([[x.data_ptr() for x in arrays]], np.int64)
        kernel = _kernel(engine, table)
        if engine == "triton":
            kernel(cut, pointers, device)
        else:
            run_chunks(kernel, cut[:, 2], address_of(cut), address_of(pointers), *[0] * 5)
    return out.t() if dtype is None else out[0].view(dtype)


@functools.cache
def _kernel(engine: str, table: Table) -> Any:
    return TableKernel(table) if engine == "triton" else compile_table("exact_sums", table)


# the canary --------------------------------------------------------------------------------------------------

_checked: set[tuple[torch.dtype, bool]] = set()


def _check(dtype: torch.dtype, product: bool) -> None:
    """The canary: once per process, dtype and kind, the kernels' accumulators on fixed rows are the reference's."""
    if (dtype, product) in _checked:
        return
    name, trial = f"{'exact_dot' if product else 'exact_sum'} ({dtype})", functools.partial(_try, dtype, product)
    check_bits(name, lambda: trial("llvm", torch.device("cpu")), lambda: trial("reference", torch.device("cpu")))
    _checked.add((dtype, product))


def _try(dtype: torch.dtype, product: bool, engine: str, device: torch.device) -> list[torch.Tensor]:
    """Return windows and floats of fixed rows."""
    a = _fixed_rows(dtype).to(device)
    operands = (a, a.flip(1).contiguous()) if product else (a,)
    windows = _windows(engine, operands)
    # How windows share their bits is the engine's own affair.
    digits = _settled(engine, windows, _reach(operands), None)
    return [digits.cpu(), windows[:, -3:].cpu(), _settled(engine, windows, _reach(operands), dtype).cpu()]


def _fixed_rows(dtype: torch.dtype) -> torch.Tensor:
    """Return rows that exercise every code path: near one size, far apart, everywhere, with special values."""
    grid = torch.arange(1100, dtype=torch.float64, device="cpu")
    mixed = (grid * 0.6180339887498949).frac() - 0.5
    powers = (grid % 61 - 30).exp2()
    special = mixed.clone()
    special[::97] = float("inf")
    rows = torch.stack([mixed, mixed * powers.sqrt(), mixed * powers, special, mixed * 2.0**-120, -0.0 * grid])
    return rows.to(dtype)
