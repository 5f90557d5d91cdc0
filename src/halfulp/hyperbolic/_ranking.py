"""The ranking loss of an embedding in the half-space, and its gradient in closed form."""

from __future__ import annotations

import torch

from ..mctensor import MCTensor
from . import _half_space_kernels as kernels
from ._half_space import HalfSpace
from ._manifold import Manifold


def ranking_loss(
    points: torch.Tensor, sets: torch.Tensor, scale: float = 1.0, manifold: Manifold | None = None
) -> torch.Tensor:
    """The mean of -log(exp(-s d(u, v)) / sum over v' of exp(-s d(u, v'))) (Nickel and Kiela, arXiv 1705.08039).

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
    check_sets(points, sets)
    chosen = points[sets]
    distance = (manifold or HalfSpace()).distance(chosen[:, :1], chosen[:, 1:], dtype=points.dtype)
    logits = -scale * distance
    return (logits.logsumexp(-1) - logits[:, 0]).mean()


@torch.no_grad()
def ranking_gradient(points: torch.Tensor, sets: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """`ranking_loss` in the half-space and its gradient, without autograd: several times as fast.

    With a = sinh^2(d / 2) = |u - v|^2 / (4 u_y v_y), the derivative of d by a is 1 / sqrt(a (1 + a)), that of a by u is
    (u - v) / (2 u_y v_y), less a / u_y in the height.

    Args:
        points, sets, scale: as `ranking_loss`.

    Returns:
        The loss, and its Euclidean gradient as a plain tensor of the points' shape.
    """
    check_sets(points, sets)
    count, width = points.shape
    first, others = sets[:, :1].contiguous(), sets[:, 1:].contiguous()
    made = _pairs(points, first, others)
    share = (made[0] * -scale).log_softmax(-1)
    loss = -share[:, 0].mean()
    pull = share.exp_().mul_(-scale / len(sets))
    pull[:, 0] += scale / len(sets)
    by = made[1:].mul_(pull)
    table = by.new_zeros(width, count)
    table.scatter_add_(1, first.view(1, -1).expand(width, -1), by[:width].sum(-1))
    table.scatter_add_(1, others.view(1, -1).expand(width, -1), by[width:].view(width, -1))
    gradient = table.t()
    if isinstance(points, MCTensor) and points.scale is not None:
        # The half-space is the same at every scale: only what a unit is changes.
        gradient /= points.scale
    return loss.to(points.dtype), gradient.to(points.dtype)


def _pairs(points: torch.Tensor, first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Distances and their derivatives, (1 + 2 d, B, 1 + K): see the kernel."""
    parts = points.components if isinstance(points, MCTensor) else (points,)
    width = points.shape[1]
    columns = [part.detach()[:, k].contiguous() for k in range(width) for part in parts]
    values = [column.take(first) for column in columns] + [column.take(others) for column in columns]
    made = torch.empty(1 + 2 * width, *others.shape, dtype=torch.float64, device=points.device)
    kernels.pairs(width, len(parts), points.dtype)(values, made.unbind())
    return made


def check_sets(points: torch.Tensor, sets: torch.Tensor) -> None:
    """Raise unless sets are rows of at least three numbers of points."""
    if points.dim() != 2:
        raise ValueError(f"points are a table of shape (N, d), got shape {tuple(points.shape)}")
    if sets.dtype != torch.int64 or sets.dim() != 2 or sets.shape[1] < 3 or len(sets) == 0:
        raise ValueError(
            "sets are int64 of shape (B, 2 + K), each row the number of a point, of its partner and of at least one "
            f"other; got {sets.dtype} of shape {tuple(sets.shape)}"
        )
