"""The Poincaré ball: points inside the unit sphere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import arithmetic
from ..mctensor import MCTensor
from ._manifold import Manifold
from ._values import direction_and_length, match_width, rotate, round_to_plain, split_tanh


@dataclasses.dataclass(frozen=True)
class PoincareBall(Manifold):
    """The Poincaré ball: points of length below 1 and lengths 2 |v| / (1 - |p|^2).

    Everything near the rim depends on 1 - |p|^2, which plain arithmetic gets by cancellation; here it is the exact
    value, rounded once. A coordinate in float64 still ends 2^-53 before the rim, a distance of 37 from the middle;
    with components it does not.

    >>> import torch
    >>> ball = PoincareBall()
    >>> p = ball.exp(torch.zeros(2, dtype=torch.float64), torch.tensor([5.0, 0.0], dtype=torch.float64))
    >>> round(float(ball.distance(p, -p)), 10)
    20.0
    """

    name: ClassVar[str] = "ball"

    def _spread(self, u: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        difference, a, b = u - v, margin(u), margin(v)
        if dtype is not None:
            difference, a, b = round_to_plain(difference, dtype), round_to_plain(a, dtype), round_to_plain(b, dtype)
        ratio = difference / (a.sqrt() * b.sqrt())
        return (ratio * ratio).sum(-1)

    def exp(self, point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return the end of the geodesic along a step (see Manifold).

        It is the Möbius addition p + m t (v + t p) / n of t = tanh(s / 2) along the unit vector v, where m = 1 - |p|^2,
        s is the length of the step and n = 1 + 2 t <p, v> + t^2 |p|^2.
        """
        m = margin(point)
        place = match_width(point, step)
        direction, t, radius, inwards, both = self._course(place, match_width(m, step), step)
        n = inwards * inwards + radius * t * both
        return self.project(point + m * (t * (direction + t * place) / n))

    def _course(self, place: torch.Tensor, gap: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the unit vector v of a step, t, |p|, 1 - t |p| and |v + p / |p||^2, computed without cancellation."""
        direction, length = direction_and_length(step)
        t, rest = split_tanh(2 * (length / gap))
        along, radius = direction_and_length(place)
        both = along + direction
        return direction, t, radius, gap / (1 + radius) + radius * rest, (both * both).sum(-1, keepdim=True)

    def log(self, point: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the step to another point: d (1 - |p|^2) / 2 along (1 - |p|^2) (q - p) - |q - p|^2 p."""
        m, difference = margin(point), other - point
        squares = (difference * difference).sum(-1, keepdim=True)
        direction, _ = direction_and_length(m * difference - squares * point)
        return direction * (m * (self.distance(point, other).unsqueeze(-1) / 2))

    def transport(self, point: torch.Tensor, step: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Move a vector along a geodesic (see Manifold): it keeps its length over 1 - |p|^2, and its angle.

        The geodesic ends along (1 - t^2 |p|^2) v + 2 t (1 + t <p, v>) p, the derivative by t of what `exp` gives: the
        direction from the point to its rounded end would turn vectors at small steps.
        """
        point = match_width(point, vector)
        m = margin(point)
        place = match_width(point, step)
        before, t, radius, inwards, both = self._course(place, match_width(m, step), step)
        x = t * radius
        after, _ = direction_and_length(inwards * (1 + x) * before + 2 * t * (inwards + x * both / 2) * place)
        return margin(self.exp(point, step)) / m * rotate(vector, before, after)

    def size(self, point: torch.Tensor) -> torch.Tensor:
        """Return (1 - |p|^2) / 2."""
        return margin(point) / 2

    def project(self, point: torch.Tensor) -> torch.Tensor:
        """Move points beyond the radius 1 - 4 ulps back to it."""
        room = 4 * _step(point)
        outside = round_to_plain(margin(point)).detach() < 2 * room
        if not torch.compiler.is_compiling() and not outside.any():
            return point
        direction, _ = direction_and_length(round_to_plain(point))
        return torch.where(outside, direction * (1 - 2 * room), point)

    def _outside(self, point: torch.Tensor) -> torch.Tensor:
        return ~(round_to_plain(margin(point)[..., 0]) > 0)

    def _rule(self) -> str:
        return "a length below 1"


def _step(point: torch.Tensor) -> float:
    """Return the distance of neighbouring numbers just below 1, with all components."""
    count = len(point.components) if isinstance(point, MCTensor) else 1
    return 2.0 ** -(arithmetic.PRECISION[point.dtype] * count)


def margin(point: torch.Tensor) -> torch.Tensor:
    """Return 1 - |p|^2 without cancellation, (..., 1); of plain tensors exact, rounded once or to 2^-100."""
    if isinstance(point, MCTensor):
        return 1 - (point * point).sum(-1, keepdim=True)
    rounded_once: Callable[..., torch.Tensor] = _Margin.apply
    return rounded_once(point)


class _Margin(torch.autograd.Function):
    """1 - |p|^2 of plain coordinates, by squares of two components each, with its derivative."""

    @staticmethod
    def forward(context: Any, point: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(point)
        if point.dtype != torch.float64:
            wide = point.double()
            return (1 - (wide * wide).sum(-1, keepdim=True)).to(point.dtype)
        rest: tuple[torch.Tensor, ...] = (torch.ones_like(point[..., :1]),)
        for x in point.unbind(-1):
            part = x.unsqueeze(-1)
            rest = arithmetic.pointwise("addcmul", rest, (-part,), (part,), components=2, dtype=torch.float64)
        return arithmetic.merge(rest)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        point: torch.Tensor = context.saved_tensors[0]
        return -2 * gradient * point
