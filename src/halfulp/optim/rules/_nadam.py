"""NAdam (Dozat, ICLR 2016 workshop, "Incorporating Nesterov momentum into Adam") as update rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from ...kernels import divide, sqrt
from ._adam import MOMENTS
from ._update_rule import UpdateRule, decay_of

_CONSTANTS = ("sign", "decay", "keep_v", "take_m", "take_v", "unbias", "eps", "size_g", "size_m")
_NEGLIGIBLE = 2.0**-60  # beside 1


def nadam(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, size_g, size_m):
    """u = -lr ((1-mu_t)/(1-mu_1..mu_t) g + mu_(t+1)/(1-mu_1..mu_(t+1)) m) / (sqrt(v)/sqrt(1-b2^t) + eps)."""
    g = sign * g + decay * w
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return -divide(size_g * g + size_m * m, sqrt(v) * unbias + eps), m, v


def nadamw(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, size_g, size_m):
    """Compute `nadam`'s update with the decay taken from the weight."""
    g = sign * g
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return -(decay * w) - divide(size_g * g + size_m * m, sqrt(v) * unbias + eps), m, v


def momentum_at(beta: float, momentum_decay: float, step: int) -> float:
    """mu_t = b1 (1 - .96^(t momentum_decay) / 2)."""
    return beta * (1 - 0.5 * 0.96 ** (step * momentum_decay))


@functools.lru_cache(64)
def _products(beta: float, momentum_decay: float) -> list[float]:
    return [1.0]


def momentum_product(beta: float, momentum_decay: float, step: int) -> float:
    """mu_1 mu_2 ... mu_t, as under these options from the first step on; 0 once it is nothing beside 1."""
    known = _products(beta, momentum_decay)
    while len(known) <= step and known[-1] > _NEGLIGIBLE:
        known.append(known[-1] * momentum_at(beta, momentum_decay, len(known)))
    return known[step] if step < len(known) else 0.0


def _step_constants(group: Mapping, step: int, decoupled: bool = False) -> tuple[float, ...]:
    lr, (beta1, beta2), slows = float(group["lr"]), map(float, group["betas"]), float(group["momentum_decay"])
    size_g = lr * (1 - momentum_at(beta1, slows, step)) / (1 - momentum_product(beta1, slows, step))
    size_m = lr * momentum_at(beta1, slows, step + 1) / (1 - momentum_product(beta1, slows, step + 1))
    kept = beta2, 1 - beta1, 1 - beta2, 1 / math.sqrt(1 - beta2**step)
    return (-1.0 if group["maximize"] else 1.0, decay_of(group, decoupled), *kept, float(group["eps"]), size_g, size_m)


def _decoupled_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return _step_constants(group, step, decoupled=True)


_OF_TORCH: dict[str, Any] = {"betas": 2, "follows_from_step": ("mu_product",)}
NADAM = UpdateRule("nadam", nadam, MOMENTS, _CONSTANTS, _step_constants, ("decay", "eps"), **_OF_TORCH)
NADAMW = UpdateRule("nadamw", nadamw, MOMENTS, _CONSTANTS, _decoupled_constants, ("eps",), **_OF_TORCH)
