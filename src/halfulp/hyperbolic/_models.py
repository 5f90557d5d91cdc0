"""Models of hyperbolic space: the interface, the Poincaré ball, the half-space, and their names."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import arithmetic
from ..mctensor import MCTensor


def round_to_plain(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the value as a plain tensor of a dtype, by default of the components' own."""
    if isinstance(x, MCTensor):
        if x.scale is None and dtype in (None, x.dtype) and not torch.is_grad_enabled():
            # Of canonical components the first is the value, rounded.
            return x.components[0]
        return x.decode(dtype or x.dtype)
    return x if dtype is None else x.to(dtype)


def _round_all_to_plain(dtype: torch.dtype | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Return values as plain tensors of a dtype, or as they are without one."""
    return values if dtype is None else tuple(round_to_plain(x, dtype) for x in values)


def round_unless_other_is_mctensor(x: Tensor, other: Tensor) -> Tensor:
    """Return x as wide as another value: with all components beside an MCTensor, rounded beside a plain tensor."""
    return x if isinstance(other, MCTensor) else round_to_plain(x)


def compute_unit_vector_and_length(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the direction and the length along the last dimension; where the length is 0, so is the direction."""
    # The largest magnitude is taken out first, so that no square leaves the range.
    size = round_to_plain(x).detach().abs().amax(-1, keepdim=True)
    size = torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))
    part = x / size
    squares = (part * part).sum(-1, keepdim=True)
    still = squares == 0
    # Its derivative at 0 is 0.
    length = torch.where(still, squares, torch.where(still, torch.ones_like(squares), squares).sqrt())
    return part / torch.where(length == 0, torch.ones_like(length), length), length * size


def compute_tanh_of_half_and_complement(length: Tensor) -> tuple[Tensor, Tensor]:
    """Return tanh(s / 2) and 1 - tanh(s / 2) = 2 / (e^s + 1), each to full relative accuracy."""
    # A length beyond the logarithm of the largest number would lead out of the range.
    grown = length.clamp(max=0.98 * math.log(torch.finfo(length.dtype).max)).expm1()
    return grown / (grown + 2), 2 / (grown + 2)


