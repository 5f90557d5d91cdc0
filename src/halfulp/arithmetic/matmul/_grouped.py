"""Products of groups of rows or columns: one matrix for each expert of a mixture."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import define_operator
from ..expansions._pointwise import Parts
from ._matmul import matmul

_KINDS = {
    (2, 3): "(M, K) and (G, K, N) with offsets of the rows",
    (3, 2): "(G, M, K) and (K, N) with offsets of the columns",
    (2, 2): "(M, K) and (K, N) with offsets of what is summed over",
    (3, 3): "(G, M, K) and (G, K, N) without offsets",
}


def grouped_matmul(a: Parts, b: Parts, offsets: torch.Tensor | None, components: int, dtype: torch.dtype) -> Parts:
    """The products of G groups, as `torch.nn.functional.grouped_mm`; each with `matmul`'s bounds.

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
    _check(a[0].shape, b[0].shape, offsets)
    if offsets is None:
        return matmul(a, b, components, dtype)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b, offsets)):
        return tuple(_operator([*a, *b], len(a), offsets, components, dtype))
    return tuple(_run([*a, *b], len(a), offsets, components, dtype))


def _check(a: torch.Size, b: torch.Size, offsets: torch.Tensor | None) -> None:
    kind = _KINDS.get((len(a), len(b)))
    if kind is None or a[-1] != b[-2] or (offsets is None) != (len(a) == len(b) == 3):
        allowed = "; ".join(_KINDS.values())
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


def _shape(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> tuple[Any, ...]:
    shape = (a.shape[-2], b.shape[-1])
    return (offsets.shape[0], *shape) if a.dim() == b.dim() else shape


def _run(
    parts: list[torch.Tensor], count: int, offsets: torch.Tensor, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    a, b = (tuple(part.detach() for part in some) for some in (parts[:count], parts[count:]))
    ends = offsets.tolist()
    limit = a[0].shape[0] if b[0].dim() == 3 else b[0].shape[-1] if a[0].dim() == 3 else a[0].shape[-1]
    if [0, *ends] != sorted([0, *ends]) or (ends and ends[-1] > limit):
        raise ValueError(f"grouped_mm takes offsets that never decrease, from 0 to {limit}; got {ends}")
    made = [a[0].new_zeros(_shape(a[0], b[0], offsets), dtype=dtype) for _ in range(components)]
    for group, (start, end) in enumerate(zip([0, *ends], ends)):
        where = slice(start, end)
        left = tuple(_group(part, group, where, rows=b[0].dim() == 3) for part in a)
        right = tuple(_group(part, group, where, rows=a[0].dim() == 2) for part in b)
        product = matmul(left, right, components, dtype)
        for into, part in zip(made, product, strict=True):
            at = group if a[0].dim() == b[0].dim() else (where if b[0].dim() == 3 else (slice(None), where))
            into[at] = part
    return made


def _group(part: torch.Tensor, group: int, where: slice, rows: bool) -> torch.Tensor:
    if part.dim() == 3:
        return part[group]
    return part[where] if rows else part[:, where]


def _fake(
    parts: list[torch.Tensor], count: int, offsets: torch.Tensor, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    shape = _shape(parts[0], parts[count], offsets)
    return [parts[0].new_empty(shape, dtype=dtype) for _ in range(components)]


_operator = define_operator(
    "grouped_matmul(Tensor[] parts, int count, Tensor offsets, int components, ScalarType dtype) -> Tensor[]",
    _run,
    _fake,
)
