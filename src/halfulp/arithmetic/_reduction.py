"""Sums, products and running sums of expansions along dimensions."""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..kernels import SERIAL_BELOW, chosen, compile_fold, define_operator, run_chunks
from ._networks import added, multiplied
from ._pointwise import PRECISION, Parts, pointwise
from ._transforms import Terms, two_sum

_WIDE = 32  # columns that fill the vectors of a kernel
_BLOCK = 16  # rows that are summed with one plain sum of rounding errors


def total(parts: Parts, dim: int | Sequence[int] | None, components: int, keepdim: bool = False) -> Parts:
    """The sum over dimensions, accumulated in float64 expansions of at least two components.

    16 elements at a time are summed exactly but for a plain sum of their rounding errors, the blocks' results as
    expansions: the error is at most (2^8 + N/5) 2^-106 sum |x|, of components up to 48 bits in all 2^-49 sum |x|, and
    one rounding to the components. The order is fixed, so the bits do not
    depend on threads. Infinities and NaN are as in a float64 sum.

    Args:
        parts: components of one value, any shape.
        dim: one, several, or None for all.
        components: of the result, in the same dtype.
        keepdim: leave dimensions of size 1.

    >>> import torch
    >>> [float(part) for part in total((torch.tensor([1.0, 2.0**-40]),), None, 2)]
    [1.0, 9.094947017729282e-13]
    """
    return _reduced("sum", parts, dim, components, keepdim)


def product(parts: Parts, dim: int | Sequence[int] | None, components: int, keepdim: bool = False) -> Parts:
    """The product over dimensions, as `total`."""
    return _reduced("prod", parts, dim, components, keepdim)


def running(parts: Parts, dim: int, components: int) -> Parts:
    """The running sum along a dimension (torch.cumsum), by doubling: log2 N sums of whole tensors.

    >>> import torch
    >>> running((torch.tensor([1.0, 2.0, 3.0]),), 0, 1)[0].tolist()
    [1.0, 3.0, 6.0]
    """
    dtype = parts[0].dtype
    parts = pointwise("renormalize", parts, components=components, dtype=dtype)
    if parts[0].dim() == 0:
        return parts
    length, step = parts[0].shape[dim], 1
    while step < length:
        early = tuple(part.narrow(dim, 0, length - step) for part in parts)
        late = tuple(part.narrow(dim, step, length - step) for part in parts)
        summed = pointwise("add", late, early, components=components, dtype=dtype)
        parts = tuple(torch.cat([part.narrow(dim, 0, step), new], dim) for part, new in zip(parts, summed))
        step *= 2
    return parts


def _reduced(kind: str, parts: Parts, dim, components: int, keepdim: bool) -> Parts:
    dims = _dimensions(parts[0].dim(), dim)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in parts):
        return tuple(_operator(kind, list(parts), dims, components, keepdim))
    return _reduce(kind, parts, dims, components, keepdim)


def _dimensions(rank: int, dim) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    if rank == 0:
        return []
    for d in dims:
        if not -rank <= d < rank:
            raise IndexError(f"dimension {d} is out of range for {rank} dimensions")
    return sorted({d % rank for d in dims})


def _reduce(kind: str, parts: Parts, dims: Sequence[int], components: int, keepdim: bool) -> Parts:
    shape, dtype = parts[0].shape, parts[0].dtype
    if len(dims) == len(shape):
        matrices = tuple([part.reshape(1, -1, 1) for part in parts])
    else:
        before = [d for d in range(dims[0]) if d not in dims]
        behind = [d for d in range(dims[0], len(shape)) if d not in dims]
        sizes = [_size(shape, some) for some in (before, dims, behind)]
        matrices = tuple(part.permute([*before, *dims, *behind]).reshape(sizes) for part in parts)
    made = _mended(kind, matrices, _columns(kind, matrices, components, True))
    if dtype != torch.float64 or len(made) != components:
        made = pointwise("renormalize", made, components=components, dtype=dtype)
    after = [1 if d in dims else shape[d] for d in range(len(shape)) if keepdim or d not in dims]
    return tuple([part.reshape(after) for part in made])


