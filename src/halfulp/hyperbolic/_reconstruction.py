"""Measures of how well the distances of an embedding reproduce a graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._half_space import HalfSpace
from ._manifold import Manifold

_ROWS = 128


@dataclass(frozen=True)
class Reconstruction:
    """Mean average precision and mean rank of an embedding; both are 1 if every source is closest to its targets.

    Attributes:
        mean_average_precision: over the sources, of their targets among all nodes ranked by distance.
        mean_rank: over the edges u -> v, of v among v and all nodes that u has no edge to.
    """

    mean_average_precision: float
    mean_rank: float


@torch.no_grad()
def reconstruction(points: torch.Tensor, edges: torch.Tensor, manifold: Manifold | None = None) -> Reconstruction:
    """Rank all nodes by their distance from each source of an edge (Nickel and Kiela, arXiv 1705.08039).

    Nodes at equal distance share the worst rank, so that an embedding that collapses is not rewarded.

    Args:
        points: (N, d), a plain tensor or an MCTensor.
        edges: int64 of shape (E, 2).
        manifold: HalfSpace() by default.

    >>> import torch
    >>> points = torch.tensor([[0.0, 1.0], [0.0, 1.1], [9.0, 1.0]])
    >>> reconstruction(points, torch.tensor([[0, 1], [2, 0]]))
    Reconstruction(mean_average_precision=0.75, mean_rank=1.5)
    """
    space, count, edges = manifold or HalfSpace(), points.shape[0], edges.to(points.device)
    sources = edges[:, 0].unique()
    wanted = edges.new_zeros(count, count, dtype=torch.bool)
    wanted[edges[:, 0], edges[:, 1]] = True
    precision, ranks = 0.0, 0.0
    for rows in sources.split(_ROWS):
        distance = space.distance(points[rows].unsqueeze(1), points.unsqueeze(0), dtype=torch.float64)
        distance.scatter_(1, rows.unsqueeze(1), torch.inf)
        ordered, order = distance.sort(1)
        hit = wanted[rows].gather(1, order)
        # Of nodes at equal distance all count as far as the last.
        last = torch.searchsorted(ordered, ordered, right=True)
        hits = hit.cumsum(1).gather(1, last - 1)
        share = torch.where(hit, hits / last, 0.0).sum(1) / hit.sum(1)
        precision += float(share.sum())
        ranks += float(torch.where(hit, last - hits + 1, 0).sum())
    return Reconstruction(precision / len(sources), ranks / int(wanted.sum()))
