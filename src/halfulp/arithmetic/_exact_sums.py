"""Sums and dot products that are rounded once: the same bits in any order, sharding and number of threads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels import (
    CHUNK_ELEMENTS,
    address,
    check_bits,
    define_operator,
    get_array_address,
    is_under_transform,
    require_float64,
    run_chunks,
    run_trace_on_tensors,
    select_engine,
)
from ..kernels._device_function import PointerTableFunction
from ..kernels._trace import COUNTER_COPIES
from ..kernels.triton._launch import TILE_ELEMENTS, PointerTableKernel, find_checked_kernel
from ..kernels.vector._table_loop import compile_pointer_table_kernel
from ._exact_sum_kernels import (
    FORMAT_BY_ELEMENT_DTYPE,
    LIMB_BITS,
    LIMB_COUNT,
    LIMB_MASK,
    WORD_COUNT,
    WORD_DTYPE_BY_BITS,
    LimbRange,
    count_block_elements,
    get_near_and_far_cut_counts,
    make_block_summing_kernel,
    make_carry_and_rounding_kernel,
    make_term_adding_kernel,
)

# Elements whose windows are in memory at a time: of 2^18 of them none overflows, and blocks have fewer parts.
_MOST_ELEMENTS_AT_ONCE_BY_ENGINE = {"llvm": 1 << 24, "triton": 1 << 22, "reference": 1 << 18}
_MOST_ROWS_AT_ONCE = 4096  # of which windows are in memory at a time
_PIECE_LENGTH = 1 << 16  # neighbours that are added up by themselves, for a thread
_MOST_ELEMENTS_WITHOUT_BLOCKS = 1 << 15  # elements that are not worth blocks
_SHORTEST_ROW_WITH_BLOCKS = 256  # elements of a row that is worth a block
_LONGEST_PIECE_WITHOUT_COUNTER_COPIES = 128  # elements of a piece up to which there are no copies of counters
_MOST_COPIED_COUNTER_WORDS = 1 << 20  # words of counters up to which there are copies
_COUNTERS_PER_ROW = 32  # counters of a row of many tiles on an accelerator, for which programs do not queue

Operands = Sequence[torch.Tensor]
WindowCounters = Any  # int64, of NumPy or torch


def sum_rows(a: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    """Return each row's sum of a or of a * b, whose last stride is 1; without a dtype accumulators, (rows, words)."""
    operands, product = [a] if b is None else [a, b], b is not None
    reach = LimbRange.for_terms(a.dtype, product)
    return _sum_on_engine(_choose_engine(a, a.dtype, product), operands, reach, dtype)


