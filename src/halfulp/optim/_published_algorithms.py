"""Optimizers of papers that torch.optim does not have; beside their arguments the options of Optimizer."""

from __future__ import annotations

from typing import Any

import torch

from ..formats import Format
from ._group_options import NOT_NEGATIVE, Parameters, split_arguments
from ._optimizer import Optimizer
from .rules._adan import ADAN
from .rules._ademamix import ADEMAMIX
from .rules._lamb import LAMB as LAMB_RULE
from .rules._lion import LION
from .rules._update_rule import UpdateRule
from .states._state import StateChoice
from .weight_updates._weight_update import WeightUpdate


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
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Lion."""
        return LION


class Adan(Optimizer):
    """Adan: Adam with Nesterov's momentum by the change of the gradient (arXiv 2208.06677).

    Args:
        params: parameters, named parameters or groups.
        lr, eps: step size, and what is added to the root of the second moment.
        betas: the shares that the means of gradients, of their changes and of squares keep.
        weight_decay, no_prox: w / (1 + lr weight_decay) after the step, or w (1 - lr weight_decay) before it.
        maximize: ascent.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.Adan([w], lr=1e-2)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> bool((w < 1).all())
    True
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0,
        no_prox: bool = False,
        *,
        maximize: bool = False,
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
        """Return Adan."""
        return ADAN


class AdEMAMix(Optimizer):
    """AdEMAMix: AdamW with a second, slow momentum beside the fast one (arXiv 2409.03137).

    Args:
        params: parameters, named parameters or groups.
        lr, eps, weight_decay, maximize: step size, addend to the root of the second moment, decoupled decay, ascent.
        betas: the shares that the fast momentum, the mean of squares and the slow momentum keep.
        alpha: the weight of the slow momentum.
        beta3_warmup, alpha_warmup: steps in which the slow beta and its weight grow to these values.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.AdEMAMix([w], lr=1e-2)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> bool((w < 1).all())
    True
    """

    _not_negative = (*NOT_NEGATIVE, "alpha", "beta3_warmup", "alpha_warmup")

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-8,
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
        defaults, own = split_arguments(locals())
        super().__init__(params, defaults, **own)

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return AdEMAMix."""
        return ADEMAMIX


class LAMB(Optimizer):
    """LAMB: AdamW whose step of a tensor is as long as the tensor, times lr (arXiv 1904.00962).

    r = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd w -> w - lr |w|/|r| r. Both norms have the same bits on every
    engine and under every sharding. Gradients are clipped by torch.nn.utils.clip_grad_norm_, if they are to be.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, maximize: as AdamW.
        bias_correction: whether the moments are divided by 1 - beta^t.
        trust_clip: whether |w|/|r| is at most 1.
        always_adapt: whether it is taken without weight decay too, where the ratio is else 1.
        weight_update, param_dtype, state_dtype, format, seed, report_interval: see Optimizer.

    Raises:
        ValueError: a hyper-parameter out of range, or options that do not go together.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.full((4,), 3.0))
    >>> opt = hu.optim.LAMB([w], lr=0.125, always_adapt=True, weight_decay=0)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> w
    Parameter containing:
    tensor([2.6250, 2.6250, 2.6250, 2.6250], requires_grad=True)
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        trust_clip: bool = False,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
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
        """Return LAMB."""
        return LAMB_RULE
