"""Numbers in the words of findings, and how sure a count makes them."""

import torch

from ... import formats


def percent(share: float) -> str:
    """Return a share as a percentage that is 0% or 100% only where it is exact.

    >>> percent(1.0), percent(0.99996), percent(0.5), percent(0.0002), percent(0.0)
    ('100%', '>99.9%', '50%', '<0.1%', '0%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.001:
        return "<0.1%"
    if share > 0.999:
        return ">99.9%"
    return f"{100 * share:.3g}%"


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the short name of a dtype: that of its format where it has one.

    >>> dtype_name(torch.bfloat16), dtype_name(torch.int8)
    ('bf16', 'int8')
    """
    try:
        return formats.get(dtype).name if dtype is not None else "unknown dtype"
    except ValueError:
        return str(dtype).removeprefix("torch.")


def confidence_of(count: int, half: int = 64) -> float:
    """Return how sure a number of elements or steps makes a finding: 0 without any, 1/2 at `half`, towards 1.

    >>> confidence_of(0), confidence_of(64), confidence_of(10**6)
    (0.0, 0.5, 1.0)
    """
    return 1 - 0.5 ** (count / half)