def round_accumulators(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the float nearest to each accumulator, (rows, WORD_COUNT) -> (rows,)."""
    return _round_windows(_choose_engine(words, torch.float64, False), words, LimbRange(), dtype)


def _sum_on_engine(engine: str, operands: Operands, reach: LimbRange, dtype: torch.dtype | None) -> torch.Tensor:
    rows, columns = operands[0].shape
    step = min(_MOST_ROWS_AT_ONCE, max(1, _MOST_ELEMENTS_AT_ONCE_BY_ENGINE[engine] // max(1, columns)))
    parts = [[x[top : top + step] for x in operands] for top in range(0, max(1, rows), step)]
    made = [_round_windows(engine, _add_terms_to_windows(engine, part, reach), reach, dtype) for part in parts]
    return made[0] if len(made) == 1 else torch.cat(made)


def _choose_engine(x: torch.Tensor, dtype: torch.dtype, product: bool) -> str:
    """Return the engine of a tensor's kernels, compared with the reference before its first use."""
    engine = select_engine(x.device.type)
    if x.device.type != "cpu":
        require_float64(x.device, "exact sums")
    if engine == "llvm":
        _check_kernels(dtype, product)
    elif engine == "triton":
        kind = ("exact sums", dtype, product)
        name, run, reference = _make_canary_functions(dtype, product)
        return find_checked_kernel(kind, name, x.device, lambda: engine, run, reference) or "reference"
    return engine


# terms into windows ------------------------------------------------------------------------------------------


def _add_terms_to_windows(engine: str, operands: Operands, reach: LimbRange) -> WindowCounters:
    """Return the counters of every row, and how many terms it has: (rows, counters + 1)."""
    columns, step = operands[0].shape[1], _MOST_ELEMENTS_AT_ONCE_BY_ENGINE[engine]
    fill: Callable[..., WindowCounters] = {
        "llvm": _add_to_windows_by_blocks,
        "triton": _add_to_windows_by_triton,
        "reference": _add_to_windows_by_torch,
    }[engine]
    found = fill([x[:, :step] for x in operands], reach)
    if columns > step:
        found = _propagate_carries(found)
        for left in range(step, columns, step):
            found += _propagate_carries(fill([x[:, left : left + step] for x in operands], reach))
    found[:, -1] = columns
    return found


def _propagate_carries(windows: WindowCounters) -> WindowCounters:
    """Carry what exceeds 32 bits to the window after the next, in place, so that any number of sums add up."""
    inner = windows[..., :-3]
    high = inner[..., :-2] >> LIMB_BITS
    inner &= LIMB_MASK  # there is nothing in the highest two
    inner[..., 2:] += high
    return windows


def _add_to_windows_by_torch(operands: Operands, reach: LimbRange) -> torch.Tensor:
    first = operands[0]
    counters = torch.zeros(len(first), reach.counter_count + 1, dtype=torch.int64, device=first.device)
    if first.numel():
        run_trace_on_tensors(
            make_term_adding_kernel(first.dtype, len(operands) > 1, reach).trace, [*operands, counters]
        )
    return counters


def _add_to_windows_by_triton(operands: Operands, reach: LimbRange) -> torch.Tensor:
    (rows, columns), first, words = operands[0].shape, operands[0], reach.counter_count + 1
    begin = np.arange(0, columns, CHUNK_ELEMENTS)
    several = _COUNTERS_PER_ROW if len(begin) > 1 else 1
    # All begin at multiples of 16 bytes, as a tile is read by whole vectors where all of its addresses are such.
    counters = torch.zeros(rows, several, words + words % 2, dtype=torch.int64, device=first.device)[..., :words]
    row, number = (array.reshape(-1) for array in np.indices((rows, len(begin))))
    slot = row * several + number % several
    table = np.stack([slot, begin[number], np.minimum(columns - begin[number], CHUNK_ELEMENTS), begin[number]], 1)
    rows_of = np.arange(rows * several)
    pointers = [_find_row_addresses(x, rows_of // several) for x in operands]
    pointers.append(address(counters) + rows_of * (8 * counters.stride(1)))
    if len(table):
        _compile_table_kernel("triton", make_term_adding_kernel(first.dtype, len(operands) > 1, reach))(
            table, np.stack(pointers, 1), first.device
        )
    return counters[:, 0] if several == 1 else _propagate_carries(counters).sum(1)


def _add_to_windows_by_blocks(operands: Operands, reach: LimbRange) -> np.ndarray:
    (rows, columns), dtype, product = operands[0].shape, operands[0].dtype, len(operands) > 1
    row, nothing = np.arange(rows), np.zeros(rows, np.int64)
    # A short row is one block that is not full.
    whole = count_block_elements(dtype, product)
    size = min(whole, max(columns, 1))
    found: np.ndarray = np.zeros((rows, reach.counter_count + 1), np.int64)
    has_few = rows * columns <= _MOST_ELEMENTS_WITHOUT_BLOCKS or columns < _SHORTEST_ROW_WITH_BLOCKS
    rest = columns if has_few else columns % size
    begin = np.arange(0, columns - rest, size)
    if rest:
        found = _add_pieces_to_windows(operands, reach, row, nothing + columns - rest, nothing + rest)
    if rest == columns:
        return found
    found = _propagate_carries(found)
    cut = np.zeros((rows, len(begin), 4), np.int64)
    cut[:, :, 0], cut[:, :, 1], cut[:, :, 2] = row[:, None], begin, size
    pointers = np.stack([_find_row_addresses(x, row) for x in operands], 1)
    lost = np.ones((rows, len(begin)), bool)
    for cuts in get_near_and_far_cut_counts(dtype, product):
        table, left = make_block_summing_kernel(dtype, product, cuts, size < whole), cut[lost]
        sums = np.empty((len(left), table.sum_column_count))
        given = get_array_address(left), get_array_address(pointers), 0, 0, 0, get_array_address(sums)
        run_chunks(_compile_table_kernel("llvm", table), left[:, 2], *given)
        failed = np.isnan(sums[:, 0])
        sums[failed] = 0
        parts = np.zeros((rows, len(begin), cuts + 1))
        parts[lost] = sums[:, : cuts + 1]
        all_parts = torch.from_numpy(parts.reshape(rows, -1))
        found += _propagate_carries(_add_pieces_to_windows([all_parts], reach, row, nothing, nothing + parts[0].size))
        np.add.at(found[:, -2], left[:, 0], sums[:, cuts + 1].astype(np.int64))
        lost[lost] = failed
        if not failed.any():
            return found
    # Lost blocks beside each other are a piece.
    before, behind = np.zeros_like(lost), np.zeros_like(lost)
    before[:, 1:], behind[:, :-1] = lost[:, :-1], lost[:, 1:]
    edge = np.arange(len(begin) + 1) * size % _PIECE_LENGTH == 0
    (row, start), (_, end) = np.nonzero(lost & ~(before & ~edge[:-1])), np.nonzero(lost & ~(behind & ~edge[1:]))
    length = (end + 1 - start) * size
    np.add.at(found, row, _propagate_carries(_add_pieces_to_windows(operands, reach, row, begin[start], length)))
    return found


def _add_pieces_to_windows(
    operands: Operands, reach: LimbRange, row: np.ndarray, begin: np.ndarray, length: np.ndarray
) -> np.ndarray:
    """Return the counters of some pieces of rows, each by itself."""
    first, words = operands[0], reach.counter_count + 1
    is_copied = (
        len(row) * words <= _MOST_COPIED_COUNTER_WORDS and length.max(initial=0) > _LONGEST_PIECE_WITHOUT_COUNTER_COPIES
    )
    copies = COUNTER_COPIES if is_copied else 1
    counters = np.zeros((len(row), copies, words), np.int64)
    pointers = np.empty((len(row), len(operands) + 1), np.int64)
    for k, x in enumerate(operands):
        pointers[:, k] = _find_row_addresses(x, row) + begin * x.element_size()
    number = np.arange(len(row))
    pointers[:, -1] = get_array_address(counters) + number * (8 * words * copies)
    cut = np.zeros((len(row), 4), np.int64)
    cut[:, 0], cut[:, 2] = number, length
    table = make_term_adding_kernel(first.dtype, len(operands) > 1, reach, words if copies > 1 else 0)
    run_chunks(
        _compile_table_kernel("llvm", table), length, get_array_address(cut), get_array_address(pointers), *[0] * 4
    )
    return counters[:, 0] if copies == 1 else counters.sum(1)


def _find_row_addresses(x: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """Return where rows begin in memory."""
    found: np.ndarray = address(x) + rows * (x.stride(0) * x.element_size())
    return found


@functools.lru_cache(64)
def _make_chunk_table(count: int) -> np.ndarray:
    begin = np.arange(0, count, CHUNK_ELEMENTS)
    return np.stack([begin * 0, begin, np.minimum(count - begin, CHUNK_ELEMENTS), begin], 1)


# windows into words or a float -------------------------------------------------------------------------------


def _round_windows(engine: str, words: WindowCounters, reach: LimbRange, dtype: torch.dtype | None) -> torch.Tensor:
    """Return accumulators rounded, (rows,), or without a dtype with carries passed on, (rows, WORD_COUNT)."""
    words = words if isinstance(words, torch.Tensor) else torch.from_numpy(words)
    rows, table, columns = len(words), make_carry_and_rounding_kernel(reach, dtype), words.t().contiguous()
    kind = torch.int64 if dtype is None else WORD_DTYPE_BY_BITS[FORMAT_BY_ELEMENT_DTYPE[dtype].bits]
    out = torch.empty(1 if dtype else reach.limbs, rows, dtype=kind, device=words.device)
    if engine == "reference":
        run_trace_on_tensors(table.trace, [*columns[: reach.counter_count + bool(dtype)], *out])
    elif rows:
        own = np.arange(reach.counter_count + bool(dtype))
        pointers = np.concatenate([_find_row_addresses(columns, own), _find_row_addresses(out, np.arange(len(out)))])
        cut = _make_chunk_table(rows)
        if engine == "triton":
            _compile_table_kernel(engine, table)(cut, pointers[None], words.device)
        else:
            run_chunks(
                _compile_table_kernel(engine, table),
                cut[:, 2],
                get_array_address(cut),
                get_array_address(pointers),
                *[0] * 4,
            )
    if dtype is not None:
        return out[0].view(dtype)
    digits = out.t()
    found = torch.empty(len(digits), WORD_COUNT, dtype=torch.int64, device=digits.device)
    end, sign = reach.first + reach.limbs, digits[:, -1:] >> 63
    found[:, : reach.first], found[:, reach.first : end] = 0, digits
    if end < LIMB_COUNT:
        found[:, end - 1] &= LIMB_MASK
        found[:, end : LIMB_COUNT - 1], found[:, LIMB_COUNT - 1 : LIMB_COUNT] = sign & LIMB_MASK, sign
    special, minus_zeros, terms = words[:, -3:].unbind(1)
    found[:, LIMB_COUNT:] = torch.stack([special & LIMB_MASK, special >> LIMB_BITS, minus_zeros, terms], 1)
    return found


@functools.cache
def _compile_table_kernel(engine: str, table: PointerTableFunction) -> Any:
    if engine == "llvm":
        return compile_pointer_table_kernel("exact_sums", table)
    # All limbs of an accumulator are in a thread's registers at once.
    return PointerTableKernel(table, TILE_ELEMENTS if table.trace.counter_additions else 128)


# the canary --------------------------------------------------------------------------------------------------


@functools.cache
def _check_kernels(dtype: torch.dtype, product: bool) -> None:
    """Compare the kernels' bits on fixed rows with the reference's, once per process, dtype and kind (a canary)."""
    name, run, reference = _make_canary_functions(dtype, product)
    check_bits(name, lambda: run("llvm", torch.device("cpu")), reference)


def _make_canary_functions(dtype: torch.dtype, product: bool) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    """Return a name, and functions that sum fixed rows: by an engine on a device, and by the reference."""

    def run(engine: str, device: torch.device) -> list[torch.Tensor]:
        # Rows that exercise every code path: near one size, far apart, everywhere, with special values.
        grid = torch.arange(6000, dtype=torch.float64, device="cpu")
        mixed, powers = (grid * 0.6180339887498949).frac() - 0.5, (grid % 61 - 30).exp2()
        special = mixed.clone()
        special[::97] = float("inf")
        rows = torch.stack([mixed, mixed * powers.sqrt(), mixed * powers, special, mixed * 2.0**-120, -0.0 * grid])
        a = rows.to(dtype).to(device)
        operands = [a, a.flip(1).contiguous()] if product else [a]
        reach = LimbRange.for_terms(dtype, product)
        return [_sum_on_engine(engine, operands, reach, kind).cpu() for kind in (None, dtype)]

    name = f"{'exact_dot' if product else 'exact_sum'} ({dtype})"
    return name, run, lambda: run("reference", torch.device("cpu"))


Dim = int | Sequence[int] | None


def exact_sum(
    x: torch.Tensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of x over `dim`, correctly rounded: the number of `dtype` nearest to the exact sum, ties to even.

    Since nothing is rounded before the end, the result does not depend on the order of the elements, on how they are
    spread over processes (`exact_partial`), or on the number of threads, and no cancellation hurts it. Terms are added
    up in a fixed-point accumulator that spans every float (Kulisch); blocks of neighbours are first reduced, without
    an error, by cutting each element at one place: q = (s + x) - s, r = x - q (Rump, Ogita, Oishi).

    A sum beyond the largest number rounds to infinity as one addition does; partial sums cannot overflow. Any NaN, or
    infinities of both signs, give NaN, infinities of one sign that infinity. An exact sum of zero is +0, unless there
    are terms and all of them are -0. The sum of nothing is +0.

    Args:
        x: float16, bfloat16, float32 or float64 tensor, any shape, strides and device.
        dim: one dimension or several; None or () for all.
        keepdim: whether those dimensions stay, with size 1.
        dtype: of the result, one of the four; None for x's. float64 sums of float32 keep more of the same exact value.

    Returns:
        The sums. Their gradient is that of torch.sum.

    Raises:
        TypeError: integer, complex or other elements, or such a `dtype`; scaled tensors and MCTensors.
        NotImplementedError: under torch.func's transforms and in forward mode.
        ValueError: a dimension is given twice.
        IndexError: there is no such dimension.

    >>> x = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    >>> float(x.sum()), float(exact_sum(x)), float(exact_sum(x.flip(0)))
    (0.0, 1.0, 1.0)
    """
    _check_operand(x, "exact_sum")
    dtype = _check_result_dtype(dtype, x.dtype)
    return _run_unless_under_transform("exact_sum", _sum_operator, x, normalize_dims(x.dim(), dim), keepdim, dtype)


def exact_dot(
    a: torch.Tensor, b: torch.Tensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of a * b over `dim`, correctly rounded; as `exact_sum`, and no product is rounded either.

    Products are exact also where a float's would overflow or underflow: 2^-1074 * 2^-1074 counts.

    Args:
        a: float16, bfloat16, float32 or float64 tensor.
        b: the same; shapes broadcast, and of two dtypes the products are of what torch promotes them to.
        dim: of the broadcast shape, one or several; None or () for all.
        keepdim: whether those dimensions stay, with size 1.
        dtype: of the result; None for the promoted dtype.

    Returns:
        The dot products. The gradient of each operand is the other one times the result's gradient, in one rounding
        to the wider dtype and one to its own.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: as `exact_sum`.
        RuntimeError: the shapes do not broadcast.

    >>> a = torch.tensor([1e200, 1.0, 1e200], dtype=torch.float64)
    >>> b = torch.tensor([1e200, 1e-300, -1e200], dtype=torch.float64)
    >>> float(exact_dot(a, b))
    1e-300
    """
    a, b = _promote_operands(a, b, "exact_dot")
    dtype = _check_result_dtype(dtype, a.dtype)
    return _run_unless_under_transform("exact_dot", _dot_operator, a, b, normalize_dims(a.dim(), dim), keepdim, dtype)


def exact_partial(a: torch.Tensor, b: torch.Tensor | None = None, dim: Dim = None) -> torch.Tensor:
    """Return the unrounded sum as integers; partial sums of shards are merged by adding them.

    Adding is exact, so that any split, in any order, gives the bits of `exact_sum` or `exact_dot` on the whole:

        words = exact_partial(shard)
        torch.distributed.all_reduce(words)
        total = exact_round(words, torch.float32)

    Args:
        a: as in `exact_sum`.
        b: None for the sum of a; else the partial is of `exact_dot(a, b)`.
        dim: what is summed over.

    Returns:
        int64, the shape of the sums and one more dimension of 138: 134 limbs of 32 bits, from 2^-2176 up, the last one
        with the sign; then the counts of +inf, of -inf (a NaN counts as both), of -0 and of all terms. The same
        for any order of the elements. Up to 2^31 partials may be added, and 2^63 terms. It has no gradient.

    Raises:
        TypeError, ValueError, IndexError: as `exact_sum`.

    >>> x = torch.randn(1000)
    >>> words = exact_partial(x[:300]) + exact_partial(x[300:])
    >>> bool(exact_round(words, torch.float32) == exact_sum(x))
    True
    """
    if b is None:
        _check_operand(a, "exact_partial")
    else:
        a, b = _promote_operands(a, b, "exact_partial")
    words: torch.Tensor = _partial_operator(a.detach(), None if b is None else b.detach(), normalize_dims(a.dim(), dim))
    return words


def exact_round(partial: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the correctly rounded sum that a partial, or any sum of partials, stands for.

    Args:
        partial: int64 (..., 138), from `exact_partial`.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        (...), of `dtype`.

    Raises:
        TypeError: not int64, or such a `dtype`.
        ValueError: the last dimension is not 138.

    >>> float(exact_round(exact_partial(torch.tensor([0.1, 0.2], dtype=torch.float64))))
    0.30000000000000004
    """
    if not isinstance(partial, torch.Tensor) or partial.dtype != torch.int64:
        raise TypeError(f"exact_round takes the int64 tensor that exact_partial returns, got {_describe_type(partial)}")
    if partial.dim() == 0 or partial.shape[-1] != WORD_COUNT:
        raise ValueError(
            f"exact_round takes partials of {WORD_COUNT} words along the last dimension, got shape "
            f"{tuple(partial.shape)}: merge partials by adding them, not by concatenating"
        )
    rounded: torch.Tensor = _round_operator(partial, _check_result_dtype(dtype, torch.float64))
    return rounded


def _describe_type(x: object) -> str:
    return f"a {x.dtype} tensor" if isinstance(x, torch.Tensor) else type(x).__name__


def _check_operand(x: torch.Tensor, name: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FORMAT_BY_ELEMENT_DTYPE:
        raise TypeError(
            f"{name} takes float16, bfloat16, float32 and float64 tensors, got {_describe_type(x)}: integers need no "
            "rounding (torch.sum), complex numbers are summed as view_as_real(x)"
        )
    if hasattr(type(x), "decode"):
        raise TypeError(
            f"{name} takes plain tensors, got {type(x).__name__}: give x.decode(torch.float64), or, of an MCTensor, "
            "exact_round of the sum of exact_partial of each of x.components"
        )


def _check_result_dtype(dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    dtype = default if dtype is None else dtype
    if dtype not in FORMAT_BY_ELEMENT_DTYPE:
        raise TypeError(f"an exact sum is rounded to float16, bfloat16, float32 or float64, got {dtype}")
    return dtype


def _promote_operands(a: torch.Tensor, b: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands with one dtype and shape."""
    _check_operand(a, name)
    _check_operand(b, name)
    common = torch.promote_types(a.dtype, b.dtype)
    a, b = torch.broadcast_tensors(a.to(common), b.to(common))
    return a, b


def normalize_dims(count: int, dim: Dim) -> list[int]:
    """Return the dimensions that are summed, from 0 up; none of a tensor without dimensions."""
    if dim is None:
        return list(range(count))
    given = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    if not all(isinstance(d, int) for d in given):
        raise TypeError(f"dim={dim!r}: give a whole number, several in a tuple, or None for all dimensions")
    most = max(count, 1)
    for d in given:
        if not -most <= d < most:
            raise IndexError(f"dimension {d} is out of range of {count}: allowed are {-most} to {most - 1}")
    found = sorted(d % most for d in given)
    if len(set(found)) < len(found):
        raise ValueError(f"dim {tuple(given)} names a dimension twice: give each one once")
    return (found or list(range(count))) if count else []


def _view_as_rows(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """(rows, columns) with neighbours in memory along the columns, which are summed."""
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = (math.prod(x.shape[d] for d in kept), math.prod(x.shape[d] for d in dims))
    flat = x.permute([*kept, *dims]).reshape(shape)
    return flat.contiguous() if shape[1] > 1 and flat.stride(1) != 1 else flat


def find_result_shape(shape: torch.Size, dims: Sequence[int], keepdim: bool = False) -> list[int]:
    return [1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims]


def _run_sum(
    a: torch.Tensor, b: torch.Tensor | None, dim: list[int], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    """Sum one operand, or the products of two, to a dtype or to words of an accumulator."""
    sums = sum_rows(_view_as_rows(a, dim), None if b is None else _view_as_rows(b, dim), dtype)
    return sums.view([*find_result_shape(a.shape, dim, keepdim), *sums.shape[1:]])


def _make_empty_sums(x: torch.Tensor, *given: Any) -> torch.Tensor:
    dim, keepdim, dtype = given[-3:]
    return x.new_empty(find_result_shape(x.shape, dim, keepdim), dtype=dtype)


_sum_operator: Callable[..., torch.Tensor] = define_operator(
    "exact_sum(Tensor x, int[] dim, bool keepdim, ScalarType dtype) -> Tensor",
    lambda x, *given: _run_sum(x, None, *given),
    _make_empty_sums,
)
_dot_operator: Callable[..., torch.Tensor] = define_operator(
    "exact_dot(Tensor a, Tensor b, int[] dim, bool keepdim, ScalarType dtype) -> Tensor", _run_sum, _make_empty_sums
)
_partial_operator = define_operator(
    "exact_partial(Tensor a, Tensor? b, int[] dim) -> Tensor",
    lambda a, b, dim: _run_sum(a, b, dim, False, None),
    lambda a, b, dim: a.new_empty([*find_result_shape(a.shape, dim), WORD_COUNT], dtype=torch.int64),
)
_round_operator = define_operator(
    "exact_round(Tensor words, ScalarType dtype) -> Tensor",
    lambda words, dtype: round_accumulators(words.reshape(-1, WORD_COUNT), dtype).view(words.shape[:-1]),
    lambda words, dtype: words.new_empty(words.shape[:-1], dtype=dtype),
)


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *operands, ctx.dims, ctx.keepdim, _ = inputs
    ctx.shape, ctx.dtype, ctx.is_dot = operands[0].shape, operands[0].dtype, len(operands) > 1
    if ctx.is_dot:
        ctx.save_for_backward(*operands)


def _compute_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradient = gradient if ctx.is_dot else gradient.to(ctx.dtype)
    if not ctx.keepdim:
        gradient = gradient.reshape(find_result_shape(ctx.shape, ctx.dims, True))
    gradient = gradient.expand(ctx.shape)
    if not ctx.is_dot:  # nothing was saved, so that a graph may be gone through again, as that of torch.sum
        return gradient, None, None, None
    a, b = ctx.saved_tensors
    for_a = (gradient * b).to(a.dtype) if ctx.needs_input_grad[0] else None
    for_b = (gradient * a).to(b.dtype) if ctx.needs_input_grad[1] else None
    return for_a, for_b, None, None, None


for _name in ("halfulp::exact_sum", "halfulp::exact_dot"):
    torch.library.register_autograd(_name, _compute_gradient, setup_context=_save_for_gradient)


def _run_unless_under_transform(name: str, operator: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """Run an operator, outside of torch.func's transforms: there jvp would take its derivative for 0."""
    if is_under_transform():
        raise NotImplementedError(
            f"{name} under torch.func (vmap, grad, jvp) or in forward mode has no rule: sum batches by dim=, take "
            "gradients by backward(), or use torch.sum there"
        )
    return operator(*given)
