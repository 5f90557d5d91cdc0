"""Riemannian optimizers: gradient descent with momentum, and Adam."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..mctensor import MCTensor
from ._models import Manifold, manifold, write_rows

_Loss = TypeVar("_Loss", bound=float | Tensor)


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
        defaults["manifold"] = manifold(defaults["manifold"]).name
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's; its points are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        space = manifold(group["manifold"])
        group["manifold"] = space.name
        _check_hyperparameter_range("lr", float(group["lr"]))
        for parameter in group["params"]:
            space.check(parameter)

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
                    self._step_parameter(group, parameter, parameter.grad)
        return loss

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor, euclidean_gradient: Tensor) -> None:
        rows, gradient = _find_rows_with_gradient(euclidean_gradient)
        if not torch.isfinite(gradient).all():
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is not finite: no point was moved; "
                "lower the learning rate, or look for coinciding or far-away points"
            )
        if rows is not None and len(rows) == 0:
            return
        point = parameter.detach() if rows is None else parameter.detach()[rows]
        gradient = manifold(group["manifold"]).gradient(point, gradient)
        write_rows(parameter, rows, self._move_points(group, parameter, rows, point, gradient))

    @abc.abstractmethod
    def _move_points(
        self, group: dict[str, Any], parameter: Tensor, rows: Tensor | None, point: Tensor, gradient: Tensor
    ) -> Tensor:
        """Return the new points of some rows, given their Riemannian gradients."""

    def _read_state(self, name: str, parameter: Tensor, rows: Tensor | None, gradient: Tensor, width: int) -> Tensor:
        """Return the state of some rows, `width` numbers per point; zeros before the first step."""
        state = self.state[parameter]
        if name not in state:
            shape = (*parameter.shape[:-1], width)
            wide = isinstance(gradient, MCTensor)
            state[name] = (torch.zeros_like(parameter) if wide else gradient).new_zeros(shape)
        held: Tensor = state[name]
        return held if rows is None else held[rows]

    def _write_state(self, name: str, parameter: Tensor, rows: Tensor | None, value: Tensor) -> None:
        if rows is None:
            self.state[parameter][name] = value
        else:
            self.state[parameter][name][rows] = value


def _check_hyperparameter_range(name: str, value: float, must_be_below_one: bool = False) -> None:
    """Raise unless 0 <= value, and value < 1 of a share."""
    if not value >= 0 or (must_be_below_one and value >= 1):
        allowed = "it lies in [0, 1)" if must_be_below_one else "it is at least 0"
        raise ValueError(f"{name}={value} is not allowed: {allowed}")


def _find_rows_with_gradient(gradient: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the rows that have a gradient, each once, and their gradients; None for all rows."""
    if isinstance(gradient, MCTensor) or gradient.layout == torch.strided:
        return None, gradient
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ValueError(
            f"a sparse gradient names rows of the first dimension (layout torch.sparse_coo, sparse_dim 1), got layout "
            f"{gradient.layout} of shape {tuple(gradient.shape)}"
        )
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


class RiemannianSGD(RiemannianOptimizer):
    """Riemannian gradient descent, p <- exp_p(-lr grad p) (Bonnabel, IEEE TAC 58, 2013).

    Args:
        params: see RiemannianOptimizer.
        lr: learning rate.
        manifold: "half-space", "ball", or a Manifold.
        momentum: m <- momentum * m + grad p in place of the gradient; m is transported in parallel with its point.

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
        self, params: ParamsT, lr: float | Tensor, manifold: str | Manifold = "half-space", momentum: float = 0.0
    ) -> None:
        _check_hyperparameter_range("momentum", momentum, must_be_below_one=True)
        super().__init__(params, {"lr": lr, "manifold": manifold, "momentum": momentum})

    def _move_points(
        self, group: dict[str, Any], parameter: Tensor, rows: Tensor | None, point: Tensor, gradient: Tensor
    ) -> Tensor:
        space = manifold(group["manifold"])
        if not group["momentum"]:
            return space.exp(point, -group["lr"] * gradient)
        held = self._read_state("momentum_buffer", parameter, rows, gradient, gradient.shape[-1])
        held = group["momentum"] * held + gradient
        step = -group["lr"] * held
        self._write_state("momentum_buffer", parameter, rows, space.transport(point, step, held))
        return space.exp(point, step)


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
        lr: float | Tensor = 1e-3,
        manifold: str | Manifold = "half-space",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            _check_hyperparameter_range(name, beta, must_be_below_one=True)
        _check_hyperparameter_range("eps", eps)
        defaults = {"lr": lr, "manifold": manifold, "betas": tuple(betas), "eps": eps}
        super().__init__(params, defaults)

    def _move_points(
        self, group: dict[str, Any], parameter: Tensor, rows: Tensor | None, point: Tensor, gradient: Tensor
    ) -> Tensor:
        space, (beta, gamma) = manifold(group["manifold"]), group["betas"]
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
        return space.exp(point, step)
