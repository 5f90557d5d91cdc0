"""Adam and AdamW (arXiv 1412.6980, 1711.05101), NAdam (Dozat 2016) and RAdam (arXiv 1908.03265) as update rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...kernels import divide, maximum, sqrt
from ._update_rule import GRADIENT_SIGN_BY_MAXIMIZE, StateSlot, UpdateRule

MOMENT_STATES = (StateSlot("exp_avg", 1), StateSlot("exp_avg_sq", 2))
_AMSGRAD_STATES = (*MOMENT_STATES, StateSlot("max_exp_avg_sq", 2, maximum_of="exp_avg_sq"))


def update_moments(g, m, v, keep_v, take_m, take_v):
    """Return m = b1 m + (1-b1) g and v = b2 v + (1-b2) g^2."""
    # (1-b2) g first: g g alone overflows at gradients of 2e19, whose v float32 still holds.
    return m + take_m * (g - m), keep_v * v + take_v * g * g


def adamw(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """u = -lr wd w - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)."""
    m, v = update_moments(sign * g, m, v, keep_v, take_m, take_v)
    return -(decay * w) - step * divide(m, sqrt(v) * unbias + eps), m, v


def adam(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Compute `adamw`'s update with the decay added to the gradient: g + wd w."""
    m, v = update_moments(sign * g + decay * w, m, v, keep_v, take_m, take_v)
    return -(step * divide(m, sqrt(v) * unbias + eps)), m, v


