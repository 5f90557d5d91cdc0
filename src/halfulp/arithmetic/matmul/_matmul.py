"""The product of matrices of expansions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ...kernels import define_operator
from ..expansions._pointwise import MOST, PRECISION, Parts
from ._direct import error_direct, multiply_direct
from ._sliced import multiply_sliced
from ._slices import BLOCK
from ._wide import error_wide, multiply, multiply_wide, wide_type

_STACK = 1 << 20  # elements of operands and result that are worked on at a time


@overload
def matmul(a: Parts, b: Parts, components: int, dtype: torch.dtype, error: Literal[False] = False) -> Parts: ...


@overload
def matmul(
    a: Parts, b: Parts, components: int, dtype: torch.dtype, error: Literal[True]
) -> tuple[Parts, torch.Tensor]: ...


def matmul(
    a: Parts, b: Parts, components: int, dtype: torch.dtype, error: bool = False
) -> Parts | tuple[Parts, torch.Tensor]:
    """The product of two matrices of expansions, or of stacks of them.

    One product in a wider native type serves where it holds the digits: float32 for results of two float16 and up to
    three bfloat16, float64 for other results of up to 48 bits. More digits come from products of slices that are exact
    in float64: |error| <= 2^-104 (|A||B|)_ij for two float64, 2^-(n p - 6) for more components. Two float32 are as good
    as the float64 product: a few 2^-53 (|A||B|)_ij where signs vary, up to 2^-49 where they do not, besides rounding to
    two components, which takes up to 2^-49 of the entry. The workspace is a small multiple of the operands and is kept
    for the next call.

    Args:
        a: (..., M, K), 1 to 4 components of float16, bfloat16, float32 or float64.
        b: (..., K, N), likewise; the dimensions before the last two broadcast.
        components: of the result, 1 to 4.
        dtype: of the result.
        error: whether to bound the error too.

    Returns:
        The components of the result, (..., M, N); with `error` a pair of them and a float64 tensor that |error| never
        exceeds, whatever the order of additions in the plain products.
        Infinities and NaNs follow the plain product.

    Raises:
        ValueError: shapes that do not match, or a number of components that is not 1 to 4.
        TypeError: a dtype that is not one of the four.

    >>> import torch
    >>> x = (torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.tensor([[2.0**-60, 0.0]], dtype=torch.float64))
    >>> y = (torch.tensor([[1.0], [-1.0]], dtype=torch.float64),)
    >>> [float(part) for part in matmul(x, y, components=2, dtype=torch.float64)] == [2.0**-60, 0.0]
    True
    """
    _check(a, b, components, dtype)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        made = _operator([*a, *b], len(a), components, dtype, error)
    else:
        made = _run(a, b, components, dtype, error)
    return (tuple(made[:components]), made[components]) if error else tuple(made)


def _check(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> None:
    for kind, count in ((a[0].dtype, len(a)), (b[0].dtype, len(b)), (dtype, components)):
        if kind not in PRECISION:
            raise TypeError(f"components of {kind}: allowed are float16, bfloat16, float32 and float64")
        if not 1 <= count <= MOST:
            raise ValueError(f"{count} components: allowed are 1 to {MOST}")
    x, y = a[0].shape, b[0].shape
    if len(x) < 2 or len(y) < 2 or x[-1] != y[-2]:
        raise ValueError(f"matmul takes (..., M, K) and (..., K, N), got {tuple(x)} and {tuple(y)}")


def _shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    if b.dim() == 2:
        return (*a.shape[:-1], b.shape[-1])
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def _run(a: Sequence[Any], b: Sequence[Any], components: int, dtype: torch.dtype, error: bool) -> list[torch.Tensor]:
    """Return all components of the result, followed by the error bound if requested."""
    a, b = ([part.detach() if part.requires_grad else part for part in parts] for parts in (a, b))
    shape = _shape(a[0], b[0])
    if len(shape) == 2:
        return _multiply(tuple(a), tuple(b), components, dtype, error)
    if b[0].dim() == 2:
        a = [part.reshape(-1, part.shape[-1]) for part in a]
        made = _multiply(tuple(a), tuple(b), components, dtype, error)
    else:
        a, b = ([_stacked(part, shape[:-2]) for part in parts] for parts in (a, b))
        made = _in_pieces(tuple(a), tuple(b), components, dtype, error)
    return [part.reshape(shape) for part in made]


def _stacked(part: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    return part.expand(*batch, *part.shape[-2:]).reshape(math.prod(batch), *part.shape[-2:])


def _in_pieces(a: Parts, b: Parts, components: int, dtype: torch.dtype, error: bool) -> list[torch.Tensor]:
    """Multiply a stack of matrices in chunks that keep the workspace small."""
    count, m, k = a[0].shape
    n = b[0].shape[-1]
    step = max(1, _STACK // max(1, m * k + k * n + m * n))
    if count <= step and count != 1:
        return _multiply(a, b, components, dtype, error)
    pieces = []
    for first in range(0, count, step):
        at = first if step == 1 or count == 1 else slice(first, first + step)
        pieces.append(_multiply(tuple(p[at] for p in a), tuple(p[at] for p in b), components, dtype, error))
    join = torch.stack if step == 1 or count == 1 else torch.cat
    return [join(parts) for parts in zip(*pieces, strict=True)]


def _multiply(a: Parts, b: Parts, components: int, dtype: torch.dtype, error: bool) -> list[torch.Tensor]:
    """Multiply matrices, or one stack of them, by the method that suits them."""
    shape, inner = (*a[0].shape[:-1], b[0].shape[-1]), a[0].shape[-1]
    outputs = torch.Size(shape).numel()
    if not outputs or not inner:
        made = tuple(a[0].new_zeros(shape, dtype=dtype) for _ in range(components))
        return [*made, *([a[0].new_zeros(shape, dtype=torch.float64)] if error else [])]
    if (
        len(a) == len(b) == components == 1
        and a[0].dtype == b[0].dtype == dtype
        and dtype in (torch.float32, torch.float64)
    ):
        made = (a[0].new_empty(shape),)
        multiply(a[0], b[0], made[0])
        return [*made, *([error_wide(a, b, made, dtype)] if error else [])]
    work = wide_type((a, b), components, dtype)
    if work is not None:
        made = multiply_wide(a, b, components, dtype, work)
        return [*made, *([error_wide(a, b, made, work)] if error else [])]
    if _is_like_a_dot_product(outputs, inner, a[0].numel() + b[0].numel()):
        made = multiply_direct(a, b, components, dtype)
        return [*made, *([error_direct(a, b, components, dtype)] if error else [])]
    a, b = (_for_slices(parts) for parts in (a, b))
    made, bound = multiply_sliced(a, b, components, dtype, error)
    return [*made, *([] if bound is None else [bound])]


def _is_like_a_dot_product(outputs: int, inner: int, elements: int) -> bool:
    """Return whether slicing takes longer than computing each entry, by measured costs in microseconds."""
    sliced = 200 * -(-inner // BLOCK) + 0.03 * elements + 0.0005 * outputs * inner
    return 250 + 0.02 * outputs * inner < sliced


def _for_slices(parts: Parts) -> Parts:
    return parts if parts[0].dtype == torch.float64 else tuple(part.double() for part in parts)


def _implementation(
    parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype, error: bool
) -> list[torch.Tensor]:
    return _run(parts[:count], parts[count:], components, dtype, error)


def _fake(
    parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype, error: bool
) -> list[torch.Tensor]:
    shape = _shape(parts[0], parts[count])
    made = [parts[0].new_empty(shape, dtype=dtype) for _ in range(components)]
    return [*made, *([parts[0].new_empty(shape, dtype=torch.float64)] if error else [])]


_operator = define_operator(
    "matmul(Tensor[] parts, int count, int components, ScalarType dtype, bool error) -> Tensor[]",
    _implementation,
    _fake,
)
