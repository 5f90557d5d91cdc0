"""Embeddings of graphs: the ranking loss of edges with its gradient, and how well distances reproduce the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._models import HalfSpace, Manifold, round_to_plain


def ranking_loss(points: Tensor, sets: Tensor, scale: float = 1.0, manifold: Manifold | None = None) -> Tensor:
    """Return the mean of -log(exp(-s d(u, v)) / sum over v' of exp(-s d(u, v'))) (Nickel and Kiela, arXiv 1705.08039).

    Args:
        points: (N, d), a plain tensor or an MCTensor; differences are taken with all components.
        sets: int64 of shape (B, 2 + K): a row is the number of u, of v, and of K others that v competes with.
        scale: s.
        manifold: HalfSpace() by default.

    Returns:
        The loss, a plain tensor of the points' dtype without dimensions; autograd goes through it.

    >>> import torch
    >>> points = torch.tensor([[0.0, 1.0], [0.0, 1.1], [9.0, 1.0]])
    >>> round(float(ranking_loss(points, torch.tensor([[0, 1, 2]]))), 4)
    0.0132
    """
    check_ranking_sets(points, sets)
    chosen = points[sets]
    distance = (manifold or HalfSpace()).distance(chosen[:, :1], chosen[:, 1:], dtype=points.dtype)
    logits = -scale * distance
    return (logits.logsumexp(-1) - logits[:, 0]).mean()


@torch.no_grad()
def ranking_loss_and_gradient(points: Tensor, sets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return `ranking_loss` in the half-space and its gradient, without autograd.

    With a = sinh^2(d / 2) = |u - v|^2 / (4 u_y v_y), the derivative of d by a is 1 / sqrt(a (1 + a)), that of a by u is
    (u - v) / (2 u_y v_y), less a / u_y in the height.

    Args:
        points, sets, scale: as `ranking_loss`.

    Returns:
        The loss, and its Euclidean gradient as a plain tensor of the points' shape.
    """
    check_ranking_sets(points, sets)
    first, others = sets[:, :1], sets[:, 1:]
    distance, by_first, by_others = _compute_distances_and_gradients(points[first], points[others])
    share = (distance * -scale).log_softmax(-1)
    loss = -share[:, 0].mean()
    pull = share.exp_().mul_(-scale / len(sets))
    pull[:, 0] += scale / len(sets)
    gradient = distance.new_zeros(points.shape)
    gradient.index_add_(0, first.flatten(), (by_first * pull.unsqueeze(-1)).sum(1))
    gradient.index_add_(0, others.flatten(), (by_others * pull.unsqueeze(-1)).flatten(0, 1))
    return loss.to(points.dtype), gradient.to(points.dtype)


