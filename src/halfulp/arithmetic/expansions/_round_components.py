"""Components of a narrower type from a float64 expansion, each rounded to nearest from what the earlier ones left."""

from __future__ import annotations

import torch

from ...kernels import is_finite, power_below, round_to_float32, select
from .._error_free import Terms, sweep
from ._operators import gathered

# Bits, exponent of the smallest normal number, largest number.
SHAPES = {torch.float16: (11, -14, 65504.0), torch.bfloat16: (8, -126, (2.0 - 2.0**-7) * 2.0**127)}


def rounded(x, dtype: torch.dtype):
    """A float64 rounded to a narrower type's numbers, ties to even, still as float64."""
    if dtype == torch.float32:
        return round_to_float32(x)
    precision, lowest, largest = SHAPES[dtype]
    unit = power_below(x) * 2.0 ** (1 - precision)
    smallest = 2.0 ** (lowest + 1 - precision)
    unit = select(unit > smallest, unit, unit * 0.0 + smallest)
    # Adding 1.5 * 2^52 units leaves no bit below one unit, and taking it away again is exact.
    magic = unit * (1.5 * 2.0**52)
    nearest = (x + magic) - magic
    # Near the end of float64's range the magic number itself overflows.
    nearest = select(abs(x) < 2.0 * largest, nearest, x)
    nearest = select(abs(nearest) > largest, nearest * float("inf"), nearest)
    return select(is_finite(x) & (nearest != 0.0), nearest, select(is_finite(x), x * 0.0, x))


def round_to_components(terms: Terms, dtype: torch.dtype, n: int) -> Terms:
    """n components of a narrower type, largest first; behind an infinity or NaN follow zeros."""
    rest, out = list(terms), []
    for _ in range(n):
        out.append(_head(rest, dtype))
        rest = [rest[0] - out[-1], *rest[1:]]
        if len(rest) > 1:
            rest = sweep(rest)
    return [out[0], *(select(is_finite(out[0]), part, 0.0) for part in out[1:])]


def _head(rest: Terms, dtype: torch.dtype):
    """The sum rounded once: a tie of the first term is broken by the second."""
    part = rounded(rest[0], dtype)
    if len(rest) == 1:
        return part
    left = rest[0] - part
    other = part + (left + left)
    same_side = (rest[1] > 0.0) & (left > 0.0) | (rest[1] < 0.0) & (left < 0.0)
    return select(same_side & (rounded(other, dtype) == other), other, part)


def to_float64_terms(parts: Terms) -> Terms:
    """A narrower type's components, converted to float64, as a canonical float64 expansion."""
    return list(parts) if len(parts) == 1 else gathered(list(parts), len(parts))


def float16_to_float64(parts: Terms) -> Terms:
    """Components of float16, converted to float64, as one: all bits that they have lie between 2^16 and 2^-24."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [select(parts[0] == 0.0, parts[0], total)]
