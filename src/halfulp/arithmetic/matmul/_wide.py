"""A product of matrices of expansions by one product in a wider type: merged, multiplied, split."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..._torch_versions import has_whole_products
from ...kernels import is_finite, select
from .._error_free import Terms, distill, two_product, two_sum
from .._operators import finished, round_to_components
from .._workspace import workspace
from ..expansions._pointwise import MOST, PRECISION, Elements, Parts, pointwise

_PRODUCTS_AT_ONCE = 1 << 18  # products that exist at a time
_AT_ONCE = 8  # products that one pass sums


def multiply_direct(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """a @ b for small matrices, or stacks of them."""
    left = tuple(part.movedim(-1, 0).unsqueeze(-1) for part in a)
    right = tuple(part.movedim(-2, 0).unsqueeze(-2) for part in b)
    return sum_of_products(left, right, components, dtype)


def error_direct(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a bound of the error of `multiply_direct`: the last rounding, and much less from the sum."""
    bits = components * PRECISION[dtype]
    sums = torch.matmul(a[0].double().abs(), b[0].double().abs())
    # Four float64 components are summed with no component more.
    return sums * 2.0 ** ((2 if bits <= 160 else 10) - bits) + 16 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def multiply_entries(
    a: Parts, b: Parts, entries: tuple[torch.Tensor, ...], components: int, dtype: torch.dtype
) -> Parts:
    """Compute single entries of a @ b, given by one index tensor per dimension."""
    *batch, row, column = entries
    count, inner = len(row), a[0].shape[-1]
    step = max(1, 4 * _PRODUCTS_AT_ONCE // inner)
    pieces = []
    for first in range(0, count, step):
        part = slice(first, first + step)
        stack = tuple(index[part] for index in batch)
        left = tuple(x[(*stack, row[part])].t() for x in a)
        right = tuple(x.mT[(*stack, column[part])].t() for x in b)
        pieces.append(sum_of_products(left, right, components, dtype))
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def sum_of_products(left: Parts, right: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the sum over the first dimension of left times right, which broadcast in the others."""
    shape = torch.broadcast_shapes(left[0].shape, right[0].shape)[1:]
    few = components * PRECISION[dtype] <= 106 and max(len(left), len(right)) <= 2
    one_piece, add, result = (_cascaded, _add_cascades, _cascade_result) if few else (_multiply_expanded, _add, _same)
    step = max(_AT_ONCE, _PRODUCTS_AT_ONCE // max(1, shape.numel()) // _AT_ONCE * _AT_ONCE)
    pieces = []
    for first in range(0, left[0].shape[0], step):
        x, y = (_dense(parts, slice(first, first + step), shape) for parts in (left, right))
        pieces.append(one_piece(x, y, components, dtype))
    stacked = tuple(torch.stack(parts) for parts in zip(*pieces, strict=True))
    known = result(_sum_by_halves(add, stacked))
    return pointwise("renormalize", tuple(x.reshape(shape) for x in known), components=components, dtype=dtype)


def _dense(parts: Parts, piece: slice, shape: torch.Size) -> Parts:
    """Return the piece as (products, results), with zeros up to a whole number of passes."""
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
    return _sum_by_halves(_add_cascades, out)


def _sum_by_halves(join: Callable[[Parts, Parts], Parts], parts: Parts) -> Parts:
    """Sum over the first dimension with `join`, by halves."""
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
    def add_products(*values: Any) -> Terms:
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


def _product(x: Sequence[Any], y: Sequence[Any]) -> Terms:
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


def _add_terms(x: Sequence[Any], y: Sequence[Any]) -> Terms:
    first, second = two_sum(x[0], y[0])
    middle, third = two_sum(x[1], y[1])
    second, rest = two_sum(second, middle)
    return [first, second, (x[2] + y[2]) + (third + rest), x[3] + y[3]]


def _multiply_expanded(x: Parts, y: Parts, components: int, dtype: torch.dtype) -> Parts:
    working = min(MOST, -(-(components * PRECISION[dtype] + 4) // 53) + (dtype == torch.float64))
    products = pointwise("mul", x, y, components=working, dtype=torch.float64)
    return _sum_by_halves(_add, products)


def _add(x: Parts, y: Parts) -> Parts:
    return pointwise("add", x, y, components=len(x), dtype=torch.float64)


def _same(sums: Parts) -> Parts:
    return sums


_PIECE = 512  # inner length from which on a product is taken in pieces
_MOST_PIECES = 4
_NARROW = (torch.float16, torch.bfloat16)
# Bits of a float32 that go in rounding to the type, and the type's smallest subnormal.
_CUT = {torch.float16: (13, 2.0**-24), torch.bfloat16: (16, 2.0**-133)}
_LARGEST = {torch.float16: 65504.0}


def wide_type(operands: tuple[Parts, Parts], components: int, dtype: torch.dtype) -> torch.dtype | None:
    """Return the native type in which a product has the result's digits and a few more; None where there is none."""
    bits = components * PRECISION[dtype]
    if dtype in _NARROW and bits <= 24 and all(parts[0].dtype != torch.float64 for parts in operands):
        return torch.float32
    return torch.float64 if bits <= 48 else None


def multiply_wide(a: Parts, b: Parts, components: int, dtype: torch.dtype, work: torch.dtype) -> Parts:
    """a @ b for matrices or stacks of them, in `work` and rounded to components."""
    shape = (*a[0].shape[:-1], b[0].shape[-1])
    written = tuple([torch.empty(shape, dtype=dtype, device=a[0].device) for _ in range(components)])
    direct = components == 1 and dtype == work
    merged = [parts for parts in (a, b) if len(parts) > 1 or parts[0].dtype != work]
    # Where the result has nearly the digits of the product, long sums lose some of them: several are added exactly.
    long = work == torch.float64 and components * PRECISION[dtype] > 40
    pieces = max(1, min(_MOST_PIECES, a[0].shape[-1] // _PIECE)) if long else 1
    layout = (*((tuple(parts[0].shape), work) for parts in merged), *([] if direct else [(shape, work)] * pieces))
    with workspace((layout,), a[0].device) as ((*scratch,),):
        rest = iter(scratch)
        x, y = (_merge(parts, next(rest)) if any(parts is z for z in merged) else parts[0] for parts in (a, b))
        scratch = list(rest)
        _multiply_pieces(x, y, written[:1] if direct else scratch)
        if not direct:
            _splitter(work, dtype, components, pieces)(scratch, written)
    return written


def _merge(parts: Parts, out: torch.Tensor) -> torch.Tensor:
    """Return the sum of all components, in the scratch memory's type."""
    _merger(out.dtype, parts[0].dtype, len(parts))(parts, (out,))
    return out


def _multiply_pieces(x: torch.Tensor, y: torch.Tensor, products: Sequence[torch.Tensor]) -> None:
    """Multiply equal parts of the inner dimension, each product into a tensor of its own."""
    inner, count = x.shape[-1], len(products)
    for k, out in enumerate(products):
        part = slice(inner * k // count, inner * (k + 1) // count)
        left, right = (x, y) if count == 1 else (x[..., part], y[..., part, :])
        multiply(left, right, out)


def error_wide(a: Parts, b: Parts, product: Parts, work: torch.dtype) -> torch.Tensor:
    """Return a bound of the error of `multiply_wide`: any order of additions, merging, and the last rounding."""
    count, components, dtype = a[0].shape[-1], len(product), product[0].dtype
    merged = [functools.reduce(torch.add, (part.double().abs() for part in parts)) for parts in (a, b)]
    sums = torch.matmul(*merged)
    unit = 2.0 ** -PRECISION[work]
    lost = (2 * count + 4) * unit / (1 - 2 * (count + 4) * unit)
    size = product[0].double().abs()
    tiny = components * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return sums * (lost * (1 + 2.0**-20)) + size * 2.0 ** (1 - components * PRECISION[dtype]) + tiny


@contextlib.contextmanager
def single_product(a: Parts, b: Parts) -> Iterator[torch.Tensor]:
    """a @ b of float16 components in float32, whose range holds it; in scratch memory, for the length of a block.

    Args:
        a: (M, K) or (B, M, K).
        b: (K, N) or (B, K, N).

    >>> half = torch.ones(2, 2, dtype=torch.float16)
    >>> with single_product((half * 60000,), (half * 2,)) as product:
    ...     product[0].tolist()
    [240000.0, 240000.0]
    """
    shapes = a[0].shape, b[0].shape, (*a[0].shape[:-1], b[0].shape[-1])
    with workspace((tuple((tuple(shape), torch.float32) for shape in shapes),), a[0].device) as ((left, right, out),):
        multiply(_merge(a, left), _merge(b, right), out)
        yield out


def largest_magnitude(x: torch.Tensor) -> float:
    """Return the largest magnitude of a tensor with elements; NaN if any is NaN.

    >>> largest_magnitude(torch.tensor([1.0, -3.0]))
    3.0
    """
    # Two reductions that torch vectorizes: aminmax is slower than both, the norm by infinity twenty times slower.
    return max(-float(x.amin()), float(x.amax()))


def half_components(x: torch.Tensor, factor: float, components: int) -> Parts:
    """Return a float32 tensor on the CPU times a power of two as float16 components, if all |x factor| < 2^15.

    >>> [part.item() for part in half_components(torch.tensor(3.0), 0.5, 2)]
    [1.5, 0.0]
    """
    written = tuple([torch.empty((*x.shape,), dtype=torch.float16, device=x.device) for _ in range(components)])
    _half_cutter(components)((x, _kept(factor)), written)
    return written


@functools.lru_cache(512)
def _kept(factor: float) -> torch.Tensor:
    return torch.tensor(factor, dtype=torch.float32, device="cpu")


@functools.cache
def _half_cutter(components: int) -> Elements:
    def scale_and_cut(x: Any, factor: Any) -> Terms:
        rest, out = x * factor, []
        for _ in range(components - 1):
            out.append(_nearest(rest, torch.float16))
            rest = rest - out[-1]
        # Storing rounds the last one.
        return [*out, rest]

    inputs = (torch.float32, torch.float32)
    return Elements("matmul_half", scale_and_cut, torch.float32, inputs, (torch.float16,) * components)


@functools.cache
def _merger(work: torch.dtype, dtype: torch.dtype, count: int) -> Elements:
    def add_up(*parts: Any) -> Terms:
        total = parts[-1]
        for part in parts[-2::-1]:
            total = part + total
        return [total + 0.0 if len(parts) == 1 else total]

    return Elements("matmul_merge", add_up, work, (dtype,) * count, (work,))


@functools.cache
def _splitter(work: torch.dtype, dtype: torch.dtype, components: int, pieces: int) -> Elements:
    def cut(*products: Any) -> Terms:
        if work == torch.float32:
            return _cut_components(products[0], dtype, components)
        terms = list(products)
        if pieces > 1:
            terms = finished(functools.reduce(operator.add, terms), distill(terms, 2))
        return round_to_components(terms, dtype, components) if dtype != work else terms[:1]

    return Elements("matmul_split", cut, work, (work,) * pieces, (dtype,) * components)


def _cut_components(x: Any, dtype: torch.dtype, components: int) -> Terms:
    """Return a float32 as 16-bit components, each the nearest."""
    largest = _LARGEST.get(dtype)
    huge = abs(x) > 2.0**100
    rest, grow = x * select(huge, 2.0**-40, 1.0), select(huge, 2.0**40, 1.0)
    out = []
    for _ in range(components):
        head = _nearest(rest, dtype)
        rest = rest - head
        out.append(head * grow)
    head = select(is_finite(x), out[0], x)
    if largest is not None:
        head = select(abs(head) > largest, head * float("inf"), head)
    return [head, *(select(is_finite(head), part, 0.0) for part in out[1:])]


def _nearest(x: Any, dtype: torch.dtype) -> Any:
    """Return a float32 below 2^100 as a 16-bit number (Veltkamp 1968; below the normal numbers by a fixed grid)."""
    bits, smallest = _CUT[dtype]
    magic, far = 1.5 * 2.0**23 * smallest, x * (2.0**bits + 1.0)
    return select(abs(x) < smallest * 2.0 ** (24 - bits), (x + magic) - magic, far - (far - x))


def multiply(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """x @ y into `out`: matrices or stacks of as many, float32 or float64.

    `torch.set_float32_matmul_precision` and `torch.backends` may let torch multiply float32 matrices in TensorFloat32
    or bfloat16. Then this one takes float64, and rounds.
    """
    function = torch.mm if x.dim() == 2 else torch.bmm
    if x.dtype == torch.float32 and not has_whole_products(x.device.type):
        out.copy_(function(x.double(), y.double()))
    else:
        function(x, y, out=out)
