"""Optimizers of papers that torch.optim does not have; `params`, `**options` and what is refused are Optimizer's."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch

from ._float32 import read_float32_weights
from ._group_options import (
    NON_NEGATIVE_OPTIONS,
    OptimizerOptions,
    OptimizerParams,
    check_real_number,
    make_init_arguments,
)
from ._optimizer import Optimizer, register_optimizer
from .parameters._outside_writes import set_weight
from .rules._adam_variants import ADAN, ADEMAMIX, PRODIGY, compute_next_prodigy_estimate
from .rules._adam_variants import LAMB as LAMB_RULE
from .rules._momentum import LION, SCHEDULE_FREE_ADAMW, SCHEDULE_FREE_SGD, compute_next_schedule_free_counters

# What a schedule-free optimizer's groups count.
_INITIAL_SCHEDULE_FREE_COUNTERS = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True}


@register_optimizer
class Lion(Optimizer):
    """Lion: w - lr (sign(b1 m + (1-b1) g) + wd w), m to b2 m + (1-b2) g (arXiv 2302.06675).

    Args:
        lr, betas, weight_decay, maximize: step size, the two decay rates, decoupled decay, ascent.
    """

    _rule = LION

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))


@register_optimizer
class Adan(Optimizer):
    """Adan: Adam with Nesterov's momentum by the change of the gradient (arXiv 2208.06677).

    Args:
        lr, eps: step size, and what is added to the root of the second moment.
        betas: the shares that the means of gradients, of their changes and of squares keep.
        weight_decay, no_prox: w / (1 + lr weight_decay) after the step, or w (1 - lr weight_decay) before it.
        maximize: ascent.

    >>> import torch, halfulp as hu
    >>> opt = hu.optim.Adan(torch.nn.Linear(4, 2).bfloat16().parameters(), lr=1e-2)
    """

    _rule = ADAN

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0,
        no_prox: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))


@register_optimizer
class AdEMAMix(Optimizer):
    """AdEMAMix: AdamW with a second, slow momentum beside the fast one (arXiv 2409.03137).

    Args:
        lr, eps, weight_decay, maximize: step size, addend to the root of the second moment, decoupled decay, ascent.
        betas: the shares that the fast momentum, the mean of squares and the slow momentum keep.
        alpha: the weight of the slow momentum.
        beta3_warmup, alpha_warmup: steps in which the slow beta and its weight grow to these values.

    >>> import torch, halfulp as hu
    >>> opt = hu.optim.AdEMAMix(torch.nn.Linear(4, 2).bfloat16().parameters(), lr=1e-2)
    """

    _non_negative_options = (*NON_NEGATIVE_OPTIONS, "alpha", "beta3_warmup", "alpha_warmup")
    _rule = ADEMAMIX

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))


@register_optimizer
class LAMB(Optimizer):
    """LAMB: AdamW whose step of a tensor is as long as the tensor, times lr (arXiv 1904.00962).

    r = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd w -> w - lr |w|/|r| r. Both norms have the same bits on every
    engine and under every sharding. Gradients are clipped by torch.nn.utils.clip_grad_norm_, if they are to be.

    Args:
        lr, betas, eps, weight_decay, maximize: as AdamW.
        bias_correction: whether the moments are divided by 1 - beta^t.
        trust_clip: whether |w|/|r| is at most 1.
        always_adapt: whether it is taken without weight decay too, where the ratio is else 1.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.full((4,), 3.0))
    >>> opt = hu.optim.LAMB([w], lr=0.125, always_adapt=True, weight_decay=0)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> w
    Parameter containing:
    tensor([2.6250, 2.6250, 2.6250, 2.6250], requires_grad=True)
    """

    _rule = LAMB_RULE

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        trust_clip: bool = False,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))


class ScheduleFree(Optimizer):
    """The base of optimizers whose parameters are where gradients are taken, and after `eval()` the run's averages."""

    _non_negative_options = (*NON_NEGATIVE_OPTIONS, "warmup_steps", "weight_lr_power")
    # The weights of the averages count the steps of all parameters.
    _can_step_one_parameter = False

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Let parameters be the weights to train, or with `mode=False` those to evaluate.

        Each comes from the other and z by its equation, in float32, so that to and fro may round.
        """
        for group in self.param_groups:
            if group["train_mode"] == mode:
                continue
            group["train_mode"] = mode
            for position, parameter in enumerate(group["params"]):
                if "z" in self.state.get(parameter, ()):
                    plan = self._get_valid_plan(group, position)
                    weight = read_float32_weights([plan])[0] * plan.scale
                    z = plan.spec.codecs[0].decode(plan.states[0])
                    share = self._read_interpolation_beta(group)
                    set_weight(plan, (weight + (z - weight) * (1 - share if mode else 1 - 1 / share)) / plan.scale)

    def _read_interpolation_beta(self, group: dict[str, Any]) -> float:
        """Return the share of the average in the point at which gradients are taken."""
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    def _take_step(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__} is in evaluation, where parameters are averages: call its train() before step()"
            )
        super()._take_step()
        for group in self.param_groups:
            _, group["lr_max"], group["weight_sum"] = compute_next_schedule_free_counters(group)
            group["k"] += 1

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        super()._check_hyperparameters(group)
        if not 0 < self._read_interpolation_beta(group) < 1:
            raise ValueError(
                f"{type(self).__name__} takes gradients between an average and a point, at a share of the average in "
                f"(0, 1), got {self._read_interpolation_beta(group)}: give betas[0] or momentum there"
            )


@register_optimizer
class SGDScheduleFree(ScheduleFree):
    """Schedule-free SGD: an average of the steps in place of a learning rate schedule (arXiv 2405.15682).

    z - lr (g + wd y) -> z, (1-c) x + c z -> x, with c = lr^p / sum lr^p; the parameter is y = (1-m) z + m x, and x
    between `eval()` and `train()`. z is a float32 state (or "bfloat16x2").

    Args:
        lr, momentum, weight_decay: step size, the share m of the average in y, decay at y.
        warmup_steps: over which the step size grows.
        r, weight_lr_power: the average weighs step t by t^r times this power of the largest step size so far.
        maximize: ascent.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> opt = hu.optim.SGDScheduleFree([w], lr=0.5)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(2)
    ...     opt.step()
    >>> opt.eval()
    >>> w
    Parameter containing:
    tensor([0.2500, 0.2500], requires_grad=True)
    >>> opt.train()
    """

    _rule = SCHEDULE_FREE_SGD

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals(), **_INITIAL_SCHEDULE_FREE_COUNTERS))


@register_optimizer
class AdamWScheduleFree(ScheduleFree):
    """Schedule-free AdamW: an average of the steps in place of a learning rate schedule (arXiv 2405.15682).

    z - lr (g / (sqrt(v)/sqrt(1-b2^t) + eps) + wd y) -> z, (1-c) x + c z -> x, with c = lr^p / sum lr^p; the parameter
    is y = (1-b1) z + b1 x, and x between `eval()` and `train()`. z is a float32 state (or "bfloat16x2").

    Args:
        lr, eps, weight_decay: step size, addend to the root of the second moment, decay at y.
        betas: the share of the average in y, and the share of the second moment that a step keeps.
        warmup_steps: over which the step size grows.
        r, weight_lr_power: the average weighs step t by t^r times this power of the largest step size so far.
        maximize: ascent.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(4, 4).bfloat16()
    >>> opt = hu.optim.AdamWScheduleFree(model.parameters(), lr=2.5e-3, weight_update="kahan")
    >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    >>> opt.step()
    >>> opt.eval()  # before evaluation and before the model is saved to be used
    >>> opt.train()
    """

    _rule = SCHEDULE_FREE_ADAMW

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals(), **_INITIAL_SCHEDULE_FREE_COUNTERS))


@register_optimizer
class Prodigy(Optimizer):
    """Prodigy: AdamW that estimates its step size from how far weights have come (arXiv 2306.06101).

    m, v the moments of d g; w - d lr (m / (sqrt(v) + d eps) + wd w); d the largest so far of sum g (w0 - w) d lr over
    sum |s|, s the sum of d lr g, over all parameters of all groups. Both sums have the same bits on every engine and
    under every sharding. w0 is a float32 state (or "bfloat16x2").

    Args:
        lr: a factor of the estimate, for schedules; the same in every group, or 0.
        betas, eps, weight_decay: as AdamW; betas[0] above 0.
        beta3: the share that the sums keep; None for the root of betas[1].
        decouple: whether the decay is taken from the weight, or added to the gradient.
        use_bias_correction, safeguard_warmup: unbiased moments; sums that a warmup of lr does not weigh.
        d0, d_coef, growth_rate: the first estimate, a factor of it, and by how much a step may multiply it.
        maximize: ascent.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(4))
    >>> opt = hu.optim.Prodigy([w])
    >>> for _ in range(60):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> opt.param_groups[0]["d"] > 0.01
    True
    """

    _non_negative_options = (*NON_NEGATIVE_OPTIONS, "beta3", "d_coef")
    # The estimate is over all parameters.
    _can_step_one_parameter = False
    _rule = PRODIGY

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals(), d=0.0, d_max=0.0, d_numerator=0.0, k=0))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as Optimizer does; its estimate starts from its own d0 unless it comes with one."""
        lacking = [name for name in ("d", "d_max") if name not in param_group]
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(dict.fromkeys(lacking, group["d0"]))

    def _take_step(self) -> None:
        rates = {float(group["lr"]) for group in self.param_groups} - {0.0}
        if len(rates) > 1:
            raise ValueError(
                f"Prodigy takes one lr for all param groups, or 0, got {sorted(rates)}: it is a factor of d"
            )
        self._reduction_sums = ()
        super()._take_step()
        # One estimate for all, from a group that trains.
        leading = next((group for group in self.param_groups if group["lr"] > 0), None)
        sums = self._reduction_sums
        found: dict[str, float] = compute_next_prodigy_estimate(leading, sums) if leading is not None and sums else {}
        for group in self.param_groups:
            group.update(found)
            group["k"] += 1

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        super()._check_hyperparameters(group)
        for name, low, said in (("d0", 0.0, "above 0"), ("growth_rate", 1.0, "of 1 or more")):
            check_real_number(name, group[name])
            if not (float(group[name]) > low or float(group[name]) == low == 1):
                raise ValueError(f"{name}={group[name]!r} is not allowed: give a number {said}")
        if not float(group["betas"][0]) > 0:
            raise ValueError(f"betas={group['betas']!r} are not allowed: Prodigy needs a first beta above 0")
