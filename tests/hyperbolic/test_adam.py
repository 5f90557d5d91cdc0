"""Riemannian Adam against its definition."""

import torch

from halfulp.hyperbolic import RiemannianAdam


def test_the_first_step_has_the_learning_rates_length(space, draw):
    point = draw(5)
    weight = torch.nn.Parameter(point.clone())
    optimizer = RiemannianAdam([weight], lr=0.01, manifold=space, eps=0.0)
    weight.grad = torch.randn_like(point) * 1e6
    optimizer.step()
    moved = space.distance(point, weight.detach())
    assert torch.allclose(moved, torch.full_like(moved, 0.01), rtol=1e-7)


def test_steps(space, draw):
    point = draw(5)
    weight = torch.nn.Parameter(point.clone())
    optimizer = RiemannianAdam([weight], lr=0.1, manifold=space, betas=(0.8, 0.9))
    mean, square = torch.zeros_like(point), torch.zeros_like(point[:, :1])
    for k in range(1, 5):
        weight.grad = torch.randn_like(point)
        gradient = space.gradient(point, weight.grad)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * space.norm(point, gradient) ** 2
        optimizer.step()
        step = -0.1 * (mean / (1 - 0.8**k)) / ((square / (1 - 0.9**k)).sqrt() + 1e-8)
        mean, point = space.transport(point, step, mean), space.exp(point, step)
        assert torch.allclose(weight.detach(), point, rtol=1e-10)
    assert optimizer.state[weight]["exp_avg_sq"].shape == (5, 1)