def adamw_amsgrad(w, g, m, v, top, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Compute `adamw`'s update divided by the largest v so far (Reddi et al., arXiv 1904.09237)."""
    m, v = update_moments(sign * g, m, v, keep_v, take_m, take_v)
    top = maximum(top, v)
    return -(decay * w) - step * divide(m, sqrt(top) * unbias + eps), m, v, top


def adam_amsgrad(w, g, m, v, top, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Compute `adam`'s update divided by the largest v so far."""
    m, v = update_moments(sign * g + decay * w, m, v, keep_v, take_m, take_v)
    top = maximum(top, v)
    return -(step * divide(m, sqrt(top) * unbias + eps)), m, v, top


def feed_back_adam_error(lost, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Return the first moment whose later updates add up to `lost` more: m - (1-b1)/b1 lost denominator / step."""
    return m - feedback_gain * (lost * (sqrt(v) * unbias + eps))


def list_leading_adam_constants(group: Mapping, decoupled: bool = True) -> tuple[float, ...]:
    """Return what Adam and its variants begin with: the sign, the decay, b2, 1 - b1 and 1 - b2."""
    beta1, beta2 = map(float, group["betas"][:2])
    decay = (float(group["lr"]) if decoupled else 1.0) * float(group["weight_decay"])
    return GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])], decay, beta2, 1 - beta1, 1 - beta2


@dataclass(frozen=True)
class DecoupledConstantsFunction:
    """The constants of a rule whose decay is taken from the weight; a value, so that rules are compared and pickled."""

    list_constants: Callable[[Mapping, int, bool], tuple[float, ...]]

    def __call__(self, group: Mapping, step: int) -> tuple[float, ...]:
        """Return the constants of a step."""
        return self.list_constants(group, step, True)


def compute_inverse_root_bias_correction(beta2: float, step: int) -> float:
    """1 / sqrt(1 - b2^t)."""
    return 1 / math.sqrt(1 - beta2**step)


def _list_adam_constants(group: Mapping, step: int, decoupled: bool = False) -> tuple[float, ...]:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    size = lr / (1 - beta1**step)
    feedback_gain = (1 - beta1) / (beta1 * size) if size > 0 and beta1 > 0 else 0.0
    unbias, eps = compute_inverse_root_bias_correction(beta2, step), float(group["eps"])
    return (*list_leading_adam_constants(group, decoupled), unbias, eps, size, feedback_gain)


_list_adamw_constants = DecoupledConstantsFunction(_list_adam_constants)
_DECAY_AND_EPS, _EPS_ALONE = ("decay", "eps"), ("eps",)  # what a power of two that multiplies gradients multiplies too
ADAM = UpdateRule("adam", adam, MOMENT_STATES, _list_adam_constants, _DECAY_AND_EPS, feed_back_adam_error, betas=2)
ADAMW = UpdateRule("adamw", adamw, MOMENT_STATES, _list_adamw_constants, _EPS_ALONE, feed_back_adam_error, betas=2)
ADAM_AMSGRAD = UpdateRule("adam_amsgrad", adam_amsgrad, _AMSGRAD_STATES, _list_adam_constants, _DECAY_AND_EPS, betas=2)
ADAMW_AMSGRAD = UpdateRule("adamw_amsgrad", adamw_amsgrad, _AMSGRAD_STATES, _list_adamw_constants, _EPS_ALONE, betas=2)


_NEGLIGIBLE_PRODUCT = 2.0**-60  # beside 1


def nadam(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, size_g, size_m):
    """u = -lr ((1-mu_t)/(1-mu_1..mu_t) g + mu_(t+1)/(1-mu_1..mu_(t+1)) m) / (sqrt(v)/sqrt(1-b2^t) + eps)."""
    g = sign * g + decay * w
    m, v = update_moments(g, m, v, keep_v, take_m, take_v)
    return -divide(size_g * g + size_m * m, sqrt(v) * unbias + eps), m, v


def nadamw(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, size_g, size_m):
    """Compute `nadam`'s update with the decay taken from the weight."""
    g = sign * g
    m, v = update_moments(g, m, v, keep_v, take_m, take_v)
    return -(decay * w) - divide(size_g * g + size_m * m, sqrt(v) * unbias + eps), m, v


def compute_nadam_momentum(beta: float, momentum_decay: float, step: int) -> float:
    """mu_t = b1 (1 - .96^(t momentum_decay) / 2)."""
    return beta * (1 - 0.5 * 0.96 ** (step * momentum_decay))


@lru_cache(64)
def _get_cached_momentum_products(beta: float, momentum_decay: float) -> list[float]:
    return [1.0]


def compute_nadam_momentum_product(beta: float, momentum_decay: float, step: int) -> float:
    """mu_1 mu_2 ... mu_t, as under these options from the first step on; 0 once it is nothing beside 1."""
    known = _get_cached_momentum_products(beta, momentum_decay)
    while len(known) <= step and known[-1] > _NEGLIGIBLE_PRODUCT:
        known.append(known[-1] * compute_nadam_momentum(beta, momentum_decay, len(known)))
    return known[step] if step < len(known) else 0.0


def _list_nadam_constants(group: Mapping, step: int, decoupled: bool = False) -> tuple[float, ...]:
    lr, (beta1, beta2), slows = float(group["lr"]), map(float, group["betas"]), float(group["momentum_decay"])
    size_g = (
        lr * (1 - compute_nadam_momentum(beta1, slows, step)) / (1 - compute_nadam_momentum_product(beta1, slows, step))
    )
    size_m = (
        lr
        * compute_nadam_momentum(beta1, slows, step + 1)
        / (1 - compute_nadam_momentum_product(beta1, slows, step + 1))
    )
    unbias, eps = compute_inverse_root_bias_correction(beta2, step), float(group["eps"])
    return (*list_leading_adam_constants(group, decoupled), unbias, eps, size_g, size_m)


_list_nadamw_constants = DecoupledConstantsFunction(_list_nadam_constants)
_NADAM_RULE_ARGUMENTS: dict[str, Any] = {"betas": 2, "follows_from_step": ("mu_product",)}
NADAM = UpdateRule("nadam", nadam, MOMENT_STATES, _list_nadam_constants, _DECAY_AND_EPS, **_NADAM_RULE_ARGUMENTS)
NADAMW = UpdateRule("nadamw", nadamw, MOMENT_STATES, _list_nadamw_constants, _EPS_ALONE, **_NADAM_RULE_ARGUMENTS)


def radam(w, g, m, v, sign, decay, keep_v, take_m, take_v, eps, plain, adaptive):
    """u = -lr m/(1-b1^t) r sqrt(1-b2^t) / (sqrt(v) + eps); -lr m/(1-b1^t) in the first steps."""
    m, v = update_moments(sign * g + decay * w, m, v, keep_v, take_m, take_v)
    return -(plain * m) - adaptive * divide(m, sqrt(v) + eps), m, v


def radamw(w, g, m, v, sign, decay, keep_v, take_m, take_v, eps, plain, adaptive):
    """Compute `radam`'s update with the decay taken from the weight."""
    m, v = update_moments(sign * g, m, v, keep_v, take_m, take_v)
    return -(decay * w) - plain * m - adaptive * divide(m, sqrt(v) + eps), m, v


def _list_radam_constants(group: Mapping, step: int, decoupled: bool = False) -> tuple[float, ...]:
    lr, (beta1, beta2), eps = float(group["lr"]), map(float, group["betas"]), float(group["eps"])
    size, left = lr / (1 - beta1**step), 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / left
    if length > 5:  # the variance of the second moment is finite
        rest = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return (*list_leading_adam_constants(group, decoupled), eps, 0.0, size * math.sqrt(left * rest))
    return (*list_leading_adam_constants(group, decoupled), 1.0, size, 0.0)  # the quotient is multiplied by 0


# Not homogeneous: the first steps grow with the gradient.
RADAM = UpdateRule("radam", radam, MOMENT_STATES, _list_radam_constants, betas=2)
RADAMW = UpdateRule("radamw", radamw, MOMENT_STATES, DecoupledConstantsFunction(_list_radam_constants), betas=2)
