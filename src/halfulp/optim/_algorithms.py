"""Optimizers with the signatures of torch.optim's, and beside them the options of Optimizer."""

from __future__ import annotations

from typing import Any

import torch

from ..formats import Format
from ._group_options import Parameters, split_arguments
from ._optimizer import Optimizer
from .rules._adagrad import ADAGRAD
from .rules._adam import ADAM, ADAM_AMSGRAD, ADAMW, ADAMW_AMSGRAD
from .rules._nadam import NADAM, NADAMW
from .rules._radam import RADAM, RADAMW
from .rules._rmsprop import RMSPROP, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM, RMSPROP_MOMENTUM
from .rules._sgd import SGD as PLAIN
from .rules._sgd import SGD_MOMENTUM, SGD_NESTEROV
from .rules._update_rule import UpdateRule
from .states._state import StateChoice
from .weight_updates._weight_update import WeightUpdate


class SGD(Optimizer):
    """Stochastic gradient descent: g + wd w -> momentum b + (1 - dampening) g -> w - lr b, as torch.optim.SGD.

    Args:
        params: parameters, named parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as torch.optim.SGD.
        foreach, differentiable, fused: accepted unless they ask for another implementation.
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
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("SGD(nesterov=True) needs a momentum above 0 and no dampening")
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

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
        foreach, capturable, differentiable, fused: accepted unless they ask for another implementation.
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
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Adam, with AMSGrad or without, decay coupled or decoupled."""
        coupled, decoupled = (ADAM_AMSGRAD, ADAMW_AMSGRAD) if group["amsgrad"] else (ADAM, ADAMW)
        return decoupled if group["decoupled_weight_decay"] else coupled


class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW; the decay is part of what the weight update rounds.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW.
        foreach, capturable, differentiable, fused: accepted unless they ask for another implementation.
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
        defaults, own = split_arguments(locals())
        super().__init__(params, **defaults, decoupled_weight_decay=True, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return AdamW, with AMSGrad or without, whatever a loaded group says of the decay."""
        return ADAMW_AMSGRAD if group["amsgrad"] else ADAMW


class Adagrad(Optimizer):
    """Adagrad: s + g^2 -> s, w - lr/(1 + (t-1) lr_decay) g / (sqrt(s) + eps), as torch.optim.Adagrad.

    Args:
        params: parameters, named parameters or groups.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as torch.optim.Adagrad.
        foreach, differentiable, fused: accepted unless they ask for another implementation.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.Adagrad([w], lr=0.1)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> bool((w < 1).all())
    True
    """

    _not_negative = ("lr_decay",)

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Adagrad."""
        return ADAGRAD


class RMSprop(Optimizer):
    """RMSprop: v the mean of g^2, w - lr g / (sqrt(v) + eps), centered or with momentum, as torch.optim.RMSprop.

    Args:
        params: parameters, named parameters or groups.
        lr, alpha, eps, weight_decay, momentum, centered, maximize: as torch.optim.RMSprop. A centered one keeps both
            means in float32 unless told otherwise, and takes a variance that rounding makes negative as 0.
        capturable, foreach, differentiable: accepted unless they ask for another implementation.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.RMSprop([w], momentum=0.9)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> bool((w < 1).all())
    True
    """

    _not_negative = ("alpha",)

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return RMSprop, centered or not, with momentum or without."""
        if group["centered"]:
            return RMSPROP_CENTERED_MOMENTUM if group["momentum"] else RMSPROP_CENTERED
        return RMSPROP_MOMENTUM if group["momentum"] else RMSPROP


class NAdam(Optimizer):
    """NAdam: Adam with Nesterov's momentum (Dozat, 2016), as torch.optim.NAdam.

    The product of momenta is that of these betas from the first step on, also where a scheduler has changed them.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize: as torch.optim.NAdam.
        foreach, capturable, differentiable: accepted unless they ask for another implementation.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.NAdam([w], weight_update="kahan")
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> bool((w < 1).all())
    True
    """

    _not_negative = ("momentum_decay",)

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return NAdam, decay coupled or decoupled."""
        return NADAMW if group["decoupled_weight_decay"] else NADAM


class RAdam(Optimizer):
    """RAdam: Adam whose step grows with what is known of the second moment (arXiv 1908.03265), as torch.optim.RAdam.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: as torch.optim.RAdam.
        foreach, capturable, differentiable: accepted unless they ask for another implementation.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.RAdam([w], weight_update="kahan")
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> bool((w < 1).all())
    True
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return RAdam, decay coupled or decoupled."""
        return RADAMW if group["decoupled_weight_decay"] else RADAM
