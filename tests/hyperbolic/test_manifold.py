"""Both models against mpmath with 120 digits, and against an integration of the geodesic equations."""

import mpmath
import pytest
import torch
from mpmath import mpf

from halfulp.hyperbolic import HalfSpace, PoincareBall
from halfulp.mctensor import MCTensor

from . import oracle

U = 2.0**-53


def relative(found: list[mpf], wanted: list[mpf]) -> float:
    return float(max(abs(a / b - 1) for a, b in zip(found, wanted)))


def flat(x: torch.Tensor) -> list[mpf]:
    return [row[0] for row in oracle.values(x.unsqueeze(-1))]


def true_distances(space, u, v) -> list[mpf]:
    return [oracle.DISTANCE[space.name](a, b) for a, b in zip(oracle.values(u), oracle.values(v))]


@pytest.mark.parametrize(("depth", "width"), [(1.0, 2), (25.0, 3)])
def test_distance(space, draw, depth, width):
    u, v = draw(60, width, depth), draw(60, width, depth)
    wanted = true_distances(space, u, v)
    assert relative(flat(space.distance(u, v)), wanted) < 6 * U


def test_distance_of_components(space, draw):
    u, v = MCTensor.encode(draw(40)), MCTensor.encode(draw(40))
    u = u + 1e-20
    wanted = true_distances(space, u, v)
    assert relative(flat(space.distance(u, v)), wanted) < 2.0**-94
    assert relative(flat(space.distance(u, v, dtype=torch.float64)), wanted) < 6 * U


@pytest.mark.parametrize("y", [10.0**-k for k in range(0, 29, 4)])
def test_close_points_far_out(y):
    """The published code is off by 1.2e-9 at y = 1e-12, and plain float64 says 0.69 or infinity from 1e-18 on."""
    pi = mpf(float(mpmath.pi))
    u, v = [pi, mpf(y)], [pi + 3 * mpf(y), 2 * mpf(y)]
    wanted = [oracle.half_space_distance(u, v)]
    exact = MCTensor.encode([u], dtype=torch.float64), MCTensor.encode([v], dtype=torch.float64)
    assert relative(flat(HalfSpace().distance(*exact)), wanted) <= 1e-15
    assert relative(flat(HalfSpace().distance(*exact, dtype=torch.float64)), wanted) <= 1e-15


def test_distance_broadcasts(space, draw):
    u, v = draw(4), draw(5)
    table = space.distance(u.unsqueeze(1), v)
    assert table.shape == (4, 5)
    assert torch.equal(table[2], space.distance(u[2], v))
    assert torch.allclose(table, space.distance(v, u.unsqueeze(1)), rtol=1e-14)


def test_coinciding_points(space, draw):
    u = draw(3).requires_grad_()
    v = u.detach().clone()
    space.distance(u, v).sum().backward()
    assert torch.equal(u.grad, torch.zeros_like(u))
    other = MCTensor.encode(v)
    assert torch.equal(space.distance(other, other).decode(), torch.zeros(3, dtype=torch.float64))


def test_derivatives(space, draw, vectors):
    p, q = draw(3), draw(3)
    v, w = vectors(p), vectors(p)
    inputs = [x.requires_grad_() for x in (p, q, v, w)]
    assert torch.autograd.gradcheck(lambda p, q, v, w: space.distance(p, q), inputs[:2] + inputs[2:], atol=1e-5)
    assert torch.autograd.gradgradcheck(space.distance, inputs[:2], atol=1e-3)
    assert torch.autograd.gradcheck(space.exp, [inputs[0], inputs[2]], atol=1e-5)
    assert torch.autograd.gradcheck(space.transport, [inputs[0], inputs[2], inputs[3]], atol=1e-5)


def test_exp(space, draw, vectors):
    p = draw(80)
    v = vectors(p, 6.0)
    # Towards the boundary the end of a step of length r lies e^r times as near as its start: so many ulps count there.
    limits = (40 + space.norm(p, v).exp()).flatten().tolist()
    found = space.exp(p, v)
    for start, step, end, limit in zip(oracle.values(p), oracle.values(v), oracle.values(found), limits):
        wanted = oracle.EXP[space.name](start, step)
        assert max(abs(a - b) / (abs(a) + abs(c)) for a, b, c in zip(wanted, end, start)) < limit * U
    space.check(found)


def test_exp_of_components_keeps_them(space, draw, vectors):
    """A plain step is known to 53 bits; the end is known to so many bits of the movement, not of the place."""
    p = MCTensor.encode(draw(40), components=2)
    p = p + 2.0**-60
    v = vectors(p.decode(), 2.0) * 1e-12
    found = space.exp(p, v)
    for start, step, end in zip(oracle.values(p), oracle.values(v), oracle.values(found)):
        wanted = oracle.EXP[space.name](start, step)
        moved = max(abs(a - b) for a, b in zip(wanted, start))
        assert max(abs(a - b) for a, b in zip(wanted, end)) < moved * 1e-14 + mpf(2) ** -98


def test_exp_of_a_step_with_components(space, draw, vectors):
    p, v = draw(10), None
    v = MCTensor.encode(vectors(p))
    found = space.exp(MCTensor.encode(p), v)
    for start, step, end in zip(oracle.values(p), oracle.values(v), oracle.values(found)):
        wanted = oracle.EXP[space.name](start, step)
        assert max(abs(a - b) / (abs(a) + abs(c)) for a, b, c in zip(wanted, end, start)) < 2.0**-88


