"""Riemannian stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ._manifold import Manifold
from ._optimizer import RiemannianOptimizer, check_share, follow


class RiemannianSGD(RiemannianOptimizer):
    """p <- exp_p(-lr grad p), the gradient made Riemannian (Bonnabel, IEEE TAC 58, 2013).

    Args:
        params: see RiemannianOptimizer.
        lr: learning rate.
        manifold: "half-space", "ball", or a Manifold.
        momentum: m <- momentum * m + grad p in place of the gradient; m is transported in parallel with its point.
        retraction: move straight on and project, instead of along the geodesic.

    Raises:
        ValueError: see RiemannianOptimizer; momentum outside [0, 1).

    >>> import torch
    >>> from halfulp.hyperbolic import HalfSpace
    >>> w = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [3.0, 1.0]]))
    >>> opt = RiemannianSGD([w], lr=0.1, manifold="half-space")
    >>> before = HalfSpace().distance(w[0], w[1])
    >>> before.backward(); opt.step()
    >>> after = HalfSpace().distance(*w.detach())
    >>> round(float(before.detach() - after), 4)
    0.2
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor,
        manifold: str | Manifold = "half-space",
        momentum: float = 0.0,
        *,
        retraction: bool = False,
    ) -> None:
        check_share("momentum", momentum)
        super().__init__(params, {"lr": lr, "manifold": manifold, "momentum": momentum, "retraction": retraction})

    def _moved(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        rows: torch.Tensor | None,
        space: Manifold,
        point: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        if not group["momentum"]:
            return follow(group, space, point, -group["lr"] * gradient)
        held = self._read_state("momentum_buffer", parameter, rows, gradient, gradient.shape[-1])
        held = group["momentum"] * held + gradient
        step = -group["lr"] * held
        self._write_state("momentum_buffer", parameter, rows, space.transport(point, step, held))
        return follow(group, space, point, step)
