"""The product of matrices of expansions."""

from __future__ import annotations

import math
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
from ._pointwise import Parts, check_components

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
    _check_matrices(a, b, components, dtype)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        return tuple(_matmul_operator([*a, *b], len(a), components, dtype))
    return _multiply_stacks(a, b, components, dtype)


def _check_matrices(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> None:
    check_components((a[0].dtype, len(a)), (b[0].dtype, len(b)), (dtype, components))
    x, y = a[0].shape, b[0].shape
    if len(x) < 2 or len(y) < 2 or x[-1] != y[-2]:
        raise ValueError(f"matmul takes (..., M, K) and (..., K, N), got {tuple(x)} and {tuple(y)}")


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
        a, b = ([_flatten_batch(part, shape[:-2]) for part in parts] for parts in (a, b))
        made = _multiply_in_chunks(tuple(a), tuple(b), components, dtype)
    return tuple(part.reshape(shape) for part in made)


def _flatten_batch(part: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    return part.expand(*batch, *part.shape[-2:]).reshape(math.prod(batch), *part.shape[-2:])


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
    return multiply_by_slices(_convert_to_float64(a), _convert_to_float64(b), components, dtype)


def _is_like_a_dot_product(outputs: int, inner: int, elements: int) -> bool:
    """Return whether slicing takes longer than computing each entry, by measured costs in microseconds."""
    sliced = 200 * -(-inner // SLICED_BLOCK_LENGTH) + 0.03 * elements + 0.0005 * outputs * inner
    return 250 + 0.02 * outputs * inner < sliced


def _convert_to_float64(parts: Parts) -> Parts:
    return parts if parts[0].dtype == torch.float64 else tuple(part.double() for part in parts)


def _fake_matmul(parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = _find_result_shape(parts[0], parts[count])
    return [parts[0].new_empty(shape, dtype=dtype) for _ in range(components)]


_matmul_operator = define_operator(
    "matmul(Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]",
    lambda parts, count, components, dtype: list(_multiply_stacks(parts[:count], parts[count:], components, dtype)),
    _fake_matmul,
)


_GROUPED_OPERAND_SHAPES = {
    (2, 3): "(M, K) and (G, K, N) with offsets of the rows",
    (3, 2): "(G, M, K) and (K, N) with offsets of the columns",
    (2, 2): "(M, K) and (K, N) with offsets of what is summed over",
    (3, 3): "(G, M, K) and (G, K, N) without offsets",
}


def grouped_matmul(a: Parts, b: Parts, offsets: torch.Tensor | None, components: int, dtype: torch.dtype) -> Parts:
    """Return the products of G groups, as `torch.nn.functional.grouped_mm` does, each with `matmul`'s bounds.

    Group g is what lies from offsets[g - 1] (0 at first) to offsets[g]: of the rows of a 2d `a` and of the columns of
    a 2d `b`, or of the inner dimension where both are 2d; rows and columns behind the last group become 0.

    Args:
        a: (M, K) or (G, M, K), 1 to 4 components.
        b: (G, K, N) or (K, N), likewise.
        offsets: G integers that never decrease; None where both are 3d.
        components: of the result, 1 to 4.
        dtype: of the result.

    Returns:
        The components of (M, N), or of (G, M, N) where both are 2d or both 3d.

    Raises:
        ValueError: shapes that do not match, offsets that decrease or exceed the dimension.

    >>> x = (torch.tensor([[1.0], [2.0], [3.0]]),)
    >>> experts = (torch.tensor([[[10.0]], [[100.0]]]),)
    >>> grouped_matmul(x, experts, torch.tensor([1, 3]), components=1, dtype=torch.float32)[0].flatten().tolist()
    [10.0, 200.0, 300.0]
    """
    _check_grouped_operands(a[0].shape, b[0].shape, offsets)
    if offsets is None:
        return matmul(a, b, components, dtype)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b, offsets)):
        return tuple(_grouped_operator([*a, *b], len(a), offsets, components, dtype))
    return tuple(_multiply_groups([*a, *b], len(a), offsets, components, dtype))


def _check_grouped_operands(a: torch.Size, b: torch.Size, offsets: torch.Tensor | None) -> None:
    kind = _GROUPED_OPERAND_SHAPES.get((len(a), len(b)))
    if kind is None or a[-1] != b[-2] or (offsets is None) != (len(a) == len(b) == 3):
        allowed = "; ".join(_GROUPED_OPERAND_SHAPES.values())
        given = "none" if offsets is None else tuple(offsets.shape)
        raise ValueError(f"grouped_mm takes {allowed}; got {tuple(a)} and {tuple(b)}, offsets {given}")
    groups = next((shape[0] for shape in (a, b) if len(shape) == 3), None)
    if offsets is None:
        if a[0] != b[0]:
            raise ValueError(f"grouped_mm of {a[0]} and {b[0]} groups: allowed are as many on both sides")
    elif offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64) or groups not in (None, len(offsets)):
        raise ValueError(
            f"grouped_mm takes one integer offset for each of {groups or 'the'} groups (int32 or int64), got "
            f"{offsets.dtype} of shape {tuple(offsets.shape)}"
        )


def _find_grouped_shape(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> tuple[Any, ...]:
    shape = (a.shape[-2], b.shape[-1])
    return (offsets.shape[0], *shape) if a.dim() == b.dim() else shape


def _multiply_groups(
    parts: list[torch.Tensor], count: int, offsets: torch.Tensor, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    a, b = (tuple(part.detach() for part in some) for some in (parts[:count], parts[count:]))
    ends = offsets.tolist()
    limit = a[0].shape[0] if b[0].dim() == 3 else b[0].shape[-1] if a[0].dim() == 3 else a[0].shape[-1]
    if [0, *ends] != sorted([0, *ends]) or (ends and ends[-1] > limit):
        raise ValueError(f"grouped_mm takes offsets that never decrease, from 0 to {limit}; got {ends}")
    made = [a[0].new_zeros(_find_grouped_shape(a[0], b[0], offsets), dtype=dtype) for _ in range(components)]
    for group, (start, end) in enumerate(zip([0, *ends], ends)):
        where = slice(start, end)
        left = tuple(_take_group(part, group, where, rows=b[0].dim() == 3) for part in a)
        right = tuple(_take_group(part, group, where, rows=a[0].dim() == 2) for part in b)
        product = matmul(left, right, components, dtype)
        for into, part in zip(made, product, strict=True):
            at = group if a[0].dim() == b[0].dim() else (where if b[0].dim() == 3 else (slice(None), where))
            into[at] = part
    return made


def _take_group(part: torch.Tensor, group: int, where: slice, rows: bool) -> torch.Tensor:
    if part.dim() == 3:
        return part[group]
    return part[where] if rows else part[:, where]


def _fake_grouped_matmul(
    parts: list[torch.Tensor], count: int, offsets: torch.Tensor, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    shape = _find_grouped_shape(parts[0], parts[count], offsets)
    return [parts[0].new_empty(shape, dtype=dtype) for _ in range(components)]


_grouped_operator = define_operator(
    "grouped_matmul(Tensor[] parts, int count, Tensor offsets, int components, ScalarType dtype) -> Tensor[]",
    _multiply_groups,
    _fake_grouped_matmul,
)
