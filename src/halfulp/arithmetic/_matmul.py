"""The product of matrices of expansions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels import define_operator
from ._exact_products import (
    SLICED_BLOCK_LENGTH,
    choose_wide_type,
    multiply_by_slices,
    multiply_in_wide_type,
    multiply_plain_matrices,
    multiply_small_matrices,
)
from ._pointwise import Parts, check_component_dtypes

_STACK_ELEMENTS = 1 << 20  # elements of operands and result that are worked on at a time


def matmul(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the product of two matrices of expansions, or of stacks of them.

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

    Returns:
        The components of the result, (..., M, N). Infinities and NaNs follow the plain product.

    Raises:
        ValueError: shapes that do not match, or a number of components that is not 1 to 4.
        TypeError: a dtype that is not one of the four.

    >>> import torch
    >>> x = (torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.tensor([[2.0**-60, 0.0]], dtype=torch.float64))
    >>> y = (torch.tensor([[1.0], [-1.0]], dtype=torch.float64),)
    >>> [float(part) for part in matmul(x, y, components=2, dtype=torch.float64)] == [2.0**-60, 0.0]
    True
    """
    check_component_dtypes((a[0].dtype, len(a)), (b[0].dtype, len(b)), (dtype, components))
    x, y = a[0].shape, b[0].shape
    if len(x) < 2 or len(y) < 2 or x[-1] != y[-2]:
        raise ValueError(f"matmul takes (..., M, K) and (..., K, N), got {tuple(x)} and {tuple(y)}")
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        return tuple(_matmul_operator([*a, *b], len(a), components, dtype))
    return _multiply_stacks(a, b, components, dtype)


def _find_result_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    if b.dim() == 2:
        return (*a.shape[:-1], b.shape[-1])
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def _multiply_stacks(a: Sequence[Any], b: Sequence[Any], components: int, dtype: torch.dtype) -> Parts:
    a, b = ([part.detach() if part.requires_grad else part for part in parts] for parts in (a, b))
    shape = _find_result_shape(a[0], b[0])
    if len(shape) == 2:
        return _multiply_matrices(tuple(a), tuple(b), components, dtype)
    if b[0].dim() == 2:
        a = [part.reshape(-1, part.shape[-1]) for part in a]
        made = _multiply_matrices(tuple(a), tuple(b), components, dtype)
    else:
        a, b = ([part.expand(*shape[:-2], *part.shape[-2:]).flatten(0, -3) for part in parts] for parts in (a, b))
        made = _multiply_in_chunks(tuple(a), tuple(b), components, dtype)
    return tuple(part.reshape(shape) for part in made)


def _multiply_in_chunks(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Multiply a stack of matrices in chunks that keep the workspace small."""
    count, m, k = a[0].shape
    n = b[0].shape[-1]
    step = max(1, _STACK_ELEMENTS // max(1, m * k + k * n + m * n))
    if count <= step and count != 1:
        return _multiply_matrices(a, b, components, dtype)
    pieces = []
    for first in range(0, count, step):
        at = first if step == 1 or count == 1 else slice(first, first + step)
        pieces.append(_multiply_matrices(tuple(p[at] for p in a), tuple(p[at] for p in b), components, dtype))
    join = torch.stack if step == 1 or count == 1 else torch.cat
    return tuple(join(parts) for parts in zip(*pieces, strict=True))


def _multiply_matrices(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Multiply matrices, or one stack of them, by the method that suits them."""
    shape, inner = (*a[0].shape[:-1], b[0].shape[-1]), a[0].shape[-1]
    outputs = torch.Size(shape).numel()
    if not outputs or not inner:
        return tuple(a[0].new_zeros(shape, dtype=dtype) for _ in range(components))
    if (
        len(a) == len(b) == components == 1
        and a[0].dtype == b[0].dtype == dtype
        and dtype in (torch.float32, torch.float64)
    ):
        made = a[0].new_empty(shape)
        multiply_plain_matrices(a[0], b[0], made)
        return (made,)
    work = choose_wide_type((a, b), components, dtype)
    if work is not None:
        return multiply_in_wide_type(a, b, components, dtype, work)
    if _is_like_a_dot_product(outputs, inner, a[0].numel() + b[0].numel()):
        return multiply_small_matrices(a, b, components, dtype)
    return multiply_by_slices(tuple(x.double() for x in a), tuple(x.double() for x in b), components, dtype)


def _is_like_a_dot_product(outputs: int, inner: int, elements: int) -> bool:
    """Return whether slicing takes longer than computing each entry, by measured costs in microseconds."""
    sliced = 200 * -(-inner // SLICED_BLOCK_LENGTH) + 0.03 * elements + 0.0005 * outputs * inner
    return 250 + 0.1 * outputs * inner < sliced


def _fake_matmul(parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = _find_result_shape(parts[0], parts[count])
    return [parts[0].new_empty(shape, dtype=dtype) for _ in range(components)]


_matmul_operator = define_operator(
    "matmul(Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]",
    lambda parts, count, components, dtype: list(_multiply_stacks(parts[:count], parts[count:], components, dtype)),
    _fake_matmul,
)
