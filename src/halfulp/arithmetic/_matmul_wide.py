"""A product of matrices of expansions by one product in a wider type: merged, multiplied, split."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from ..kernels import is_finite, select
from ._fused import Fused
from ._lowering import lowered
from ._networks import finished
from ._pointwise import PRECISION, Parts
from ._transforms import Terms, distill
from ._workspace import workspace

_PIECE = 512  # inner length from which on a product is taken in pieces
_MOST_PIECES = 4
_NARROW = (torch.float16, torch.bfloat16)
# Bits of a term that leave after rounding to the type, its smallest subnormal, its largest number.
_CUT = {torch.float16: (13, 2.0**-24, 65504.0), torch.bfloat16: (16, 2.0**-133, None)}


def wide_type(operands: tuple[Parts, Parts], components: int, dtype: torch.dtype) -> torch.dtype | None:
    """The native type in which a product has the result's digits and a few more; None where there is none."""
    bits = components * PRECISION[dtype]
    if dtype in _NARROW and bits <= 24 and all(parts[0].dtype != torch.float64 for parts in operands):
        # "high" and "medium" let torch multiply float32 matrices in fewer bits.
        return torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
    return torch.float64 if bits <= 48 else None


def multiply_wide(a: Parts, b: Parts, components: int, dtype: torch.dtype, work: torch.dtype) -> Parts:
    """a @ b for matrices or stacks of them, in `work` and rounded to components."""
    shape = (*a[0].shape[:-1], b[0].shape[-1])
    written = tuple(torch.empty(shape, dtype=dtype, device=a[0].device) for _ in range(components))
    direct = components == 1 and dtype == work
    merged = [parts for parts in (a, b) if len(parts) > 1 or parts[0].dtype != work]
    # Where the result has nearly the digits of the product, long sums lose some of them: several are added exactly.
    long = work == torch.float64 and components * PRECISION[dtype] > 40
    pieces = max(1, min(_MOST_PIECES, a[0].shape[-1] // _PIECE)) if long else 1
    layout = (*((tuple(parts[0].shape), work) for parts in merged), *([] if direct else [(shape, work)] * pieces))
    with workspace((layout,), a[0].device) as ((*scratch,),):
        factors = []
        for parts in (a, b):
            if any(parts is other for other in merged):
                factors.append(scratch.pop(0))
                _merger(work, parts[0].dtype, len(parts))(parts, factors[-1:])
            else:
                factors.append(parts[0])
        _multiply_pieces(*factors, written[:1] if direct else scratch)
        if not direct:
            _splitter(work, dtype, components, pieces)(scratch, written)
    return written


def _multiply_pieces(x: torch.Tensor, y: torch.Tensor, products: Sequence[torch.Tensor]) -> None:
    """Products of equal parts of the inner dimension, one into each tensor."""
    inner, count = x.shape[-1], len(products)
    for k, out in enumerate(products):
        part = slice(inner * k // count, inner * (k + 1) // count)
        left, right = (x, y) if count == 1 else (x[..., part], y[..., part, :])
        (torch.mm if x.dim() == 2 else torch.bmm)(left, right, out=out)


def error_wide(a: Parts, b: Parts, product: Parts, work: torch.dtype) -> torch.Tensor:
    """A bound of what `multiply_wide` is off by: every order of additions, merging, and the last rounding."""
    count, components, dtype = a[0].shape[-1], len(product), product[0].dtype
    merged = [functools.reduce(torch.add, (part.double().abs() for part in parts)) for parts in (a, b)]
    sums = torch.matmul(*merged)
    unit = 2.0 ** -PRECISION[work]
    lost = (2 * count + 4) * unit / (1 - 2 * (count + 4) * unit)
    size = product[0].double().abs()
    tiny = components * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return sums * (lost * (1 + 2.0**-20)) + size * 2.0 ** (1 - components * PRECISION[dtype]) + tiny


def single_product(a: Parts, b: Parts) -> torch.Tensor:
    """a @ b of 16-bit components in float32 on the CPU, whatever the range of their own type.

    >>> half = torch.ones(2, 2, dtype=torch.float16)
    >>> single_product((half * 60000,), (half * 2,))[0].tolist()
    [240000.0, 240000.0]
    """
    factors = []
    for parts in (a, b):
        factors.append(torch.empty(parts[0].shape, dtype=torch.float32))
        _merger(torch.float32, parts[0].dtype, len(parts))(parts, factors[-1:])
    return torch.matmul(*factors)


def cut(product: torch.Tensor, factor: float, components: int, dtype: torch.dtype) -> Parts:
    """A float32 tensor times a power of two as 16-bit components.

    >>> [part.item() for part in cut(torch.tensor(3.0), 0.5, 2, torch.float16)]
    [1.5, 0.0]
    """
    written = tuple(
        torch.empty_like(product, dtype=dtype, memory_format=torch.contiguous_format) for _ in range(components)
    )
    _scaling_splitter(dtype, components)((product, torch.tensor(factor, dtype=torch.float32)), written)
    return written


@functools.cache
def _scaling_splitter(dtype: torch.dtype, components: int) -> Fused:
    def scale_and_cut(x, factor) -> Terms:
        return _cut(x * factor, dtype, components)

    inputs = (torch.float32, torch.float32)
    return Fused("matmul_scaled_split", scale_and_cut, torch.float32, inputs, (dtype,) * components)


@functools.cache
def _merger(work: torch.dtype, dtype: torch.dtype, count: int) -> Fused:
    def add_up(*parts) -> Terms:
        total = parts[-1]
        for part in parts[-2::-1]:
            total = part + total
        return [total + 0.0 if len(parts) == 1 else total]

    return Fused("matmul_merge", add_up, work, (dtype,) * count, (work,))


@functools.cache
def _splitter(work: torch.dtype, dtype: torch.dtype, components: int, pieces: int) -> Fused:
    def cut(*products) -> Terms:
        if work == torch.float32:
            return _cut(products[0], dtype, components)
        terms = list(products)
        if pieces > 1:
            terms = finished(functools.reduce(operator.add, terms), distill(terms, 2))
        return lowered(terms, dtype, components) if dtype != work else terms[:1]

    return Fused("matmul_split", cut, work, (work,) * pieces, (dtype,) * components)


def _cut(x, dtype: torch.dtype, components: int) -> Terms:
    """A float32 as 16-bit components, each the nearest (Veltkamp 1968; below the normal numbers by a fixed grid)."""
    bits, smallest, largest = _CUT[dtype]
    huge = abs(x) > 2.0**100
    rest, grow = x * select(huge, 2.0**-40, 1.0), select(huge, 2.0**40, 1.0)
    magic, out = 1.5 * 2.0**23 * smallest, []
    for _ in range(components):
        far = rest * (2.0**bits + 1.0)
        head = far - (far - rest)
        head = select(abs(rest) < smallest * 2.0 ** (24 - bits), (rest + magic) - magic, head)
        rest = rest - head
        out.append(head * grow)
    head = select(is_finite(x), out[0], x)
    if largest is not None:
        head = select(abs(head) > largest, head * float("inf"), head)
    return [head, *(select(is_finite(head), part, 0.0) for part in out[1:])]
