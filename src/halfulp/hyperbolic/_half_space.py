"""The half-space model: points above a plane, the last coordinate their height."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ..mctensor import MCTensor
from ._manifold import Manifold
from ._values import direction_and_length, match_width, rotate, round_to_plain, split_tanh


@dataclasses.dataclass(frozen=True)
class HalfSpace(Manifold):
    """The half-space model of hyperbolic space: points (x, y) with height y > 0 and lengths |v| / y.

    Nothing here is better conditioned than a difference of coordinates: with d(u, v) = 2 asinh(|u - v| / (2 sqrt(u_y
    v_y))), two points at height y whose x differ by a few y lose log2(|x| / y) bits in plain arithmetic. Components
    carry those bits ("Representing Hyperbolic Space Accurately using Multi-Component Floats", Yu and De Sa, 2021).

    >>> import torch
    >>> space = HalfSpace()
    >>> u, up = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    >>> end = space.exp(u, 2 * up)
    >>> round(float(space.distance(u, end)), 5), round(float(end[1].log()), 5)
    (2.0, 2.0)
    """

    name: ClassVar[str] = "half-space"
    least: ClassVar[int] = 2

    def _spread(self, u: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        difference, a, b = u - v, u[..., -1:], v[..., -1:]
        if dtype is not None:
            difference, a, b = round_to_plain(difference, dtype), round_to_plain(a, dtype), round_to_plain(b, dtype)
        # Two roots instead of one of the product: heights of 1e-28 have none in float32.
        ratio = difference / (2 * (a.sqrt() * b.sqrt()))
        return (ratio * ratio).sum(-1)

    def exp(self, point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return the end of the geodesic along a step (see Manifold).

        With t = tanh(s / 2), s the length and (h, w) the direction of the step over y:

        x' = x + y 2 t h / n, y' = y + y 2 t (w - t) / n = y (1 - t^2) / n, n = (1 - w t)^2 + t^2 |h|^2.
        """
        x, y = point[..., :-1], point[..., -1:]
        aside, rise, factor = self._move(y, step)[:3]
        # The sum keeps a small step's digits beyond the height's own; the product those of a height that shrinks.
        height = torch.where(round_to_plain(rise).abs() < 0.5, y + y * rise, y * factor)
        return torch.cat([x + y * aside, _above_zero(height)], -1)

    def _move(self, y: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return 2 t h / n, 2 t (w - t) / n, (1 - t^2) / n, then direction, t, 1 - t and n / (1 - t), as in `exp`."""
        direction, length = direction_and_length(step / match_width(y, step))
        h, w = direction[..., :-1], direction[..., -1:]
        t, rest = split_tanh(length)
        flat = (h * h).sum(-1, keepdim=True)
        up = round_to_plain(w) > 0
        # 1 - w t: upwards 1 - w = |h|^2 / (1 + w), so that nothing cancels.
        gap = torch.where(up, rest + t * (flat / (1 + w.abs())), 1 + w.abs() * t)
        # n over 1 - t, for n itself may fall below the smallest number.
        n = gap * (gap / rest) + t * (t * (flat / rest))
        return 2 * t * h / n / rest, 2 * t * (w - t) / n / rest, (1 + t) / n, direction, t, rest, n

    def log(self, point: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the step to another point (see Manifold): sinh(d) (h, w) = ((x' - x) / y', cosh(d) - y / y')."""
        y, up = point[..., -1:], other[..., -1:]
        a = self._spread(point, other, None).unsqueeze(-1)
        sine = 2 * (a.sqrt() * (1 + a).sqrt())
        slope = (other - point) / up
        direction = torch.cat([slope[..., :-1], 2 * a + slope[..., -1:]], -1)
        near = sine == 0
        length = torch.where(
            near, torch.ones_like(a), 2 * a.sqrt().asinh() / torch.where(near, torch.ones_like(a), sine)
        )
        return y * (length * direction)

    def transport(self, point: torch.Tensor, step: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Move a vector along a geodesic (see Manifold): it keeps its length over the height, and its angle."""
        _, _, factor, direction, t, rest, n = self._move(match_width(point[..., -1:], vector), step)
        w = direction[..., -1:]
        end = torch.cat([direction[..., :-1] * factor, (w * (1 + t * t) - 2 * t) / n / rest], -1)
        return factor * rotate(vector, direction, end)

    def size(self, point: torch.Tensor) -> torch.Tensor:
        """Return the height."""
        return point[..., -1:]

    def project(self, point: torch.Tensor) -> torch.Tensor:
        """Raise heights below the smallest normal number to it."""
        return torch.cat([point[..., :-1], _above_zero(point[..., -1:])], -1)

    def _outside(self, point: torch.Tensor) -> torch.Tensor:
        return ~(round_to_plain(point[..., -1]) > 0)

    def _rule(self) -> str:
        return "a last coordinate above 0"


def _above_zero(height: torch.Tensor) -> torch.Tensor:
    least = torch.finfo(height.dtype).tiny
    if not isinstance(height, MCTensor):
        return height.clamp(min=least)
    low = round_to_plain(height) < least
    return torch.where(low, torch.full_like(height, least), height) if low.any() else height
