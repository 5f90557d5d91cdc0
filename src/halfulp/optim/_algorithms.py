"""Optimizers with the signatures of torch.optim's; `params`, `**options` and what is refused are Optimizer's."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable
from typing import Any, Unpack

import torch

from ._group_options import (
    NON_NEGATIVE_OPTIONS,
    OptimizerOptions,
    OptimizerParams,
    check_real_number,
    make_init_arguments,
    parse_options,
)
from ._optimizer import Optimizer, register_optimizer
from ._storage import Store
from .parameters._step_spec import StepSpec
from .rules._adam import ADAM, ADAM_AMSGRAD, ADAMW, ADAMW_AMSGRAD, NADAM, NADAMW, RADAM, RADAMW
from .rules._momentum import MUON, SGD_MOMENTUM, SGD_NESTEROV
from .rules._momentum import SGD as PLAIN
from .rules._second_moments import (
    ADAFACTOR,
    ADAGRAD,
    RMSPROP,
    RMSPROP_CENTERED,
    RMSPROP_CENTERED_MOMENTUM,
    RMSPROP_MOMENTUM,
)
from .rules._update_rule import UpdateRule

# tok_embeddings.weight, transformer.wpe.weight, lm_head.weight, heads.0.weight; no multihead_attn.out_proj, no member.
_EMBEDDING_OR_HEAD_NAME_PATTERN = re.compile(
    r"(^|[._])(emb\w*|[^._]*emb(s|ed|eds|edding|eddings)?|wte|wpe)([._]|$)|(^|\.)(head|(?!multi_?head)\w*heads?(\.|$))"
)


# Which parameters are Muon's: by a glob over names, or by name and parameter; None to tell them by shape and name.
MuonSelector = str | Callable[[str, torch.Tensor], bool] | None


@register_optimizer
class SGD(Optimizer):
    """Stochastic gradient descent: g + wd w -> momentum b + (1 - dampening) g -> w - lr b, as torch.optim.SGD.

    Args:
        lr, momentum, dampening, weight_decay, nesterov, maximize: as torch.optim.SGD; all else: see Optimizer.

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
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        super()._check_hyperparameters(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("SGD(nesterov=True) needs a momentum above 0 and no dampening")

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return plain SGD, momentum or Nesterov's momentum."""
        if group["nesterov"]:
            return SGD_NESTEROV
        return SGD_MOMENTUM if group["momentum"] else PLAIN


@register_optimizer
class Adam(Optimizer):
    """Adam with the decay added to the gradient, as torch.optim.Adam.

    Args:
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as torch.optim.Adam.
    """

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Adam, with AMSGrad or without, decay coupled or decoupled."""
        coupled, decoupled = (ADAM_AMSGRAD, ADAMW_AMSGRAD) if group["amsgrad"] else (ADAM, ADAMW)
        return decoupled if group["decoupled_weight_decay"] else coupled


@register_optimizer
class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW; the decay is part of what the weight update rounds.

    Args:
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW; all else: see Optimizer.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(64, 64)
    >>> opt = hu.optim.AdamW(model.named_parameters(), lr=1e-3, param_dtype=torch.bfloat16, weight_update="split")
    >>> model.weight.dtype, sorted(opt.float32_state_dict(model))
    (torch.bfloat16, ['bias', 'weight'])
    """

    _options_fixed_by_class = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        Optimizer.__init__(self, **make_init_arguments(locals(), decoupled_weight_decay=True))

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return AdamW, with AMSGrad or without, whatever a loaded group says of the decay."""
        return ADAMW_AMSGRAD if group["amsgrad"] else ADAMW


@register_optimizer
class Adagrad(Optimizer):
    """Adagrad: s + g^2 -> s, w - lr/(1 + (t-1) lr_decay) g / (sqrt(s) + eps), as torch.optim.Adagrad.

    Args:
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as torch.optim.Adagrad.

    >>> import torch, halfulp as hu
    >>> opt = hu.optim.Adagrad(torch.nn.Linear(4, 2).bfloat16().parameters(), lr=0.1)
    """

    _non_negative_options = (*NON_NEGATIVE_OPTIONS, "lr_decay")
    _rule = ADAGRAD

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))


@register_optimizer
class RMSprop(Optimizer):
    """RMSprop: v the mean of g^2, w - lr g / (sqrt(v) + eps), centered or with momentum, as torch.optim.RMSprop.

    Args:
        lr, alpha, eps, weight_decay, momentum, centered, maximize: as torch.optim.RMSprop. A centered one keeps both
            means in float32 unless told otherwise, and takes a variance that rounding makes negative as 0.

    >>> import torch, halfulp as hu
    >>> opt = hu.optim.RMSprop(torch.nn.Linear(4, 2).bfloat16().parameters(), momentum=0.9)
    """

    _non_negative_options = (*NON_NEGATIVE_OPTIONS, "alpha")

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return RMSprop, centered or not, with momentum or without."""
        if group["centered"]:
            return RMSPROP_CENTERED_MOMENTUM if group["momentum"] else RMSPROP_CENTERED
        return RMSPROP_MOMENTUM if group["momentum"] else RMSPROP


@register_optimizer
class NAdam(Optimizer):
    """NAdam: Adam with Nesterov's momentum (Dozat, 2016), as torch.optim.NAdam.

    The product of momenta is that of these betas from the first step on, also where a scheduler has changed them.

    Args:
        lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize: as torch.optim.NAdam.

    >>> import torch, halfulp as hu
    >>> opt = hu.optim.NAdam(torch.nn.Linear(4, 2).bfloat16().parameters(), weight_update="kahan")
    """

    _non_negative_options = (*NON_NEGATIVE_OPTIONS, "momentum_decay")

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return NAdam, decay coupled or decoupled."""
        return NADAMW if group["decoupled_weight_decay"] else NADAM


@register_optimizer
class RAdam(Optimizer):
    """RAdam: Adam whose step grows with what is known of the second moment (arXiv 1908.03265), as torch.optim.RAdam.

    Args:
        lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: as torch.optim.RAdam; all else: see Optimizer.

    >>> import torch, halfulp as hu
    >>> opt = hu.optim.RAdam(torch.nn.Linear(4, 2).bfloat16().parameters(), lr=0.01, weight_update="kahan")
    """

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return RAdam, decay coupled or decoupled."""
        return RADAMW if group["decoupled_weight_decay"] else RADAM


@register_optimizer
class Adafactor(Optimizer):
    """Adafactor: the second moment of a matrix in its rows' and columns' means (arXiv 1804.04235), as torch.optim's.

    u = g / sqrt(r c / mean(r)) -> w - lr wd w - max(eps2, rms(w)) min(lr, 1/sqrt(t)) u / max(1, rms(u)/d), with r and c
    the means of g^2 over columns and rows; of a vector its own mean of g^2. They are float32 tensors whatever
    `state_dtype` says. The products and sums are torch's, over whole float32 tensors: 8 bytes per parameter of the
    largest tensor while a step runs, and 4 per parameter. `eps[0]`, if None, is float32's also of narrow parameters.

    Args:
        lr, beta2_decay, eps, d, weight_decay, maximize: as torch.optim.Adafactor; all else: see Optimizer.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    >>> opt = hu.optim.Adafactor([w], lr=0.1)
    >>> w.grad = torch.ones_like(w)
    >>> opt.step()
    >>> sorted(opt.state[w]), round(w[0, 0].item(), 2)
    (['col_var', 'low_bits', 'row_var', 'step'], 0.9)
    """

    _non_negative_options = ("lr", "weight_decay")
    _rule = ADAFACTOR

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        super()._check_hyperparameters(group)
        eps = group["eps"]
        if not isinstance(eps, tuple | list) or len(eps) != 2 or not all(e is None or 0 <= e < math.inf for e in eps):
            raise ValueError(f"eps={eps!r} is not allowed: give two numbers that are not negative, or None and one")
        if eps[1] is None:
            raise ValueError(f"eps={eps!r} is not allowed: the second one has no other value, give a number")
        for name, low, high, said in (("beta2_decay", -math.inf, 0, "0 or less"), ("d", 1, math.inf, "1 or more")):
            check_real_number(name, group[name])
            if not low <= float(group[name]) <= high:
                raise ValueError(f"{name}={group[name]!r} is not allowed: give a number that is {said}")


@register_optimizer
class Muon(Optimizer):
    """Muon: matrices step by their momentum made orthogonal (kellerjordan.github.io/posts/muon), as torch.optim.Muon.

    b = mu b + (1-mu) g -> w - lr wd w - lr r o, with o near U V^T of mu b + (1-mu) g = U S V^T (of b without
    `nesterov`), by Newton-Schulz steps in bfloat16, or in float32 on processors without products of bfloat16. Those
    products are torch's: their bits are of the processor. While a step runs it holds 4 bytes more per parameter.

    Only matrices step so. Give what is none, and embeddings, a param group with `use_muon=False`, which AdamW steps, or
    another optimizer; `Muon.split_groups` makes such groups.

    Args:
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as torch.optim.Muon.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of groups with `use_muon=False`, which may say `lr`,
            `betas`, `eps`, `weight_decay`, `amsgrad` and `maximize` themselves. None for `lr` and `weight_decay`. One
            rate for both is meant for `adjust_lr_fn="match_rms_adamw"`; the published code has 0.02 for matrices beside
            3e-4 for AdamW.

    Raises:
        ValueError: a parameter that is no matrix, a hyper-parameter out of range.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(8, 4).bfloat16()
    >>> groups = hu.optim.Muon.split_groups(model.named_parameters())
    >>> opt = hu.optim.Muon(groups, lr=0.02, adamw_lr=1e-3)
    >>> [(group["use_muon"], group["lr"]) for group in opt.param_groups]
    [(True, 0.02), (False, 0.001)]
    >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    >>> opt.step()
    >>> sorted(opt.state[model.weight]), sorted(opt.state[model.bias])
    (['low_bits', 'momentum_buffer', 'step'], ['exp_avg', 'exp_avg_sq', 'low_bits', 'step'])
    """

    _adamw_options = ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay")

    def __init__(
        self,
        params: OptimizerParams,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(**make_init_arguments(locals()))

    @classmethod
    def split_groups(cls, params: OptimizerParams, use_muon: MuonSelector = None) -> list[dict[str, Any]]:
        """Return groups of matrices, and apart, with `use_muon=False`, of other shapes, embeddings and heads.

        Embeddings and heads are told by their names. A group that says `use_muon` stays as it is.

        Args:
            params: parameters, pairs of name and parameter, or groups of either.
            use_muon: which parameters are Muon's instead: a glob over names, or a function of name and parameter.

        Raises:
            ValueError: a glob that matches no name.
            TypeError: neither a glob nor a function.

        >>> import torch, halfulp as hu
        >>> groups = hu.optim.Muon.split_groups(torch.nn.Linear(3, 2).named_parameters())
        >>> [([name for name, _ in group["params"]], group["use_muon"]) for group in groups]
        [(['weight'], True), (['bias'], False)]
        """
        if use_muon is not None and not isinstance(use_muon, str) and not callable(use_muon):
            raise TypeError(f"use_muon={use_muon!r}: give one glob over names, or a function of name and parameter")

        def is_for_muon(name: str, parameter: torch.Tensor) -> bool:
            if isinstance(use_muon, str):
                return fnmatch.fnmatchcase(name, use_muon)
            if use_muon is not None:
                return use_muon(name, parameter)
            return parameter.dim() == 2 and not _EMBEDDING_OR_HEAD_NAME_PATTERN.search(name)

        given: list[Any] = [*params]
        found: list[dict[str, Any]] = []
        for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
            members = [group["params"]] if isinstance(group["params"], torch.Tensor) else [*group["params"]]
            parts: dict[bool, list[Any]] = {True: [], False: []}
            for entry in members:
                name, parameter = entry if isinstance(entry, tuple) else ("", entry)
                parts[bool(is_for_muon(name, parameter))].append(entry)
            if "use_muon" in group:
                found.append({**group, "params": members})
            else:
                found += [{**group, "params": some, "use_muon": is_muons} for is_muons, some in parts.items() if some]
        if isinstance(use_muon, str) and not any(group.get("use_muon") for group in found):
            raise ValueError(f"use_muon={use_muon!r} matches no name; give a glob over the names of matrices")
        return found

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return Muon, or of a group with `use_muon=False` AdamW."""
        if group.get("use_muon", True):
            return MUON
        return ADAMW_AMSGRAD if group["amsgrad"] else ADAMW

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices, or with `use_muon=False` one that AdamW steps."""
        if given := [name for name in (*self._adamw_options, "use_fallback") if name in param_group]:
            raise ValueError(
                f"a param group has {given}: give use_muon=False there, and lr, betas and so on as AdamW's"
            )
        own = {name.removeprefix("adamw_"): self.defaults[name] for name in self._adamw_options}
        own = {name: value for name, value in own.items() if value is not None} | {"amsgrad": False, "maximize": False}
        known = {"use_muon": True, **own}
        param_group.update(
            parse_options({name: param_group[name] for name in known.keys() & param_group.keys()}, known)
        )
        if not param_group.get("use_muon", True):
            for name, value in own.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        for name in self._adamw_options:
            del self.param_groups[-1][name]

    def _choose_step_spec(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: Store | None, name: str
    ) -> StepSpec:
        if group.get("use_muon", True) and parameter.dim() != 2:
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} is no matrix, which Muon makes orthogonal: give "
                "such parameters, and embeddings, a param group with use_muon=False, which AdamW steps"
            )
        return super()._choose_step_spec(group, parameter, gradient, name)

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        super()._check_hyperparameters(group)
        if not group.get("use_muon", True):
            return
        steps, coefficients, adjusts = group["ns_steps"], group["ns_coefficients"], group["adjust_lr_fn"]
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
            raise ValueError(f"ns_steps={steps!r} is not allowed: give a whole number below 100")
        if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
            raise ValueError(f"ns_coefficients={coefficients!r} are not allowed: give three numbers")
        if adjusts not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjusts!r}: allowed are 'original', 'match_rms_adamw' and None")
