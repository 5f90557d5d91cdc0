"""SGD, Adam and AdamW with the signatures of torch.optim's, and Lion; beside them the options of Optimizer."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .._names import enter, words_of
from ..formats import Format
from ._group_options import Parameters, check_torch_switches
from ._optimizer import Optimizer
from .rules._adam import ADAM, ADAM_AMSGRAD, ADAMW, ADAMW_AMSGRAD
from .rules._lion import LION
from .rules._sgd import SGD as PLAIN
from .rules._sgd import SGD_MOMENTUM, SGD_NESTEROV
from .rules._update_rule import UpdateRule
from .states._state import StateChoice
from .weight_updates._weight_update import WeightUpdate

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])


class SGD(Optimizer):
    """Stochastic gradient descent: g + wd w -> momentum b + (1 - dampening) g -> w - lr b, as torch.optim.SGD.

    Args:
        params: parameters, named parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as torch.optim.SGD.
        foreach, differentiable, fused: see Optimizer.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.SGD([w], lr=2.0**-12, weight_update="kahan")
    >>> for _ in range(16):
    ...     w.grad = torch.ones_like(w)
    ...     opt.step()
    >>> w
    Parameter containing:
    tensor([0.9961, 0.9961], dtype=torch.bfloat16, requires_grad=True)
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        check_torch_switches("SGD", foreach=foreach, differentiable=differentiable, fused=fused)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            weight_update=weight_update,
            param_dtype=param_dtype,
            state_dtype=state_dtype,
            format=format,
            seed=seed,
            report_interval=report_interval,
        )

    def _check_numbers(self, group: dict[str, Any]) -> None:
        super()._check_numbers(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("SGD(nesterov=True) needs a momentum above 0 and no dampening")

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return plain SGD, momentum or Nesterov's momentum."""
        if group["nesterov"]:
            return SGD_NESTEROV
        return SGD_MOMENTUM if group["momentum"] else PLAIN


class Adam(Optimizer):
    """Adam with the decay added to the gradient, as torch.optim.Adam.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as torch.optim.Adam.
        foreach, capturable, differentiable, fused: see Optimizer.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        name = type(self).__name__
        check_torch_switches(name, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(
            params,
            defaults,
            weight_update=weight_update,
            param_dtype=param_dtype,
            state_dtype=state_dtype,
            format=format,
            seed=seed,
            report_interval=report_interval,
        )

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Adam, with AMSGrad or without, decay coupled or decoupled."""
        coupled, decoupled = (ADAM_AMSGRAD, ADAMW_AMSGRAD) if group["amsgrad"] else (ADAM, ADAMW)
        return decoupled if group["decoupled_weight_decay"] else coupled


class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW; the decay is part of what the weight update rounds.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW.
        foreach, capturable, differentiable, fused: see Optimizer.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(64, 64)
    >>> opt = hu.optim.AdamW(model.named_parameters(), lr=1e-3, param_dtype=torch.bfloat16, weight_update="split")
    >>> model.weight.dtype, sorted(opt.float32_state_dict(model))
    (torch.bfloat16, ['bias', 'weight'])
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            weight_update=weight_update,
            param_dtype=param_dtype,
            state_dtype=state_dtype,
            format=format,
            seed=seed,
            report_interval=report_interval,
        )

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return AdamW, with AMSGrad or without, whatever a loaded group says of the decay."""
        return ADAMW_AMSGRAD if group["amsgrad"] else ADAMW


class Lion(Optimizer):
    """Lion: w - lr (sign(b1 m + (1-b1) g) + wd w), m to b2 m + (1-b2) g (arXiv 2302.06675).

    Args:
        params: parameters, named parameters or groups.
        lr, betas, weight_decay, maximize: step size, the two decay rates, decoupled decay, ascent.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            weight_update=weight_update,
            param_dtype=param_dtype,
            state_dtype=state_dtype,
            format=format,
            seed=seed,
            report_interval=report_interval,
        )

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Lion."""
        return LION


OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (SGD, Adam, AdamW, Lion)}


def register_optimizer(kind: OptimizerClass) -> OptimizerClass:
    """Make an optimizer known by its class's name, to tasks, recipes and comparisons; a decorator of the class.

    Returns:
        The class.

    Raises:
        TypeError: it is no subclass of Optimizer, or has no `rule`.
        ValueError: another optimizer has the name, or this one has no docstring.

    >>> register_optimizer(torch.optim.Adagrad)
    Traceback (most recent call last):
    ...
    TypeError: an optimizer is a subclass of hu.optim.Optimizer, got <class 'torch.optim.adagrad.Adagrad'>
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"an optimizer is a subclass of hu.optim.Optimizer, got {kind!r}")
    if kind.rule is Optimizer.rule:
        raise TypeError(f"{kind.__name__} has no rule: write rule(self, group), which gives an UpdateRule")
    enter("optimizer", OPTIMIZERS, kind.__name__, kind, words_of(kind))
    return kind
