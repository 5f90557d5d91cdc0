"""Mean average precision and mean rank against scikit-learn and against counting."""

import numpy as np
import pytest
import torch

from halfulp.hyperbolic import HalfSpace, PoincareBall, evaluate_reconstruction
from halfulp.mctensor import MCTensor


@pytest.mark.parametrize("ties", [False, True])
def test_against_counting(ties, seed):
    from sklearn.metrics import average_precision_score  # which takes seconds, in each process that collects tests

    points = torch.rand(40, 2, dtype=torch.float64) + 0.1
    if ties:
        points = (points * 3).round() / 3 + 0.5
    edges = torch.tensor([(u, v) for u in range(30) for v in range(40) if u != v and torch.rand(()) < 0.2])
    found = evaluate_reconstruction(points, edges)
    scores, ranks = [], []
    for u in edges[:, 0].unique().tolist():
        distance = HalfSpace().distance(points[u], points).numpy()
        distance[u] = np.inf
        wanted = np.zeros(40, dtype=bool)
        wanted[edges[edges[:, 0] == u, 1]] = True
        scores.append(average_precision_score(wanted, -np.where(np.isinf(distance), 1e9, distance)))
        ranks += [1 + int((distance[~wanted] <= distance[v]).sum()) for v in np.flatnonzero(wanted)]
    assert found.mean_average_precision == pytest.approx(np.mean(scores))
    assert found.mean_rank == pytest.approx(np.mean(ranks))


def test_components_tell_points_apart_that_float64_does_not(seed):
    x = torch.tensor([[1.0, 1e-20], [1.0, 1e-20], [1.0, 1e-20]], dtype=torch.float64)
    points = MCTensor.encode(x) + torch.tensor([[0.0, 0.0], [2e-20, 0.0], [9e-20, 0.0]], dtype=torch.float64)
    edges = torch.tensor([[0, 1]])
    assert evaluate_reconstruction(points, edges).mean_rank == 1.0
    assert evaluate_reconstruction(points.decode(), edges).mean_rank == 2.0


def test_in_the_ball(seed):
    points = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.9]])
    assert evaluate_reconstruction(points, torch.tensor([[0, 1]]), PoincareBall()).mean_average_precision == 1.0
