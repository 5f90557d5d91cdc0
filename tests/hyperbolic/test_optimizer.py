"""What the Riemannian optimizers share: rows, checks, schedules, state."""

import io

import pytest
import torch

from halfulp.hyperbolic import HalfSpace, PoincareBall, RiemannianAdam, RiemannianSGD, ranking_loss
from halfulp.mctensor import MCTensor

MAKERS = {
    "sgd": lambda params, **options: RiemannianSGD(params, lr=0.1, **options),
    "momentum": lambda params, **options: RiemannianSGD(params, lr=0.1, momentum=0.5, **options),
    "adam": lambda params, **options: RiemannianAdam(params, lr=0.1, **options),
}


@pytest.fixture(params=list(MAKERS))
def make(request):
    return MAKERS[request.param]


def start(space, draw, count=6, components=1, depth=3.0):
    points = draw(count, 2, depth)
    return torch.nn.Parameter(points if components == 1 else MCTensor.encode(points, components))


def whole(x):
    return x.detach().decode() if isinstance(x, MCTensor) else x.detach()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("components", [1, 2])
def test_points_meet(space, draw, make, components):
    # From more than 8 away Adam may swing about its target for longer than this.
    weight = start(space, draw, 6, components, depth=2.0)
    target = draw(6, 2, depth=2.0)
    optimizer = make([weight], manifold=space)
    for _ in range(150):
        optimizer.zero_grad()
        space.distance(weight, target, dtype=torch.float64).square().sum().backward()
        optimizer.step()
    assert float(space.distance(whole(weight), target).max()) < 0.1
    assert isinstance(weight, MCTensor) == (components == 2)


def test_sparse_gradients_move_their_rows_only(space, draw, make):
    points = draw(6, 2)
    other = draw(1, 2)
    results = []
    for sparse in (False, True):
        table = torch.nn.Embedding(6, 2, sparse=sparse, dtype=torch.float64)
        table.weight.data.copy_(points)
        optimizer = make(table.parameters(), manifold=space)
        for _ in range(3):
            optimizer.zero_grad()
            chosen = table(torch.tensor([4, 1, 4]))
            space.distance(chosen, other).square().sum().backward()
            optimizer.step()
        results.append(table.weight.detach())
    still = [0, 2, 3, 5]
    assert torch.equal(results[1][still], points[still])
    assert not torch.equal(results[1][[1, 4]], points[[1, 4]])
    assert torch.allclose(results[0][[1, 4]], results[1][[1, 4]], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # by torch 2.11
@pytest.mark.parametrize("components", [1, 2])
def test_sparse_rows_of_components(space, draw, make, components):
    weight = start(space, draw, 6, components)
    before = whole(weight).clone()
    optimizer = make([weight], manifold=space)
    rows = torch.tensor([[5, 0, 5]])
    weight.grad = torch.sparse_coo_tensor(rows, torch.ones(3, 2, dtype=torch.float64), (6, 2), check_invariants=True)
    optimizer.step()
    changed = (whole(weight) != before).any(1)
    assert changed.tolist() == [True, False, False, False, False, True]


def test_movements_below_an_ulp_add_up(seed):
    """A million steps of 1e-22 at a place of size 3 are nothing in float64; here a thousand are seen exactly."""
    weight = torch.nn.Parameter(MCTensor.encode([[3.0, 1.0]], dtype=torch.float64))
    optimizer = RiemannianSGD([weight], lr=1e-22)
    for _ in range(1000):
        weight.grad = torch.tensor([[-1.0, 0.0]], dtype=torch.float64)
        optimizer.step()
    assert float((weight.detach() - 3.0).decode()[0, 0]) == pytest.approx(1e-19, rel=1e-9)


def test_points_with_a_scale_move_as_points_without_one(space, draw, make):
    points, gradient = draw(6, 2), torch.randn(6, 2, dtype=torch.float64)
    plain, scaled = (torch.nn.Parameter(MCTensor.encode(points, 2, scale=scale)) for scale in (None, 2.0**-6))
    for weight in (plain, scaled):
        weight.grad = gradient.clone()
        make([weight], manifold=space).step()
    assert torch.allclose(whole(scaled), whole(plain), rtol=1e-12)


def test_burn_in_by_a_schedule_of_torch(seed):
    weight = torch.nn.Parameter(torch.tensor([[0.0, 1.0]]))
    optimizer = RiemannianSGD([weight], lr=1.7)
    burn_in = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.01, total_iters=2)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        burn_in.step()
    assert rates == pytest.approx([0.017, 0.017, 1.7, 1.7])


