"""Points and vectors in both models."""

import pytest
import torch

from halfulp.hyperbolic import HalfSpace, Manifold, PoincareBall


@pytest.fixture(params=[HalfSpace(), PoincareBall()], ids=lambda space: space.name)
def space(request: pytest.FixtureRequest) -> Manifold:
    return request.param


@pytest.fixture
def draw(space: Manifold, seed: int):
    """(count, width, depth) -> points up to a distance of about `depth` from the middle, float64."""

    def made(count: int, width: int = 3, depth: float = 3.0) -> torch.Tensor:
        x = torch.randn(count, width, dtype=torch.float64)
        if space.name == "half-space":
            x[:, -1] = ((torch.rand(count, dtype=torch.float64) * 2 - 1) * depth).exp()
            return x
        return x / x.norm(dim=-1, keepdim=True) * (torch.rand(count, 1, dtype=torch.float64) * depth / 2).tanh()

    return made


@pytest.fixture
def vectors(space: Manifold):
    """Vectors at points, of hyperbolic length up to `most`."""

    def made(points: torch.Tensor, most: float = 2.0) -> torch.Tensor:
        v = torch.randn_like(points)
        return v / space.norm(points, v) * (torch.rand_like(points[..., :1]) * most)

    return made
