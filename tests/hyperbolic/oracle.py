"""Hyperbolic geometry with 120 digits, by other formulas than the library's."""

import mpmath
import torch
from mpmath import mpf

from halfulp.mctensor import MCTensor

mpmath.mp.dps = 120


def values(x: torch.Tensor) -> list[list[mpf]]:
    """Every vector along the last dimension, exactly."""
    parts = x.detach().components if isinstance(x, MCTensor) else (x.detach(),)
    assert not isinstance(x, MCTensor) or x.scale is None
    rows = [part.double().reshape(-1, part.shape[-1]).tolist() for part in parts]
    return [[sum(map(mpf, terms), mpf(0)) for terms in zip(*vectors)] for vectors in zip(*rows)]


def dot(u: list[mpf], v: list[mpf]) -> mpf:
    return sum((a * b for a, b in zip(u, v)), mpf(0))


def half_space_distance(u: list[mpf], v: list[mpf]) -> mpf:
    d = [a - b for a, b in zip(u, v)]
    return mpmath.acosh(1 + dot(d, d) / (2 * u[-1] * v[-1]))


def half_space_exp(p: list[mpf], v: list[mpf]) -> list[mpf]:
    y, s = p[-1], mpmath.sqrt(dot(v, v)) / p[-1]
    if s == 0:
        return p
    unit = [a / (y * s) for a in v]
    d = mpmath.cosh(s) - unit[-1] * mpmath.sinh(s)
    return [x + y * h * mpmath.sinh(s) / d for x, h in zip(p[:-1], unit[:-1])] + [y / d]


def ball_distance(u: list[mpf], v: list[mpf]) -> mpf:
    d = [a - b for a, b in zip(u, v)]
    return mpmath.acosh(1 + 2 * dot(d, d) / ((1 - dot(u, u)) * (1 - dot(v, v))))


def ball_exp(p: list[mpf], v: list[mpf]) -> list[mpf]:
    s = mpmath.sqrt(dot(v, v))
    if s == 0:
        return p
    t = mpmath.tanh(s / (1 - dot(p, p)))
    w = [t * a / s for a in v]
    pw, pp, ww = dot(p, w), dot(p, p), dot(w, w)
    return [((1 + 2 * pw + ww) * a + (1 - pp) * b) / (1 + 2 * pw + pp * ww) for a, b in zip(p, w)]


DISTANCE = {"half-space": half_space_distance, "ball": ball_distance}
EXP = {"half-space": half_space_exp, "ball": ball_exp}


def size(name: str, p: list[mpf]) -> mpf:
    return p[-1] if name == "half-space" else (1 - dot(p, p)) / 2


def _symmetry(name: str, x: list[mpf], z: list[mpf]) -> list[mpf]:
    """The geodesic symmetry at x: it takes each geodesic through x to itself, backwards."""
    if name == "half-space":
        moved = [(a - b) / x[-1] for a, b in zip(z[:-1], x[:-1])] + [z[-1] / x[-1]]
        whole = dot(moved, moved)
        ends = [-a / whole for a in moved[:-1]] + [moved[-1] / whole]
        return [b + x[-1] * a for a, b in zip(ends[:-1], x[:-1])] + [x[-1] * ends[-1]]
    back = _mobius([-a for a in x], z)
    return _mobius(x, [-a for a in back])


def _mobius(p: list[mpf], w: list[mpf]) -> list[mpf]:
    pw, pp, ww = dot(p, w), dot(p, p), dot(w, w)
    return [((1 + 2 * pw + ww) * a + (1 - pp) * b) / (1 + 2 * pw + pp * ww) for a, b in zip(p, w)]


def transport(name: str, p: list[mpf], step: list[mpf], w: list[mpf]) -> list[mpf]:
    """Parallel transport is the derivative of the transvection: the symmetries at the start and half way."""
    middle = EXP[name](p, [a / 2 for a in step])
    h = mpf(10) ** -50
    moved = [_symmetry(name, middle, _symmetry(name, p, [a + sign * h * b for a, b in zip(p, w)])) for sign in (1, -1)]
    return [(a - b) / (2 * h) for a, b in zip(*moved)]
