"""Manifold: the interface of a model of hyperbolic space."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch

from ..mctensor import MCTensor
from ._values import round_to_plain

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Manifold(abc.ABC):
    """A model of hyperbolic space of curvature -1; points are the vectors along a tensor's last dimension.

    All operations take plain tensors and MCTensors, broadcast over the other dimensions, and are differentiable.
    Vectors at a point are given in coordinates, as gradients are.

    Attributes:
        name: what param groups and messages call it.
        least: the fewest coordinates of a point.
    """

    name: ClassVar[str]
    least: ClassVar[int] = 1

    def distance(self, u: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the length of the geodesic between two points, with derivative 0 where they coincide.

        Args:
            u, v: points (..., d), shapes broadcast; plain tensors or MCTensors.
            dtype: a plain dtype for the result. The coordinates' differences are then taken with all components, and
                what follows is computed in that dtype: a few of its ulps in accuracy, at nearly a plain distance's
                time. By default the result is as wide as the points.

        Returns:
            Distances (...).
        """
        a = self._spread(u, v, dtype)
        near = a == 0
        return torch.where(near, torch.zeros_like(a), 2 * torch.where(near, torch.ones_like(a), a).sqrt().asinh())

    def squared_distance(self, u: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the square of `distance`, smooth also where the points coincide."""
        a = self._spread(u, v, dtype)
        near = a == 0
        half = torch.where(near, torch.ones_like(a), a).sqrt().asinh()
        return torch.where(near, 4 * a, 4 * half * half)

    @abc.abstractmethod
    def _spread(self, u: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return sinh^2(d / 2)."""

    @abc.abstractmethod
    def exp(self, point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return the end of the geodesic that starts at a point along a vector and is as long as it (exponential map).

        Args:
            point: (..., d).
            step: vectors at the points, (..., d). A plain step at an MCTensor's point is the usual case: the step is
                rounded, the position keeps all components, for only the movement is added to it.
        """

    @abc.abstractmethod
    def log(self, point: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the vector at a point that `exp` takes to the other point."""

    @abc.abstractmethod
    def transport(self, point: torch.Tensor, step: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Return a vector at a point, moved in parallel along the geodesic of `exp(point, step)` to its end."""

    @abc.abstractmethod
    def size(self, point: torch.Tensor) -> torch.Tensor:
        """Return the number of coordinate units per unit length at a point: |v| / size is the length of v; (..., 1)."""

    @abc.abstractmethod
    def project(self, point: torch.Tensor) -> torch.Tensor:
        """Return the point, or the nearest admissible one where rounding left it outside or on the edge."""

    @abc.abstractmethod
    def _outside(self, point: torch.Tensor) -> torch.Tensor:
        """Return which points do not belong to the model, as booleans (...)."""

    @abc.abstractmethod
    def _rule(self) -> str:
        """Return the condition on points, in words."""

    def retract(self, point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return point + step, projected: `exp` to first order, for a fraction of its time."""
        return self.project(point + step)

    def gradient(self, point: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the Riemannian gradient from the Euclidean one: size^2 times it, as wide as the gradient."""
        size = self.size(point if isinstance(gradient, MCTensor) else round_to_plain(point))
        return size * (size * gradient)

    def norm(self, point: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Return the length of a vector at a point; (..., 1)."""
        size = self.size(point if isinstance(vector, MCTensor) else round_to_plain(point))
        length: torch.Tensor = torch.linalg.vector_norm(round_to_plain(vector / size), dim=-1, keepdim=True)
        return length

    def check(self, points: torch.Tensor) -> None:
        """Raise unless all points are finite points of the model.

        Raises:
            TypeError: no floating tensor.
            ValueError: too few coordinates, or points outside; how many, and which is the first.
        """
        if not isinstance(points, torch.Tensor) or points.dtype not in _DTYPES:
            kind = points.dtype if isinstance(points, torch.Tensor) else type(points).__name__
            raise TypeError(f"points of {self.name} are a tensor of floating numbers, got {kind}")
        if points.dim() == 0 or points.shape[-1] < self.least:
            raise ValueError(
                f"points of {self.name} have at least {self.least} coordinates along the last dimension, got shape "
                f"{tuple(points.shape)}"
            )
        with torch.no_grad():
            bad = self._outside(points) | ~round_to_plain(points).isfinite().all(-1)
        if bad.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{int(bad.sum())} of {bad.numel()} points are outside {self.name}, which needs {self._rule()}; the "
                f"first is at {first}: {round_to_plain(points.detach())[first].tolist()}"
            )