def test_resuming_gives_the_same_bits(space, draw, make):
    points = draw(6, 2)
    gradients = torch.randn(6, 6, 2, dtype=torch.float64)

    def run(interrupted: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(points.clone())
        optimizer = make([weight], manifold=space)
        for step, gradient in enumerate(gradients):
            if interrupted and step == 3:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                optimizer = make([weight], manifold=space)
                optimizer.load_state_dict(torch.load(file, weights_only=True))
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    assert torch.equal(run(False), run(True))


def test_groups_may_live_in_several_spaces(seed):
    half, ball = torch.nn.Parameter(torch.tensor([[0.0, 1.0]])), torch.nn.Parameter(torch.tensor([[0.5, 0.0]]))
    optimizer = RiemannianSGD([{"params": [half]}, {"params": [ball], "manifold": PoincareBall()}], lr=1.0)
    half.grad, ball.grad = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    optimizer.step()
    assert torch.allclose(half, torch.tensor([[0.0, -1.0]]).exp() * torch.tensor([[0.0, 1.0]]))
    wanted = PoincareBall().exp(torch.tensor([[0.5, 0.0]]), torch.tensor([[-(0.375**2), 0.0]]))
    assert torch.allclose(ball, wanted)


def test_a_closure(seed):
    weight = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 3.0]]))
    optimizer = RiemannianSGD([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = ranking_loss(weight, torch.tensor([[0, 1, 2]]))
        loss.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    assert float(optimizer.step(closure).detach()) < first


def test_bad_input(space, draw, make):
    weight = start(space, draw)
    with pytest.raises(ValueError, match="choose one of 'half-space', 'ball'"):
        make([weight], manifold="sphere")
    with pytest.raises(ValueError, match="outside"):
        make([torch.nn.Parameter(torch.full((2, 2), -3.0))], manifold=space)
    with pytest.raises(ValueError, match="lr=-1"):
        make([{"params": [weight], "lr": -1}], manifold=space)
    optimizer = make([weight], manifold=space)
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step()
    assert torch.equal(weight, before)
    weight.grad = torch.ones_like(weight).to_sparse(2)
    with pytest.raises(ValueError, match="sparse_dim"):
        optimizer.step()


def test_bad_rates():
    weight = torch.nn.Parameter(torch.ones(1, 2))
    with pytest.raises(ValueError, match="momentum=1"):
        RiemannianSGD([weight], lr=0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"betas\[1\]=2"):
        RiemannianAdam([weight], betas=(0.9, 2.0))
    with pytest.raises(ValueError, match="eps"):
        RiemannianAdam([weight], eps=-1.0)


@pytest.mark.parametrize(
    ("kind", "name", "share"),
    [
        *((kind, "lr", False) for kind in (RiemannianSGD, RiemannianAdam)),
        *((RiemannianSGD, "momentum", True), (RiemannianAdam, "beta1", True), (RiemannianAdam, "beta2", True)),
        (RiemannianAdam, "eps", False),
    ],
)
def test_rates_at_the_ends_of_their_ranges(kind, name, share):
    """From 0 on, and of a share below 1."""

    def make(value: float) -> None:
        betas = {"beta1": (value, 0.5), "beta2": (0.5, value)}
        options = {"betas": betas[name]} if name in betas else {name: value}
        kind([torch.nn.Parameter(torch.ones(1, 2))], **{"lr": 0.1, **options})

    for allowed in (0.0, 1 - 2.0**-53, *(() if share else (1.0, 2.0))):
        make(allowed)
    for refused in (-(2.0**-1074), float("nan"), *((1.0,) if share else ())):
        with pytest.raises(ValueError, match=r"is not allowed: it (lies in|is at least 0)"):
            make(refused)


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_autograd_knows_that_points_were_moved(space, draw, make, components, is_sparse):
    weight = start(space, draw, 3, components)
    kept = (weight * weight).sum()  # its gradient needs the points as they are
    rows, values = torch.tensor([[0, 2]]), torch.ones(2, 2, dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(rows, values, (3, 2), check_invariants=True)
    weight.grad = sparse if is_sparse else sparse.to_dense()
    make([weight], manifold=space).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_no_rows_is_no_step(seed):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = RiemannianAdam([weight])
    weight.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (3, 2), check_invariants=True
    )
    optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2))
    assert HalfSpace().least == 2


def test_a_step_is_the_exponential_map(space, draw):
    points, gradient = draw(5), torch.randn(5, 3, dtype=torch.float64)
    weight = torch.nn.Parameter(points.clone())
    optimizer = RiemannianSGD([weight], lr=0.3, manifold=space)
    weight.grad = gradient
    optimizer.step()
    assert torch.allclose(
        weight.detach(), space.exp(points, -0.3 * space.inverse_conformal_factor(points) ** 2 * gradient), rtol=1e-14
    )


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