def apply_rotation_from_start_to_end(vector: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Rotate a vector by the rotation that takes one unit vector to another and moves nothing across both."""
    middle, _ = compute_unit_vector_and_length(start + end)
    return (
        vector - 2 * middle * (middle * vector).sum(-1, keepdim=True) + 2 * end * (start * vector).sum(-1, keepdim=True)
    )


def write_rows(target: Tensor, rows: Tensor | None, value: Tensor) -> None:
    """Assign value to target[rows], or to all of target, outside autograd."""
    if isinstance(target, MCTensor) and isinstance(value, MCTensor) and target.scale is None and value.scale is None:
        torch.autograd.graph.increment_version(target)
        for part, new in zip(target.components, value.components, strict=True):
            write_rows(part.detach(), rows, new)
    elif rows is None:
        target.copy_(value)
    else:
        target[rows] = value


class Manifold(abc.ABC):
    """A model of hyperbolic space of curvature -1; points are the vectors along a tensor's last dimension.

    All operations take plain tensors and MCTensors, broadcast over the other dimensions, and are differentiable.
    Vectors at a point are given in coordinates, as gradients are.

    Attributes:
        name: what param groups and messages call it.
        condition: on points, in words.
        least: the fewest coordinates of a point.
    """

    name: ClassVar[str]
    condition: ClassVar[str]
    least: ClassVar[int] = 1

    def distance(self, u: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the length of the geodesic between two points, with derivative 0 where they coincide.

        Args:
            u, v: points (..., d), shapes broadcast; plain tensors or MCTensors.
            dtype: a plain dtype for the result. The coordinates' differences are then taken with all components, and
                what follows is computed in that dtype: a few of its ulps in accuracy, at nearly a plain distance's
                time. By default the result is as wide as the points.

        Returns:
            Distances (...); infinite from about the logarithm of the dtype's largest number on (12 in float16, 90 in
            bfloat16 and float32, 711 in float64), and 0 below about the root of its smallest.
        """
        a = self._compute_squared_sinh_of_half_distance(u, v, dtype)
        near = a == 0
        return torch.where(near, torch.zeros_like(a), 2 * torch.where(near, torch.ones_like(a), a).sqrt().asinh())

    @abc.abstractmethod
    def _compute_squared_sinh_of_half_distance(self, u: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return sinh^2(d / 2)."""

    @abc.abstractmethod
    def exp(self, point: Tensor, step: Tensor) -> Tensor:
        """Return the end of the geodesic that starts at a point along a vector and is as long as it (exponential map).

        Args:
            point: (..., d).
            step: vectors at the points, (..., d). A plain step at an MCTensor's point is the usual case: the step is
                rounded, the position keeps all components, for only the movement is added to it.
        """

    @abc.abstractmethod
    def transport(self, point: Tensor, step: Tensor, vector: Tensor) -> Tensor:
        """Return a vector at a point, moved in parallel along the geodesic of `exp(point, step)` to its end."""

    @abc.abstractmethod
    def inverse_conformal_factor(self, point: Tensor) -> Tensor:
        """Return the number of coordinate units per unit length at a point: |v| / size is the length of v; (..., 1)."""

    @abc.abstractmethod
    def project(self, point: Tensor) -> Tensor:
        """Return the point, or the nearest admissible one where rounding left it outside or on the edge."""

    @abc.abstractmethod
    def _find_points_outside(self, point: Tensor) -> Tensor:
        """Return which points do not belong to the model, as booleans (...)."""

    def gradient(self, point: Tensor, gradient: Tensor) -> Tensor:
        """Return the Riemannian gradient from the Euclidean one: size^2 times it, as wide as the gradient."""
        size = self.inverse_conformal_factor(round_unless_other_is_mctensor(point, gradient))
        return size * (size * gradient)

    def norm(self, point: Tensor, vector: Tensor) -> Tensor:
        """Return the length of a vector at a point; (..., 1)."""
        size = self.inverse_conformal_factor(round_unless_other_is_mctensor(point, vector))
        length: Tensor = torch.linalg.vector_norm(round_to_plain(vector / size), dim=-1, keepdim=True)
        return length

    def check(self, points: Tensor) -> None:
        """Raise unless all points are finite points of the model.

        Raises:
            TypeError: no floating tensor.
            ValueError: too few coordinates, or points outside; how many, and which is the first.
        """
        if not isinstance(points, Tensor) or points.dtype not in arithmetic.PRECISION_BY_DTYPE:
            kind = points.dtype if isinstance(points, Tensor) else type(points).__name__
            raise TypeError(f"points of {self.name} are a tensor of floating numbers, got {kind}")
        if points.dim() == 0 or points.shape[-1] < self.least:
            raise ValueError(
                f"points of {self.name} have at least {self.least} coordinates along the last dimension, got shape "
                f"{tuple(points.shape)}"
            )
        with torch.no_grad():
            bad = self._find_points_outside(points) | ~round_to_plain(points).isfinite().all(-1)
        if bad.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{int(bad.sum())} of {bad.numel()} points are outside {self.name}, which needs "
                f"{self.condition}; the first is at {first}: "
                f"{round_to_plain(points.detach())[first].tolist()}"
            )


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
    condition: ClassVar[str] = "a length below 1"

    def _compute_squared_sinh_of_half_distance(self, u: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
        difference, a, b = _round_all_to_plain(
            dtype, u - v, compute_one_minus_squared_norm(u), compute_one_minus_squared_norm(v)
        )
        ratio = difference / (a.sqrt() * b.sqrt())
        return (ratio * ratio).sum(-1)

    def exp(self, point: Tensor, step: Tensor) -> Tensor:
        """Return the end of the geodesic along a step (see Manifold).

        It is the Möbius addition p + m t (v + t p) / n of t = tanh(s / 2) along the unit vector v, where m = 1 - |p|^2,
        s is the length of the step and n = 1 + 2 t <p, v> + t^2 |p|^2.
        """
        m = compute_one_minus_squared_norm(point)
        place = round_unless_other_is_mctensor(point, step)
        direction, t, radius, inwards, both = self._compute_geodesic_terms(
            place, round_unless_other_is_mctensor(m, step), step
        )
        n = inwards * inwards + radius * t * both
        return self.project(point + m * (t * (direction + t * place) / n))

    def _compute_geodesic_terms(self, place: Tensor, gap: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Return the unit vector v of a step, t, |p|, 1 - t |p| and |v + p / |p||^2, computed without cancellation."""
        direction, length = compute_unit_vector_and_length(step)
        t, rest = compute_tanh_of_half_and_complement(2 * (length / gap))
        along, radius = compute_unit_vector_and_length(place)
        both = along + direction
        return direction, t, radius, gap / (1 + radius) + radius * rest, (both * both).sum(-1, keepdim=True)

    def transport(self, point: Tensor, step: Tensor, vector: Tensor) -> Tensor:
        """Move a vector along a geodesic (see Manifold): it keeps its length over 1 - |p|^2, and its angle.

        The geodesic ends along (1 - t^2 |p|^2) v + 2 t (1 + t <p, v>) p, the derivative by t of what `exp` gives: the
        direction from the point to its rounded end would turn vectors at small steps.
        """
        point = round_unless_other_is_mctensor(point, vector)
        m = compute_one_minus_squared_norm(point)
        place = round_unless_other_is_mctensor(point, step)
        before, t, radius, inwards, both = self._compute_geodesic_terms(
            place, round_unless_other_is_mctensor(m, step), step
        )
        x = t * radius
        after, _ = compute_unit_vector_and_length(inwards * (1 + x) * before + 2 * t * (inwards + x * both / 2) * place)
        return (
            compute_one_minus_squared_norm(self.exp(point, step))
            / m
            * apply_rotation_from_start_to_end(vector, before, after)
        )

    def inverse_conformal_factor(self, point: Tensor) -> Tensor:
        """Return (1 - |p|^2) / 2."""
        return compute_one_minus_squared_norm(point) / 2

    def project(self, point: Tensor) -> Tensor:
        """Move points beyond the radius 1 - 4 ulps back to it."""
        count = len(point.components) if isinstance(point, MCTensor) else 1
        room = 4 * 2.0 ** -(
            arithmetic.PRECISION_BY_DTYPE[point.dtype] * count
        )  # neighbours just below 1, with all components
        outside = round_to_plain(compute_one_minus_squared_norm(point)).detach() < 2 * room
        if not torch.compiler.is_compiling() and not outside.any():
            return point
        direction, _ = compute_unit_vector_and_length(round_to_plain(point))
        return torch.where(outside, direction * (1 - 2 * room), point)

    def _find_points_outside(self, point: Tensor) -> Tensor:
        return ~(round_to_plain(compute_one_minus_squared_norm(point)[..., 0]) > 0)


def compute_one_minus_squared_norm(point: Tensor) -> Tensor:
    """Return 1 - |p|^2 without cancellation, (..., 1); of plain tensors exact, rounded once or to 2^-100."""
    if isinstance(point, MCTensor):
        return 1 - (point * point).sum(-1, keepdim=True)
    rounded_once: Callable[..., Tensor] = _OneMinusSquaredNorm.apply
    return rounded_once(point)


class _OneMinusSquaredNorm(torch.autograd.Function):
    """1 - |p|^2 of plain coordinates, by squares of two components each, with its derivative."""

    @staticmethod
    def forward(context: Any, point: Tensor) -> Tensor:
        context.save_for_backward(point)
        if point.dtype != torch.float64:
            wide = point.double()
            return (1 - (wide * wide).sum(-1, keepdim=True)).to(point.dtype)
        rest: tuple[Tensor, ...] = (torch.ones_like(point[..., :1]),)
        for x in point.unbind(-1):
            part = x.unsqueeze(-1)
            rest = arithmetic.pointwise("addcmul", rest, (-part,), (part,), components=2, dtype=torch.float64)
        return arithmetic.merge(rest)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        point: Tensor = context.saved_tensors[0]
        return -2 * gradient * point


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
    condition: ClassVar[str] = "a last coordinate above 0"
    least: ClassVar[int] = 2

    def _compute_squared_sinh_of_half_distance(self, u: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
        difference, a, b = _round_all_to_plain(dtype, u - v, u[..., -1:], v[..., -1:])
        # Two roots instead of one of the product: heights of 1e-28 have none in float32.
        ratio = difference / (2 * (a.sqrt() * b.sqrt()))
        return (ratio * ratio).sum(-1)

    def exp(self, point: Tensor, step: Tensor) -> Tensor:
        """Return the end of the geodesic along a step (see Manifold).

        With t = tanh(s / 2), s the length and (h, w) the direction of the step over y:

        x' = x + y 2 t h / n, y' = y + y 2 t (w - t) / n = y (1 - t^2) / n, n = (1 - w t)^2 + t^2 |h|^2.
        """
        x, y = point[..., :-1], point[..., -1:]
        aside, rise, factor = self._compute_geodesic_terms(y, step)[:3]
        # The sum keeps a small step's digits beyond the height's own; the product those of a height that shrinks.
        height = torch.where(round_to_plain(rise).abs() < 0.5, y + y * rise, y * factor)
        return torch.cat([x + y * aside, _clamp_height_above_zero(height)], -1)

    def _compute_geodesic_terms(self, y: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Return 2 t h / n, 2 t (w - t) / n, (1 - t^2) / n, then direction, t, 1 - t and n / (1 - t), as in `exp`."""
        direction, length = compute_unit_vector_and_length(step / round_unless_other_is_mctensor(y, step))
        h, w = direction[..., :-1], direction[..., -1:]
        t, rest = compute_tanh_of_half_and_complement(length)
        flat = (h * h).sum(-1, keepdim=True)
        up = round_to_plain(w) > 0
        # 1 - w t: upwards 1 - w = |h|^2 / (1 + w), so that nothing cancels.
        gap = torch.where(up, rest + t * (flat / (1 + w.abs())), 1 + w.abs() * t)
        # n over 1 - t, for n itself may fall below the smallest number.
        n = gap * (gap / rest) + t * (t * (flat / rest))
        return 2 * t * h / n / rest, 2 * t * (w - t) / n / rest, (1 + t) / n, direction, t, rest, n

    def transport(self, point: Tensor, step: Tensor, vector: Tensor) -> Tensor:
        """Move a vector along a geodesic (see Manifold): it keeps its length over the height, and its angle."""
        _, _, factor, direction, t, rest, n = self._compute_geodesic_terms(
            round_unless_other_is_mctensor(point[..., -1:], vector), step
        )
        w = direction[..., -1:]
        end = torch.cat([direction[..., :-1] * factor, (w * (1 + t * t) - 2 * t) / n / rest], -1)
        return factor * apply_rotation_from_start_to_end(vector, direction, end)

    def inverse_conformal_factor(self, point: Tensor) -> Tensor:
        """Return the height."""
        return point[..., -1:]

    def project(self, point: Tensor) -> Tensor:
        """Raise heights below the smallest normal number to it."""
        return torch.cat([point[..., :-1], _clamp_height_above_zero(point[..., -1:])], -1)

    def _find_points_outside(self, point: Tensor) -> Tensor:
        return ~(round_to_plain(point[..., -1]) > 0)


def _clamp_height_above_zero(height: Tensor) -> Tensor:
    least = torch.finfo(height.dtype).tiny
    if not isinstance(height, MCTensor):
        return height.clamp(min=least)
    low = round_to_plain(height) < least
    return torch.where(low, torch.full_like(height, least), height) if low.any() else height


_MANIFOLDS_BY_NAME: dict[str, Manifold] = {model.name: model for model in (HalfSpace(), PoincareBall())}


def manifold(which: str | Manifold) -> Manifold:
    """Return the model of a name, "half-space" or "ball"; a Manifold is returned as it is.

    Raises:
        ValueError: no model has that name.

    >>> manifold("ball")
    PoincareBall()
    """
    if isinstance(which, Manifold):
        return which
    if which not in _MANIFOLDS_BY_NAME:
        raise ValueError(f"manifold={which!r} is unknown: choose one of {', '.join(map(repr, _MANIFOLDS_BY_NAME))}")
    return _MANIFOLDS_BY_NAME[which]
