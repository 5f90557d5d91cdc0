"""Between plain tensors and components: splitting, merging, renormalizing, comparing by value."""

from __future__ import annotations

import torch

from ._pointwise import Parts, pointwise


def split(x: torch.Tensor, dtype: torch.dtype, components: int) -> Parts:
    """A tensor as a sum of components, each the nearest number to what the ones before left.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        dtype: of the components.
        components: 1 to 4.

    >>> import torch
    >>> [float(part) for part in split(torch.tensor(0.1, dtype=torch.float64), torch.float32, 2)]
    [0.10000000149011612, -1.4901161415892261e-09]
    """
    return pointwise("renormalize", (x,), components=components, dtype=dtype)


def merge(parts: Parts, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The sum of all components, rounded once to a dtype.

    >>> import torch
    >>> merge((torch.tensor(1.0), torch.tensor(2.0**-30)), torch.float64).item() - 1 == 2.0**-30
    True
    """
    if len(parts) > 2 and dtype == torch.float64:
        return _beyond_a_tie(*pointwise("renormalize", parts, components=3, dtype=dtype))
    return pointwise("renormalize", parts, components=1, dtype=dtype)[0]


def _beyond_a_tie(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    """Round canonical components to one: the first, or its neighbour if a third component decides a tie."""
    other = first + 2 * second
    tie = (other - first == 2 * second) & (torch.nextafter(first, other) == other) & (second != 0)
    return torch.where(tie & (third.sign() == second.sign()), other, first)


def renormalize(parts: Parts, components: int, dtype: torch.dtype | None = None) -> Parts:
    """Return canonical components of the same sum, |next| <= ulp(previous) / 2, from terms of any order and overlap."""
    return pointwise("renormalize", parts, components=components, dtype=dtype or parts[0].dtype)


def compare(a: Parts, b: Parts) -> torch.Tensor:
    """The sign of a - b by value, exactly, as int8: -1, 0, 1, and 2 where either is NaN.

    >>> import torch
    >>> one, tiny = torch.tensor(1.0), torch.tensor(2.0**-60)
    >>> int(compare((one, tiny), (one,)))
    1
    """
    return pointwise("compare", a, b, components=1, dtype=torch.float32)[0].to(torch.int8)
