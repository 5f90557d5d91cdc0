"""Riemannian Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ._manifold import Manifold
from ._optimizer import RiemannianOptimizer, check_share, follow


class RiemannianAdam(RiemannianOptimizer):
    """Adam on a product of hyperbolic spaces, one per point (Bécigneul and Ganea, arXiv 1810.00760).

    The first moment is a vector at each point, transported in parallel with it; the second is one number per point,
    the mean square of the gradient's Riemannian length. With bias correction,
    p <- exp_p(-lr m^ / (sqrt(v^) + eps)). Rows without a gradient in a sparse one keep their point and moments, as
    with torch.optim.SparseAdam; steps are counted per parameter.

    Args:
        params: see RiemannianOptimizer.
        lr: learning rate; about how far a point moves per step.
        manifold: "half-space", "ball", or a Manifold.
        betas: decay of the two moments.
        eps: added to the root.
        retraction: move straight on and project, instead of along the geodesic.

    Raises:
        ValueError: see RiemannianOptimizer; betas outside [0, 1), eps below 0.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.tensor([[0.0, 1.0]]))
    >>> opt = RiemannianAdam([w], lr=0.5)
    >>> w.grad = torch.tensor([[0.0, 123.0]])
    >>> opt.step()
    >>> round(float(w.detach()[0, 1].log()), 4)
    -0.5
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        manifold: str | Manifold = "half-space",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        retraction: bool = False,
    ) -> None:
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_share(name, beta)
        if not eps >= 0:
            raise ValueError(f"eps={eps} is not allowed: it is at least 0")
        defaults = {"lr": lr, "manifold": manifold, "betas": tuple(betas), "eps": eps, "retraction": retraction}
        super().__init__(params, defaults)

    def _moved(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        rows: torch.Tensor | None,
        space: Manifold,
        point: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        beta, gamma = group["betas"]
        number = self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        mean = self._read_state("exp_avg", parameter, rows, gradient, gradient.shape[-1])
        mean = beta * mean + (1 - beta) * gradient
        length = space.norm(point, gradient)
        square = self._read_state("exp_avg_sq", parameter, rows, length, 1)
        square = gamma * square + (1 - gamma) * (length * length)
        self._write_state("exp_avg_sq", parameter, rows, square)
        scale = (square / (1 - gamma**number)).sqrt() + group["eps"]
        step = mean * (-group["lr"] / (1 - beta**number) / scale)
        self._write_state("exp_avg", parameter, rows, space.transport(point, step, mean))
        return follow(group, space, point, step)