def _size(shape: torch.Size, dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _mended(kind: str, matrices: Parts, made: Parts) -> Parts:
    """Infinities and NaN as the leading components' own sum or product has them."""
    if math.isfinite(made[0].item()) if made[0].numel() == 1 else bool(torch.isfinite(made[0]).all()):
        return made
    head = matrices[0].double()
    plain = head.sum(1) if kind == "sum" else head.prod(1)
    sound = torch.isfinite(made[0])
    return (torch.where(sound, made[0], plain), *(torch.where(sound, part, 0.0) for part in made[1:]))


def _columns(kind: str, matrices: Parts, components: int, raw: bool) -> Parts:
    """The results of every column of (matrices, rows, columns), as float64 components; `raw` are the operand's own."""
    count, rows, columns = matrices[0].shape
    several = -(-_WIDE // max(columns, 1))
    turns = rows // several
    if turns < 2 or not columns or (several == 1 and (turns < 2 * _BLOCK or not raw)):
        return _narrow(kind, matrices, components)
    block = _BLOCK if raw and turns >= 2 * _BLOCK else turns
    blocks = turns // block
    whole = blocks * block * several
    shape = count * blocks, block, several * columns
    wide = tuple([(m if whole == rows else m[:, :whole]).reshape(shape) for m in matrices])
    made = _fold(kind, wide, components, block <= _BLOCK and raw)
    first = tuple([part.view(count, -1, columns) for part in made])
    if whole < rows:
        left = tuple([m[:, whole:] for m in matrices])
        rest = pointwise("renormalize", left, components=len(first), dtype=torch.float64)
        first = tuple([torch.cat(pair, 1) for pair in zip(first, rest)])
    return _columns(kind, first, len(first), False)


def _narrow(kind: str, matrices: Parts, components: int) -> Parts:
    """Few columns but many matrices: the matrices lie side by side."""
    count, rows, columns = matrices[0].shape
    if columns >= _WIDE or count == 1:
        return _fold(kind, matrices, components, rows <= _BLOCK)
    beside = tuple(m.transpose(0, 1).reshape(1, rows, count * columns) for m in matrices)
    return tuple(part.reshape(count, columns) for part in _fold(kind, beside, components, rows <= _BLOCK))


def _held(dtype: torch.dtype, count: int, components: int) -> int:
    """Float64 components that the result is gathered in."""
    if dtype == torch.float64:
        return max(2, components)
    return 2 if PRECISION[dtype] * max(count, components) <= 60 else 3


def _fold(kind: str, matrices: Parts, components: int, short: bool) -> Parts:
    dtype, count = matrices[0].dtype, len(matrices)
    held = _held(dtype, count, components)
    if chosen(matrices[0].device.type) != "numba":
        return _fold_reference(kind, matrices, held, short)
    many, rows, columns = matrices[0].shape
    matrices = tuple([m.contiguous() for m in matrices])
    made = tuple([torch.empty((many, columns), dtype=torch.float64) for _ in range(held)])
    if many and columns:
        words = [rows, columns, *(m.data_ptr() for m in matrices), *(part.data_ptr() for part in made)]
        table = array.array("q", words)
        kernel = _kernel(kind, dtype, count, held, short)
        if many == 1 or many * rows * columns < SERIAL_BELOW:
            kernel(0, many, table.buffer_info()[0])
        else:
            run_chunks(kernel, np.full(many, rows * columns), table.buffer_info()[0])
    return made


def _step(kind: str, dtype: torch.dtype, held: int, short: bool) -> Callable:
    """The next row into what is held."""

    def step(*values) -> Terms:
        sofar, row = list(values[:held]), list(values[held:])
        if dtype != torch.float64:
            row = _gathered(row)
        if kind == "prod":
            return multiplied(sofar, row, held)
        if held > 2 or not short:
            return added(sofar, row, held)
        if dtype != torch.float64:
            # Two float32 fill 48 bits: 16 of them summed in float64 keep what they hold.
            return [sofar[0] + row[0], sofar[1]]
        high, error = two_sum(sofar[0], row[0])
        return [high, sofar[1] + (error + row[1] if len(row) > 1 else error)]

    return step


def _close(kind: str, held: int, short: bool) -> Callable:
    """At most 16 rounding errors were summed plainly: 2^8 u^2 of the sum of magnitudes."""
    if kind == "sum" and held == 2 and short:
        return lambda high, low: list(two_sum(high, low))
    return lambda *values: list(values)


def _gathered(row: Terms) -> Terms:
    """Up to two float32 lie in a float64, three and more in two."""
    if len(row) <= 2:
        return [row[0] + row[1]] if len(row) == 2 else row
    high, low = two_sum(row[0], row[1])
    return list(two_sum(high, low + sum(row[3:], row[2])))


@functools.cache
def _kernel(kind: str, dtype: torch.dtype, count: int, held: int, short: bool) -> Callable:
    start = 0.0 if kind == "sum" else 1.0
    step, close = _step(kind, dtype, held, short), _close(kind, held, short)
    return compile_fold(f"fold_{kind}", step, close, held, start, [dtype] * count)


def _fold_reference(kind: str, matrices: Parts, held: int, short: bool) -> Parts:
    step, (many, rows, columns) = _step(kind, matrices[0].dtype, held, short), matrices[0].shape
    sofar = [torch.zeros((many, columns), dtype=torch.float64, device=matrices[0].device) for _ in range(held)]
    if kind == "prod":
        sofar[0] += 1.0
    wide = [m.double() for m in matrices]
    for k in range(rows):
        sofar = step(*sofar, *(m[:, k] for m in wide))
    return tuple(_close(kind, held, short)(*sofar))


def _implementation(kind: str, parts: list, dims: list, components: int, keepdim: bool) -> list[torch.Tensor]:
    return list(_reduce(kind, tuple(parts), dims, components, keepdim))


def _fake(kind: str, parts: list, dims: list, components: int, keepdim: bool) -> list[torch.Tensor]:
    shape = parts[0].shape
    after = [1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims]
    return [parts[0].new_empty(after) for _ in range(components)]


_operator = define_operator(
    "reduce(str kind, Tensor[] parts, int[] dims, int components, bool keepdim) -> Tensor[]", _implementation, _fake
)
