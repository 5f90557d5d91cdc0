"""Running an exact sum: blocks of neighbours into a few float64 each, those into the accumulator, one rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...kernels import (
    address,
    address_of,
    check_bits,
    compile_code,
    require_float64,
    run_chunks,
    select_engine,
    source_digest,
)
from . import _accumulate as p
from ._accumulator import BLOCK, LAYOUTS, WORDS, block_size
from ._block_sums import compile_blocks
from ._on_triton import ExactSums, exact_sums
from ._reference import round_words, words_of

_SHARES = 64  # how many pieces threads may take up
_BLOCKS_AT_ONCE = 1 << 14  # records in memory at a time, and far fewer than a limb has room for
_ITEM = 512  # blocks of one accumulator; more of a row go to accumulators side by side, for other threads


def summed(a: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The rounded sum of every row of a, or of the products of a and b; (rows, columns), the last stride 1."""
    if on_device := _on_triton(a, b):
        return on_device.sums(a, b, dtype)
    if not _compiled(a):
        return round_words(words_of(a, b), dtype)
    _check(a.dtype, b is not None)
    return _run(a, b, dtype)


def partial(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """As `summed`, but the accumulators: int64 (rows, WORDS)."""
    if on_device := _on_triton(a, b):
        return on_device.sums(a, b, None)
    if not _compiled(a):
        return words_of(a, b)
    _check(a.dtype, b is not None)
    return _run(a, b, None)


def rounded(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float nearest to each accumulator, (rows, WORDS) -> (rows,)."""
    if on_device := _on_triton(words):
        return on_device.settled(words.contiguous()[:, None], dtype)
    if not _compiled(words):
        return round_words(words, dtype)
    return _settled(words.clone(memory_format=torch.contiguous_format), dtype)


def _on_triton(a: torch.Tensor, b: torch.Tensor | None = None) -> ExactSums | None:
    """The kernels of an accelerator; None where there are none."""
    if select_engine(a.device.type) != "triton":
        return None
    require_float64(a.device, "exact sums")
    return exact_sums(a.device, torch.float64 if a.dtype == torch.int64 else a.dtype, b is not None, _fixed_rows)


def _compiled(x: torch.Tensor) -> bool:
    if x.device.type == "cpu":
        return select_engine("cpu") == "llvm"
    require_float64(x.device, "exact sums")
    return False


def _run(a: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    """Sum all rows, in chunks that bound the memory of their records; dtype None returns the accumulators."""
    rows, columns = a.shape
    if rows == 0 or columns == 0:
        words = torch.zeros(rows, WORDS, dtype=torch.int64, device="cpu")
        return words if dtype is None else torch.zeros(rows, dtype=dtype, device="cpu")
    width = _BLOCKS_AT_ONCE * block_size(a.dtype, b is not None)
    if columns > width:
        parts = [slice(start, start + width) for start in range(0, columns, width)]
        sums = (_run(a[:, part], None if b is None else b[:, part], None) for part in parts)
        return _settled(functools.reduce(torch.add, sums), dtype)
    step = max(1, width // columns)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    made = [_run_rows(a[part], None if b is None else b[part], dtype) for part in parts]
    return made[0] if len(made) == 1 else torch.cat(made)


def _run_rows(a: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    (rows, columns), size = a.shape, block_size(a.dtype, b is not None)
    per_row = -(-columns // size)
    share, block_lengths = _shares(rows * per_row, size)
    # Few long rows become several accumulators each, one for a thread.
    per_item = per_row if rows >= _SHARES or torch.get_num_threads() == 1 else min(per_row, _ITEM)
    pieces = -(-per_row // per_item)
    item_share, item_lengths = _shares(rows * pieces, per_item * size)
    rounding = dtype is not None and pieces == 1
    bytes_each = a.element_size()
    words = [address(a), 0, a.stride(0) * bytes_each, 0, columns, per_row, size, rows * per_row, share]
    if b is not None:
        words[p.B], words[p.B_STEP] = address(b), b.stride(0) * bytes_each
    words += [
        rows * pieces,
        per_item,
        pieces,
        item_share,
        rounding,
        *_element_layout(a.dtype),
        *_result_layout(dtype or a.dtype),
    ]
    # The setup, records and scratch, one behind the other.
    before, records = len(words), len(words) + rows * per_row * p.RECORD
    work = np.empty(records + len(block_lengths) * BLOCK, np.int64)
    work[:before] = words
    setup = address_of(work)
    run_chunks(_block_kernel(a.dtype, b is not None), block_lengths, setup, setup + 8 * before, setup + 8 * records)
    made = torch.zeros(len(item_lengths) if rounding else rows * pieces, WORDS, dtype=torch.int64, device="cpu")
    out = torch.empty(rows if rounding else 0, dtype=torch.int64, device="cpu")
    run_chunks(_item_kernel(), item_lengths, setup, setup + 8 * before, address(made), address(out))
    if rounding and dtype is not None:
        return _as_floats(out, dtype)
    if pieces > 1:
        return _settled(made.view(rows, pieces, WORDS).sum(1), dtype)
    return made


def _settled(words: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Sums of accumulators with their carries passed on, or, with a dtype, rounded; the words given are used up."""
    out = torch.empty(len(words), dtype=torch.int64, device="cpu")
    if len(words):
        share, lengths = _shares(len(words), WORDS)
        setup = np.zeros(p.SETUP, np.int64)
        setup[p.ITEMS], setup[p.ITEM_SHARE], setup[p.ROUNDED] = len(words), share, dtype is not None
        setup[p.OUT_WIDTH :] = _result_layout(dtype or torch.float64)
        run_chunks(_round_kernel(), lengths, address_of(setup), address(words), address(out))
    return words if dtype is None else _as_floats(out, dtype)


@functools.lru_cache(64)
def _shares(count: int, length: int) -> tuple[int, np.ndarray]:
    """How many of `count` units of a length each share has, and the lengths of all shares."""
    share = -(-count // _SHARES)
    return share, np.full(-(-count // share), share * length, np.int64)


@functools.cache
def _element_layout(dtype: torch.dtype) -> tuple[int, ...]:
    """A setup's words on how the elements are laid out."""
    layout = LAYOUTS[dtype]
    return layout.width, layout.mantissa, layout.fields, layout.least_exponent, 1 << 52


@functools.cache
def _result_layout(dtype: torch.dtype) -> tuple[int, ...]:
    """A setup's words on how the result is laid out."""
    layout = LAYOUTS[dtype]
    return layout.width, layout.mantissa, layout.fields, layout.lowest


def _as_floats(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.to(LAYOUTS[dtype].word).view(dtype)


@functools.cache
def _item_kernel() -> Callable[..., None]:
    return compile_code("sum_items", source_digest(Path(__file__).parent), 6, p.sum_items)


@functools.cache
def _round_kernel() -> Callable[..., None]:
    return compile_code("round_items", source_digest(Path(__file__).parent), 5, p.round_items)


@functools.cache
def _block_kernel(dtype: torch.dtype, product: bool) -> Callable[..., None]:
    return compile_blocks(dtype, product)


_checked: set[tuple[torch.dtype, bool]] = set()


def _check(dtype: torch.dtype, product: bool) -> None:
    """The canary: once per process, dtype and kind, the kernels' accumulators on fixed rows are the reference's."""
    if (dtype, product) in _checked:
        return
    a = _fixed_rows(dtype)
    b = a.flip(1).contiguous() if product else None
    kind = "exact_dot" if product else "exact_sum"
    check_bits(
        f"{kind} ({dtype})",
        lambda: [_run(a, b, None), _run(a, b, dtype)],
        lambda: [words_of(a, b), round_words(words_of(a, b), dtype)],
    )
    _checked.add((dtype, product))


def _fixed_rows(dtype: torch.dtype) -> torch.Tensor:
    """Return rows that exercise every code path: near one size, far apart, everywhere, with special values."""
    grid = torch.arange(1100, dtype=torch.float64, device="cpu")
    mixed = (grid * 0.6180339887498949).frac() - 0.5
    powers = (grid % 61 - 30).exp2()
    special = mixed.clone()
    special[::97] = float("inf")
    rows = torch.stack([mixed, mixed * powers.sqrt(), mixed * powers, special, mixed * 2.0**-120, -0.0 * grid])
    return rows.to(dtype)
