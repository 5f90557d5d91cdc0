"""A product of matrices of expansions entry by entry: products and their sum in one pass, whatever the range.

Two components follow the cascaded dot product of Ogita, Rump and Oishi (2005): sums of one order of magnitude each,
whose rounding errors go to the next; the error is of order K u^3 |a||b|.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .._error_free import Terms, distill, two_product, two_sum
from ..expansions._operators import finished
from ..expansions._pointwise import MOST, PRECISION, Elements, Parts, pointwise

_PIECE = 1 << 18  # products that exist at a time
_AT_ONCE = 8  # products that one pass sums


def multiply_direct(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """a @ b for small matrices, or stacks of them."""
    left = tuple(part.movedim(-1, 0).unsqueeze(-1) for part in a)
    right = tuple(part.movedim(-2, 0).unsqueeze(-2) for part in b)
    return sum_of_products(left, right, components, dtype)


def error_direct(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> torch.Tensor:
    """A bound of what `multiply_direct` is off by: the last rounding, and much less from the sum."""
    bits = components * PRECISION[dtype]
    sums = torch.matmul(a[0].double().abs(), b[0].double().abs())
    # Four float64 components are summed with no component more.
    return sums * 2.0 ** ((2 if bits <= 160 else 10) - bits) + 16 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def multiply_entries(
    a: Parts, b: Parts, entries: tuple[torch.Tensor, ...], components: int, dtype: torch.dtype
) -> Parts:
    """Single entries of a @ b, given by one index tensor per dimension."""
    *batch, row, column = entries
    count, inner = len(row), a[0].shape[-1]
    step = max(1, 4 * _PIECE // inner)
    pieces = []
    for first in range(0, count, step):
        part = slice(first, first + step)
        stack = tuple(index[part] for index in batch)
        left = tuple(x[(*stack, row[part])].t() for x in a)
        right = tuple(x.mT[(*stack, column[part])].t() for x in b)
        pieces.append(sum_of_products(left, right, components, dtype))
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def sum_of_products(left: Parts, right: Parts, components: int, dtype: torch.dtype) -> Parts:
    """The sum over the first dimension of left times right, which broadcast in the others."""
    shape = torch.broadcast_shapes(left[0].shape, right[0].shape)[1:]
    few = components * PRECISION[dtype] <= 106 and max(len(left), len(right)) <= 2
    one_piece, add, result = (_cascaded, _add_cascades, _cascade_result) if few else (_expanded, _added, _same)
    step = max(_AT_ONCE, _PIECE // max(1, shape.numel()) // _AT_ONCE * _AT_ONCE)
    pieces = []
    for first in range(0, left[0].shape[0], step):
        x, y = (_dense(parts, slice(first, first + step), shape) for parts in (left, right))
        pieces.append(one_piece(x, y, components, dtype))
    stacked = tuple(torch.stack(parts) for parts in zip(*pieces, strict=True))
    known = result(_halved_by(add, stacked))
    return pointwise("renormalize", tuple(x.reshape(shape) for x in known), components=components, dtype=dtype)


def _dense(parts: Parts, piece: slice, shape: torch.Size) -> Parts:
    """The piece as (products, results), with zeros up to a whole number of passes."""
    out = []
    for part in parts:
        values = part[piece]
        rows = -(-values.shape[0] // _AT_ONCE) * _AT_ONCE
        dense = part.new_empty((rows, *shape))
        dense[: values.shape[0]] = values
        dense[values.shape[0] :] = 0
        out.append(dense.view(rows, -1))
    return tuple(out)


def _cascaded(x: Parts, y: Parts, components: int, dtype: torch.dtype) -> Parts:
    rows = x[0].shape[0] // _AT_ONCE
    chunks = [part[k * rows : (k + 1) * rows] for k in range(_AT_ONCE) for part in (*x, *y)]
    out = tuple(torch.empty_like(chunks[0], dtype=torch.float64) for _ in range(4))
    _cascade(x[0].dtype, len(x), y[0].dtype, len(y))(chunks, out)
    return _halved_by(_add_cascades, out)


def _halved_by(join: Callable, parts: Parts) -> Parts:
    """The sum over the first dimension, by halves."""
    while parts[0].shape[0] > 1:
        count = parts[0].shape[0]
        half = (count + 1) // 2
        merged = join(tuple(part[: count - half] for part in parts), tuple(part[half:] for part in parts))
        middle = [part[count - half : half] for part in parts]
        parts = merged if count == 2 * half else tuple(map(torch.cat, zip(merged, middle, strict=True)))
    return tuple(part[0] for part in parts)


def _add_cascades(x: Parts, y: Parts) -> Parts:
    out = tuple(torch.empty_like(part) for part in x)
    _join()([*x, *y], out)
    return out


def _cascade_result(sums: Parts) -> Parts:
    out = tuple(torch.empty_like(sums[0]) for _ in range(2))
    _close()(sums, out)
    return out


@functools.cache
def _cascade(left: torch.dtype, a: int, right: torch.dtype, b: int) -> Elements:
    def add_products(*values) -> Terms:
        sums = _product(values[:a], values[a : a + b])
        for k in range(a + b, len(values), a + b):
            sums = _add_terms(sums, _product(values[k : k + a], values[k + a : k + a + b]))
        return sums

    inputs = ((left,) * a + (right,) * b) * _AT_ONCE
    return Elements("matmul_products", add_products, torch.float64, inputs, (torch.float64,) * 4)


@functools.cache
def _join() -> Elements:
    double = torch.float64
    return Elements("matmul_join", lambda *x: _add_terms(x[:4], x[4:]), double, (double,) * 8, (double,) * 4)


@functools.cache
def _close() -> Elements:
    double = torch.float64
    close = lambda *x: finished(x[3], distill(list(x[:3]), 2))  # noqa: E731
    return Elements("matmul_close", close, double, (double,) * 4, (double,) * 2)


def _product(x: tuple, y: tuple) -> Terms:
    """x y by order of magnitude, and the plain product."""
    first, second = two_product(x[0], y[0])
    plain, third = first, x[0] * 0.0
    crossed = [(x[0], part) for part in y[1:]] + [(part, y[0]) for part in x[1:]]
    for p, q in crossed:
        high, low = two_product(p, q)
        second, rest = two_sum(second, high)
        third = third + (low + rest)
    if len(x) > 1 and len(y) > 1:
        third = third + x[1] * y[1]
    return [first, second, third, plain]


def _add_terms(x: Sequence, y: Sequence) -> Terms:
    first, second = two_sum(x[0], y[0])
    middle, third = two_sum(x[1], y[1])
    second, rest = two_sum(second, middle)
    return [first, second, (x[2] + y[2]) + (third + rest), x[3] + y[3]]


def _expanded(x: Parts, y: Parts, components: int, dtype: torch.dtype) -> Parts:
    working = min(MOST, -(-(components * PRECISION[dtype] + 4) // 53) + (dtype == torch.float64))
    products = pointwise("mul", x, y, components=working, dtype=torch.float64)
    return _halved_by(_added, products)


def _added(x: Parts, y: Parts) -> Parts:
    return pointwise("add", x, y, components=len(x), dtype=torch.float64)


def _same(sums: Parts) -> Parts:
    return sums
