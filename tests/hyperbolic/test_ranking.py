"""The ranking loss: its definition, and its gradient in closed form against autograd."""

import pytest
import torch

from halfulp.hyperbolic import HalfSpace, PoincareBall, RankingSets, ranking_loss, ranking_loss_and_gradient
from halfulp.mctensor import MCTensor


def points(count: int = 30, width: int = 2, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(count, width, dtype=torch.float64)
    x[:, -1] = x[:, -1].exp()
    return x.to(dtype)


def test_definition(seed):
    x, sets = points(), torch.randint(30, (4, 7))
    for space in (HalfSpace(), PoincareBall()):
        x = x if space == HalfSpace() else x / (1 + x.norm(dim=1, keepdim=True))
        wanted = 0.0
        for row in sets.tolist():
            share = [(-0.3 * space.distance(x[row[0]], x[k])).exp() for k in row[1:]]
            wanted -= float((share[0] / sum(share)).log()) / 4
        assert float(ranking_loss(x, sets, 0.3, space)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_in_closed_form(width, components, dtype, seed):
    x, sets = points(width=width, dtype=dtype), torch.randint(30, (8, 9))
    sets[3, 4] = sets[3, 0]
    y = x.double().requires_grad_()
    wanted = ranking_loss(y, sets, 0.7)
    wanted.backward()
    loss, gradient = ranking_loss_and_gradient(x if components == 1 else MCTensor.encode(x, components), sets, 0.7)
    bound = 4 * torch.finfo(dtype).eps
    assert type(gradient) is torch.Tensor
    assert gradient.dtype == loss.dtype == dtype
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=bound)
    # At a point of height h each set adds terms of at most 2 (0.7) / 8 h in all, which may cancel.
    terms = 2 * 0.7 / 8 * torch.bincount(sets.flatten(), minlength=30).unsqueeze(1) / x[:, -1:].double()
    assert bool(((gradient.double() - y.grad).abs() <= 4 * bound * (y.grad.abs() + terms)).all())


def test_components_through_autograd(seed):
    x, sets = points(), torch.randint(30, (8, 9))
    weight = torch.nn.Parameter(MCTensor.encode(x, 2))
    loss = ranking_loss(weight, sets)
    loss.backward()
    wanted, gradient = ranking_loss_and_gradient(x, sets)
    assert float(loss.detach()) == pytest.approx(float(wanted), rel=1e-13)
    assert torch.allclose(weight.grad, gradient, rtol=1e-10, atol=1e-14)


def test_a_scale_changes_nothing(seed):
    x, sets = points(dtype=torch.float16), torch.randint(30, (8, 9))
    a, b = ranking_loss_and_gradient(x, sets), ranking_loss_and_gradient(MCTensor.encode(x, 2, scale=2.0**-6), sets)
    assert torch.allclose(a[1].float(), b[1].float(), rtol=2e-3, atol=1e-4)
    assert float(a[0]) == pytest.approx(float(b[0]), rel=2e-3)


def test_no_distance_has_no_pull(seed):
    x = points(1).repeat(5, 1)
    loss, gradient = ranking_loss_and_gradient(x, torch.tensor([[0, 1, 2, 3]]))
    assert float(loss) == pytest.approx(1.0986122886681098)
    assert torch.equal(gradient, torch.zeros_like(x))


def test_bad_sets(seed):
    x = points()
    for call in (ranking_loss, ranking_loss_and_gradient):
        with pytest.raises(ValueError, match="int64"):
            call(x, torch.zeros(2, 3))
        with pytest.raises(ValueError, match="at least one"):
            call(x, torch.zeros(2, 2, dtype=torch.int64))
        with pytest.raises(ValueError, match="table"):
            call(x[0], torch.zeros(2, 3, dtype=torch.int64))


def graph(nodes: int = 60) -> torch.Tensor:
    """A binary tree's closure: from every node to all its ancestors."""
    edges = []
    for node in range(1, nodes):
        above = node
        while above:
            above = (above - 1) // 2
            edges.append((node, above))
    return torch.tensor(edges)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("popular", [False, True])
def test_an_epoch(popular, seed):
    edges = graph()
    known = {tuple(edge) for edge in edges.tolist()}
    sets = RankingSets(edges, 60, others=10, batch=7)
    batches = list(sets.epoch(generator(seed), popular))
    assert {len(batch) for batch in batches[:-1]} == {7}
    drawn = torch.cat(batches)
    assert drawn.shape == (len(edges), 12)
    assert sorted(drawn[:, :2].tolist()) == sorted(edges.tolist())
    for row in drawn.tolist():
        assert all(other != row[0] and (row[0], other) not in known for other in row[2:])
        if not popular:
            assert len(set(row[2:])) == 10


def test_seeds_decide(seed):
    sets = RankingSets(graph(), 60, others=10)
    first, again = next(sets.epoch(generator(seed))), next(sets.epoch(generator(seed)))
    assert torch.equal(first, again)
    assert not torch.equal(first, next(sets.epoch(generator(seed + 1))))


def test_uniform_draws(seed):
    """Chi-square over the 1,000 nodes that a leaf may be ranked against, for 25 of them at a time."""
    edges = torch.tensor([[0, 1]])
    sets = RankingSets(edges, 1002, others=25)
    drawn = sets.draw(edges.expand(4000, 2), generator(seed))[:, 2:]
    counts = torch.bincount(drawn.flatten(), minlength=1002)[2:].double()
    assert float(((counts - 100) ** 2 / 100).sum()) < 1000 + 5 * 2000**0.5


def test_popular_draws_follow_the_edges(seed):
    edges = torch.tensor([[k, 0] for k in range(1, 17)] + [[k, 20] for k in range(21, 22)] + [[30, 31]])
    sets = RankingSets(edges, 40, others=1)
    drawn = sets.draw(torch.tensor([[30, 31]]).expand(4000, 2), generator(seed), popular=True)[:, 2]
    share = float((drawn == 0).double().mean())
    assert set(drawn.tolist()) == {0, 20}
    assert abs(share - 8 / 9) < 5 * (8 / 81 / 4000) ** 0.5


def test_few_nodes_are_repeated(seed):
    sets = RankingSets(torch.tensor([[0, 1], [2, 0]]), 4, others=30)
    for row in sets.draw(sets.edges, generator(seed)).tolist():
        assert set(row[2:]) == {2, 3} if row[0] == 0 else {1, 3}


def test_no_popular_one_is_left(seed):
    sets = RankingSets(torch.tensor([[0, 1]]), 4, others=3)
    assert set(sets.draw(sets.edges, generator(seed), popular=True)[0, 2:].tolist()) == {2, 3}


def test_bad_graphs():
    with pytest.raises(ValueError, match=r"shape \(E, 2\)"):
        RankingSets(torch.zeros(3), 4)
    with pytest.raises(ValueError, match="there are 0 to 3"):
        RankingSets(torch.tensor([[0, 4]]), 4)
    with pytest.raises(ValueError, match="all other nodes"):
        RankingSets(torch.tensor([[0, 1], [0, 2]]), 3)
    with pytest.raises(ValueError, match="at least 1"):
        RankingSets(torch.tensor([[0, 1]]), 4, others=0)
