"""Riemannian SGD against its definition."""

import torch

from halfulp.hyperbolic import RiemannianSGD


def test_a_step_is_the_exponential_map(space, draw):
    points, gradient = draw(5), torch.randn(5, 3, dtype=torch.float64)
    weight = torch.nn.Parameter(points.clone())
    optimizer = RiemannianSGD([weight], lr=0.3, manifold=space)
    weight.grad = gradient
    optimizer.step()
    assert torch.allclose(weight.detach(), space.exp(points, -0.3 * space.size(points) ** 2 * gradient), rtol=1e-14)


def test_momentum_is_transported(space, draw):
    point = draw(5)
    weight = torch.nn.Parameter(point.clone())
    optimizer = RiemannianSGD([weight], lr=0.2, manifold=space, momentum=0.9)
    held = torch.zeros_like(point)
    for _ in range(4):
        weight.grad = torch.randn_like(point)
        held = 0.9 * held + space.gradient(point, weight.grad)
        optimizer.step()
        step = -0.2 * held
        held, point = space.transport(point, step, held), space.exp(point, step)
        assert torch.allclose(weight.detach(), point, rtol=1e-10)