def test_no_step_is_no_move(space, draw):
    p = draw(5)
    zero = torch.zeros_like(p)
    assert torch.equal(space.exp(p, zero), p)
    assert torch.equal(space.exp(p, zero.clone().requires_grad_()), p)
    assert torch.equal(space.transport(p, zero, p), p)


def test_a_step_is_as_long_as_the_way_it_goes(space, draw, vectors):
    p = draw(50)
    v = vectors(p)
    assert torch.allclose(space.norm(p, v).squeeze(-1), space.distance(p, space.exp(p, v)), rtol=1e-11)


def test_transport_keeps_lengths_angles_and_the_geodesic(space, draw, vectors):
    p = draw(50)
    v, a, b = vectors(p), vectors(p), vectors(p)
    end = space.exp(p, v)
    moved, other = space.transport(p, v, a), space.transport(p, v, b)
    assert torch.allclose(space.norm(end, moved), space.norm(p, a), rtol=1e-9)
    assert torch.allclose(space.norm(end, moved + other), space.norm(p, a + b), rtol=1e-8)
    assert torch.allclose(space.exp(end, -space.transport(p, v, v)), p, rtol=1e-9, atol=1e-12)


def test_transport_against_the_equations(space, draw, vectors):
    """Runge and Kutta on x'' = -G(x', x'), w' = -G(x', w), for the metric |v|^2 / f^2: G from the slope of log f."""
    p = draw(6)
    v, w = vectors(p, 1.5), vectors(p)

    def slope(x):
        if space.name == "half-space":
            made = torch.zeros_like(x)
            made[:, -1] = 1 / x[:, -1]
            return made
        return -2 * x / (1 - (x * x).sum(-1, keepdim=True))

    def across(x, a, b):
        s = slope(x)
        inner = lambda c, d: (c * d).sum(-1, keepdim=True)  # noqa: E731
        return inner(s, a) * b + inner(s, b) * a - inner(a, b) * s

    def rates(state):
        x, a, b = state
        return a, across(x, a, a), across(x, a, b)

    state, h = (p, v, w), 1 / 200
    step = lambda state, rate, h: tuple(s + h * r for s, r in zip(state, rate))  # noqa: E731
    for _ in range(200):
        k1 = rates(state)
        k2 = rates(step(state, k1, h / 2))
        k3 = rates(step(state, k2, h / 2))
        k4 = rates(step(state, k3, h))
        state = tuple(s + h / 6 * (a + 2 * b + 2 * c + d) for s, a, b, c, d in zip(state, k1, k2, k3, k4))
    assert torch.allclose(space.exp(p, v), state[0], rtol=1e-6, atol=1e-8)
    assert torch.allclose(space.transport(p, v, w), state[2], rtol=1e-5, atol=1e-7)


def test_gradient_is_the_steepest_way(space, draw):
    p, q = draw(20).requires_grad_(), draw(20)
    (euclidean,) = torch.autograd.grad(space.distance(p, q).sum(), p)
    p = p.detach()
    found = space.gradient(p, euclidean)
    # Of a distance it is the unit vector away from the other point.
    assert torch.allclose(space.norm(p, found), torch.ones(20, 1, dtype=torch.float64), rtol=1e-10)
    away = space.exp(p, -found * space.distance(p, q).unsqueeze(-1))
    assert torch.allclose(away, q, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_steps_stay_inside(space, draw, dtype):
    p = draw(30, depth=8.0).to(dtype)
    v = torch.randn_like(p) * 1e4
    for step in (v, v.clone().requires_grad_()):
        space.check(space.exp(p, step).detach())


def test_check(space, draw):
    p = draw(4)
    space.check(p)
    space.check(MCTensor.encode(p))
    bad = p.clone()
    bad[2] = -2.0
    bad[3, 0] = torch.nan
    with pytest.raises(ValueError, match=rf"2 of 4 points are outside {space.name}.*first is at \(2,\)"):
        space.check(bad)
    with pytest.raises(TypeError, match="int64"):
        space.check(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="list"):
        space.check([[1.0]])
    with pytest.raises(ValueError, match="at least"):
        space.check(torch.tensor(0.5))
    space.check(space.project(bad[:3]))


def test_half_space_and_ball_are_the_same_space(seed):
    """By the Cayley map p -> 2 (p + e) / |p + e|^2 - e with e the last axis."""
    half, ball = HalfSpace(), PoincareBall()
    p = torch.randn(2, 30, 3, dtype=torch.float64)
    p[..., -1] = p[..., -1].exp()
    e = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)

    def cayley(x):
        x = x + e
        return 2 * x / (x * x).sum(-1, keepdim=True) - e

    assert torch.allclose(half.distance(*p), ball.distance(*cayley(p)), rtol=1e-10)


# Dynamo makes an instance of an autograd function by itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_inside_a_compiled_function(space, draw, vectors):
    p, q = draw(4), draw(4)
    v = vectors(p)

    def function(p, q, v):
        return space.distance(space.exp(p, v), q)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(p, q, v), function(p, q, v), rtol=1e-11)


@pytest.mark.parametrize("components", [1, 2])
def test_points_inside_are_projected_to_themselves(space, draw, components):
    points = draw(4, 2)
    points = points if components == 1 else MCTensor.encode(points, components)
    found = space.project(points)
    assert torch.equal(found, points)
    assert found is points or space.name == "half-space"
