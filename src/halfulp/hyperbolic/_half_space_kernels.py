"""The half-space's geodesics and distances with their derivatives as one kernel each, on columns of coordinates.

Positions keep all components; what is added to them, and distances, are float64.
"""

from __future__ import annotations

import functools

import torch

from .. import arithmetic
from ..arithmetic.expansions._operators import (
    added,
    finished,
    multiplied,
    negated,
    round_to_components,
    to_float64_terms,
)
from ..arithmetic.expansions._pointwise import Elements
from ..arithmetic.functions._exp_log import asinh, expm1
from ..kernels import select, square_root

WIDEST = 16  # coordinates of a point up to which there are kernels
_FARTHEST = 700.0  # e^700 is about the largest number
_LEAST = {dtype: torch.finfo(dtype).tiny for dtype in arithmetic.PRECISION}


@functools.cache
def geodesic(width: int, components: int, dtype: torch.dtype) -> Elements:
    """exp of `HalfSpace`: in come all components of every coordinate, then the step; out go the new components."""
    working = -(-(components * arithmetic.PRECISION[dtype] + 4) // 53) if dtype != torch.float64 else components

    def function(*values):
        *x, y = _coordinates(values, width, components, dtype)
        asides, rise, factor = _move(y[0], values[width * components :])
        moved = [_moved(place, y, aside, working) for place, aside in zip(x, asides)]
        small = abs(rise) < 0.5
        grown, scaled = _moved(y, y, rise, working), multiplied(y, [factor], working)
        height = [select(small, a, b) for a, b in zip(grown, scaled)]
        low = height[0] < _LEAST[dtype]
        moved.append([select(low, _LEAST[dtype], height[0]), *(select(low, 0.0, t) for t in height[1:])])
        if dtype != torch.float64:
            moved = [round_to_components(terms, dtype, components) for terms in moved]
        return [t for terms in moved for t in terms]

    count = width * components
    return Elements("half_space_exp", function, torch.float64, (dtype,) * (count + width), (dtype,) * count)


@functools.cache
def pairs(width: int, components: int, dtype: torch.dtype) -> Elements:
    """In come all components of every coordinate of u, then of v; out go, in float64, d(u, v) and its derivatives by

    the coordinates of u, then of v.
    """
    count = width * components

    def function(*values):
        u = _coordinates(values[:count], width, components, dtype)
        v = _coordinates(values[count:], width, components, dtype)
        above, below = u[-1][0], v[-1][0]
        inverse = 0.5 / (square_root(above) * square_root(below))
        ratios = [added(a, negated(b), 2)[0] * inverse for a, b in zip(u, v)]
        a = _total([r * r for r in ratios])
        root = square_root(a)
        half = asinh([[root]], 1)[0]
        slope = select(a > 0.0, 1.0 / (root * square_root(1.0 + a)), 0.0)
        by = [r * (2.0 * inverse * slope) for r in ratios]
        part = a * slope
        away = [*negated(by[:-1]), -(by[-1] + part / below)]
        return [half + half, *by[:-1], by[-1] - part / above, *away]

    return Elements(
        "half_space_pairs", function, torch.float64, (dtype,) * (2 * count), (torch.float64,) * (1 + 2 * width)
    )


def _coordinates(values: tuple, width: int, components: int, dtype: torch.dtype) -> list[list]:
    parts = [list(values[k * components : (k + 1) * components]) for k in range(width)]
    return parts if dtype == torch.float64 else [to_float64_terms(terms) for terms in parts]


def _move(y, step: tuple) -> tuple[list, object, object]:
    """Compute `HalfSpace._move` on components."""
    framed = [s / y for s in step]
    size = functools.reduce(lambda a, b: select(a > b, a, b), [abs(e) for e in framed])
    size = select(size > 0.0, size, 1.0)
    framed = [e / size for e in framed]
    length = square_root(_total([e * e for e in framed]))
    over = select(length > 0.0, length, 1.0)
    *h, w = [e / over for e in framed]
    s = length * size
    e = expm1([[select(s < _FARTHEST, s, _FARTHEST)]], 1)[0]
    t, rest = e / (e + 2.0), 2.0 / (e + 2.0)
    flat = _total([a * a for a in h])
    gap = select(w > 0.0, rest + t * (flat / (1.0 + abs(w))), 1.0 + abs(w) * t)
    n = gap * (gap / rest) + t * (t * (flat / rest))
    return [2.0 * t * a / n / rest for a in h], 2.0 * t * (w - t) / n / rest, (1.0 + t) / n


def _moved(place: list, y: list, share, n: int) -> list:
    """place + y share."""
    if n == 1:
        return [place[0] + y[0] * share]
    return finished(place[0] + y[0] * share, added(place, multiplied(y, [share], n), n))


def _total(values: list):
    return functools.reduce(lambda a, b: a + b, values)
