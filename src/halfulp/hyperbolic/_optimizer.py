"""The base of Riemannian optimizers: checks of points, and selecting and updating the rows that have gradients."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.optim.optimizer import ParamsT

from ..mctensor import MCTensor
from ._manifold import Manifold
from ._models import manifold
from ._values import write

_Loss = TypeVar("_Loss", bound=float | torch.Tensor)


class RiemannianOptimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer of points: every vector along a parameter's last dimension moves along a geodesic.

    Parameters are plain tensors or MCTensors. A sparse gradient (as of nn.Embedding(sparse=True)) moves, and reads the
    state of, the rows that it names and no other; a dense one moves every point. Learning-rate schedules are torch's:
    a burn-in of 20 epochs at a hundredth is `torch.optim.lr_scheduler.ConstantLR(opt, factor=0.01, total_iters=20)`.
    A param group may name a manifold of its own.

    Args:
        params: parameters, named parameters or groups, as of any torch optimizer; each holds points along its last
            dimension.
        defaults: hyper-parameters of the groups.

    Raises:
        ValueError: an unknown manifold, a negative learning rate, or points that lie outside the manifold.
        TypeError: a parameter without floating numbers.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        defaults["manifold"] = _name(defaults["manifold"])
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's; its points are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["manifold"] = _name(group["manifold"])
        _check_not_below("lr", float(group["lr"]), 0.0)
        for parameter in group["params"]:
            manifold(group["manifold"]).check(parameter)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], _Loss]) -> _Loss: ...

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], _Loss] | None = None) -> _Loss | None:
        """Move all points that have a gradient.

        Args:
            closure: evaluates the loss again and returns it.

        Raises:
            ValueError: a gradient is not finite, or its sparse rows are not along the first dimension. Nothing of that
                parameter has moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter, parameter.grad, manifold(group["manifold"]))
        return loss

    def _step_one(self, group: dict[str, Any], parameter: torch.Tensor, given: torch.Tensor, space: Manifold) -> None:
        rows, gradient = _touched(given)
        if not torch.isfinite(gradient).all():
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is not finite: no point was moved; "
                "lower the learning rate, or look for coinciding or far-away points"
            )
        if rows is not None and len(rows) == 0:
            return
        point = parameter.detach() if rows is None else parameter.detach()[rows]
        moved = self._moved(group, parameter, rows, space, point, space.gradient(point, gradient))
        write(parameter, rows, moved)

    @abc.abstractmethod
    def _moved(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        rows: torch.Tensor | None,
        space: Manifold,
        point: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        """Return the new points of some rows, given their Riemannian gradients."""

    def _read_state(
        self, name: str, parameter: torch.Tensor, rows: torch.Tensor | None, gradient: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Return the state of some rows, `width` numbers per point; zeros before the first step."""
        state = self.state[parameter]
        if name not in state:
            shape = (*parameter.shape[:-1], width)
            wide = isinstance(gradient, MCTensor)
            state[name] = (torch.zeros_like(parameter) if wide else gradient).new_zeros(shape)
        held: torch.Tensor = state[name]
        return held if rows is None else held[rows]

    def _write_state(self, name: str, parameter: torch.Tensor, rows: torch.Tensor | None, value: torch.Tensor) -> None:
        """Store the state of some rows."""
        if rows is None:
            self.state[parameter][name] = value
        else:
            self.state[parameter][name][rows] = value


def follow(group: dict[str, Any], space: Manifold, point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the end of a step: along the geodesic, or by retraction if the group asks for it."""
    return space.retract(point, step) if group["retraction"] else space.exp(point, step)


def check_share(name: str, value: float) -> None:
    """Raise unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} is not allowed: it lies in [0, 1)")


def _check_not_below(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name}={value} is not allowed: it is at least {least}")


def _name(which: str | Manifold) -> str:
    return manifold(which).name


def _touched(gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The rows that have a gradient, each once, and their gradients; None for all rows."""
    if isinstance(gradient, MCTensor) or gradient.layout == torch.strided:
        return None, gradient
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ValueError(
            f"a sparse gradient names rows of the first dimension (layout torch.sparse_coo, sparse_dim 1), got layout "
            f"{gradient.layout} of shape {tuple(gradient.shape)}"
        )
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()
