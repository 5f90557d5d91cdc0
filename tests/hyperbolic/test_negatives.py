"""Sets to rank: what they must and must not hold."""

import pytest
import torch

from halfulp.hyperbolic import RankingSets


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
