"""Steps of every size, transport and both optimizers, against mpmath with 120 digits."""

import mpmath
import pytest
import torch
from mpmath import mpf

from halfulp.hyperbolic import RiemannianAdam, RiemannianSGD

from . import oracle

SIZES = [10.0**-k for k in range(0, 13, 2)]
# Errors relative to the vector.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13}


def off(found, wanted) -> float:
    """The largest distance of two lists of vectors, over the length of the wanted one."""
    return max(
        float(mpmath.sqrt(sum((a - b) ** 2 for a, b in zip(ours, theirs)) / oracle.dot(theirs, theirs)))
        for ours, theirs in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", SIZES)
def test_transport(space, draw, vectors, dtype, size):
    # Of hyperbolic depth 3, where a rounded end still has its own margin to many digits.
    p = draw(12, 3, 1.5).to(dtype)
    v = (vectors(p.double(), 1.0) * size).to(dtype)
    w = vectors(p.double()).to(dtype)
    wanted = [oracle.transport(space.name, *each) for each in zip(*map(oracle.values, (p, v, w)))]
    assert off(oracle.values(space.transport(p, v, w)), wanted) < BOUNDS[dtype]


def gradients(point, count):
    return [torch.randn_like(point) for _ in range(count)]


def riemannian(space, point, gradient):
    return [a * oracle.size(space.name, point) ** 2 for a in gradient]


def exact_sgd(space, points, gradients, lr):
    """Momentum .9, and where each point ends."""
    ends = []
    for index, point in enumerate(points):
        held = [mpf(0)] * len(point)
        for gradient in gradients:
            slope = riemannian(space, point, oracle.values(gradient)[index])
            held = [mpf(0.9) * a + b for a, b in zip(held, slope)]
            step = [-mpf(lr) * a for a in held]
            held, point = oracle.transport(space.name, point, step, held), oracle.EXP[space.name](point, step)
        ends.append((held, point))
    return zip(*ends)


def exact_adam(space, points, gradients, lr):
    """Betas .8 and .9, eps 1e-8."""
    ends = []
    for index, point in enumerate(points):
        mean, square = [mpf(0)] * len(point), mpf(0)
        for number, gradient in enumerate(gradients, 1):
            slope = riemannian(space, point, oracle.values(gradient)[index])
            mean = [mpf(0.8) * a + (1 - mpf(0.8)) * b for a, b in zip(mean, slope)]
            length = oracle.dot(slope, slope) / oracle.size(space.name, point) ** 2
            square = mpf(0.9) * square + (1 - mpf(0.9)) * length
            scale = mpmath.sqrt(square / (1 - mpf(0.9) ** number)) + mpf(1e-8)
            step = [-mpf(lr) / (1 - mpf(0.8) ** number) * a / scale for a in mean]
            mean, point = oracle.transport(space.name, point, step, mean), oracle.EXP[space.name](point, step)
        ends.append((mean, point))
    return zip(*ends)


OPTIMIZERS = {
    "sgd": (lambda p, lr, space: RiemannianSGD([p], lr, space, momentum=0.9), "momentum_buffer", exact_sgd),
    "adam": (lambda p, lr, space: RiemannianAdam([p], lr, space, betas=(0.8, 0.9)), "exp_avg", exact_adam),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("lr", [0.1, 1e-3, 1e-7, 1e-12])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_holds_points_where_it_should(space, draw, dtype, lr, name):
    make, held, exact = OPTIMIZERS[name]
    point = draw(4, 3, 1.5).to(dtype)
    weight = torch.nn.Parameter(point.clone())
    optimizer = make(weight, lr, space)
    steps = gradients(point, 5)
    for gradient in steps:
        weight.grad = gradient
        optimizer.step()
    vectors, points = exact(space, oracle.values(point), steps, lr)
    assert off(oracle.values(optimizer.state[weight][held]), vectors) < BOUNDS[dtype]
    assert off(oracle.values(weight.detach()), points) < BOUNDS[dtype]