def _compute_distances_and_gradients(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return d(u, v) in float64, and its derivatives by the coordinates of u and of v."""
    if type(u) is Tensor:
        u, v = u.double(), v.double()
    difference = round_to_plain(u - v, torch.float64)
    above, below = round_to_plain(u[..., -1], torch.float64), round_to_plain(v[..., -1], torch.float64)
    inverse = 0.5 / (above.sqrt() * below.sqrt())
    ratio = difference * inverse.unsqueeze(-1)
    a = ratio.square().sum(-1)
    root = a.sqrt()
    slope = torch.where(a > 0, 1 / (root * (1 + a).sqrt()), 0.0)
    by_first = ratio * (2 * inverse * slope).unsqueeze(-1)
    by_others = -by_first
    by_first[..., -1] -= a * slope / above
    by_others[..., -1] -= a * slope / below
    return 2 * root.asinh(), by_first, by_others


def check_ranking_sets(points: Tensor, sets: Tensor) -> None:
    """Raise unless sets are rows of at least three numbers of points."""
    if points.dim() != 2:
        raise ValueError(f"points are a table of shape (N, d), got shape {tuple(points.shape)}")
    if sets.dtype != torch.int64 or sets.dim() != 2 or sets.shape[1] < 3 or len(sets) == 0:
        raise ValueError(
            "sets are int64 of shape (B, 2 + K), each row the number of a point, of its partner and of at least one "
            f"other; got {sets.dtype} of shape {tuple(sets.shape)}"
        )


class RankingSets:
    """Batches of ranking sets (u, v, v_1, ..., v_K): an edge u -> v of a directed graph, and K negatives.

    Negatives are nodes that are neither u nor targets of u, distinct wherever enough of them were found. Everything is
    drawn at once, by torch's generator.

    Args:
        edges: int64 of shape (E, 2): sources and targets.
        nodes: how many nodes there are.
        others: K.
        batch: edges per batch; the last batch of an epoch holds what is left.

    Raises:
        ValueError: no edges, numbers that are no nodes, or a source with edges to all other nodes.

    >>> import torch
    >>> sets = RankingSets(torch.tensor([[0, 1], [1, 2]]), nodes=9, others=3, batch=2)
    >>> drawn = next(sets.epoch(torch.Generator().manual_seed(0)))
    >>> tuple(drawn.shape), sorted(drawn[:, :2].tolist())
    ((2, 5), [[0, 1], [1, 2]])
    """

    def __init__(self, edges: Tensor, nodes: int, others: int = 50, batch: int = 32) -> None:
        if edges.dtype != torch.int64 or edges.dim() != 2 or edges.shape[1] != 2 or len(edges) == 0:
            raise ValueError(f"edges are int64 of shape (E, 2), got {edges.dtype} of shape {tuple(edges.shape)}")
        if int(edges.min()) < 0 or int(edges.max()) >= nodes:
            raise ValueError(f"edges name nodes {int(edges.min())} to {int(edges.max())}, there are 0 to {nodes - 1}")
        if others < 1 or batch < 1:
            raise ValueError(f"others={others} and batch={batch} are at least 1")
        self.edges: Tensor = edges
        self.nodes: int = nodes
        self.others: int = others
        self.batch: int = batch
        self._excluded_pairs = torch.eye(nodes, dtype=torch.bool, device="cpu")
        self._excluded_pairs[edges[:, 0], edges[:, 1]] = True
        full = self._excluded_pairs[edges[:, 0].unique()].all(1)
        if full.any():
            raise ValueError(f"{int(full.sum())} sources have edges to all other nodes: nothing to rank them against")
        self._popularity_weights = torch.bincount(edges[:, 1], minlength=nodes).double() ** 0.75

    def epoch(self, generator: torch.Generator, popular: bool = False) -> Iterator[Tensor]:
        """Yield batches of sets to rank, one set for every edge, in shuffled order.

        Args:
            generator: of all random numbers.
            popular: draw nodes in proportion to the number of edges into them to the power 0.75 (10 K tries per edge),
                as in the burn-in of Nickel and Kiela's code, instead of uniformly.
        """
        order = torch.randperm(len(self.edges), generator=generator, dtype=torch.int64, device="cpu")
        drawn = self.draw(self.edges[order], generator, popular)
        yield from drawn.split(self.batch)

    def draw(self, edges: Tensor, generator: torch.Generator, popular: bool = False) -> Tensor:
        """Return the sets of some edges, int64 of shape (len(edges), 2 + K)."""
        sources = edges[:, 0]
        tries = min(10 * self.others if popular else int(1.5 * self.others) + 8, 32_000)
        shape = len(edges), tries
        if popular:
            ends = self._popularity_weights.cumsum(0)
            marks = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu") * ends[-1]
            candidates = torch.searchsorted(ends, marks, right=True).clamp_(max=self.nodes - 1)
        else:
            candidates = torch.randint(self.nodes, shape, generator=generator, dtype=torch.int64, device="cpu")
        # Each candidate counts where it occurs for the first time in its row.
        columns = torch.arange(tries, dtype=torch.int16, device="cpu").expand(shape)
        seen = torch.full((len(edges), self.nodes), 32_767, dtype=torch.int16, device="cpu")
        is_first = seen.scatter_reduce_(1, candidates, columns, "amin").gather(1, candidates) == columns
        good = ~self._excluded_pairs[sources.unsqueeze(1), candidates] & is_first
        rank = good.cumsum(1)
        found = rank[:, -1]
        good &= rank <= self.others
        made = torch.empty(len(edges), self.others, dtype=torch.int64, device="cpu")
        enough = found >= self.others
        made[enough] = candidates[enough][good[enough]].view(-1, self.others)
        if not enough.all():
            made[~enough] = self._repeat_candidates(sources[~enough], candidates[~enough], good[~enough], generator)
        return torch.cat([edges, made], 1)

    def _repeat_candidates(
        self, sources: Tensor, candidates: Tensor, good: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return a row's valid candidates, repeated until there are enough."""
        found = good.sum(1, keepdim=True)
        for row in (found == 0).nonzero()[:, 0].tolist():
            pool = (~self._excluded_pairs[sources[row]]).nonzero().flatten()
            order = torch.randperm(len(pool), generator=generator, dtype=torch.int64, device="cpu")
            pool = pool[order[: candidates.shape[1]]]
            candidates[row, : len(pool)], good[row, : len(pool)], found[row] = pool, True, len(pool)
        in_front = candidates.gather(1, (~good).to(torch.uint8).argsort(dim=1, stable=True))
        again = torch.rand(len(good), self.others, generator=generator, dtype=torch.float64, device="cpu") * found
        place = torch.arange(self.others, dtype=torch.int64, device="cpu")
        return in_front.gather(1, torch.where(place < found, place, again.long()))


_MOST_SOURCES_RANKED_AT_ONCE = 128


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
def evaluate_reconstruction(points: Tensor, edges: Tensor, manifold: Manifold | None = None) -> Reconstruction:
    """Rank all nodes by their distance from each source of an edge (Nickel and Kiela, arXiv 1705.08039).

    Nodes at equal distance share the worst rank, so that an embedding that collapses is not rewarded.

    Args:
        points: (N, d), a plain tensor or an MCTensor.
        edges: int64 of shape (E, 2).
        manifold: HalfSpace() by default.

    >>> import torch
    >>> points = torch.tensor([[0.0, 1.0], [0.0, 1.1], [9.0, 1.0]])
    >>> evaluate_reconstruction(points, torch.tensor([[0, 1], [2, 0]]))
    Reconstruction(mean_average_precision=0.75, mean_rank=1.5)
    """
    space, count, edges = manifold or HalfSpace(), points.shape[0], edges.to(points.device)
    sources = edges[:, 0].unique()
    wanted = edges.new_zeros(count, count, dtype=torch.bool)
    wanted[edges[:, 0], edges[:, 1]] = True
    precision, ranks = 0.0, 0.0
    for rows in sources.split(_MOST_SOURCES_RANKED_AT_ONCE):
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
