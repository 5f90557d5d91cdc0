"""AdEMAMix (Pagliardini, Ablin and Grangier, arXiv 2409.03137) as an update rule: Adam with a second, slow momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels import divide, sqrt
from ._adam import MOMENTS
from ._update_rule import StateSlot, UpdateRule, beta

_CONSTANTS = ("sign", "decay", "keep_v", "take_m", "take_v", "take_slow", "unbias", "eps", "size_m", "size_slow")


def ademamix(w, g, m, v, slow, sign, decay, keep_v, take_m, take_v, take_slow, unbias, eps, size_m, size_slow):
    """u = -lr (m/(1-b1^t) + a s) / (sqrt(v)/sqrt(1-b2^t) + eps) - lr wd w; s the mean of the gradients by b3."""
    g = sign * g
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    slow = slow + take_slow * (g - slow)
    return -(decay * w) - divide(size_m * m + size_slow * slow, sqrt(v) * unbias + eps), m, v, slow


def _slow_beta(beta1: float, beta3: float, share: float) -> float:
    """Interpolate between two betas such that half-lives grow linearly."""
    fast, slow = math.log(beta1), math.log(beta3)
    return min(beta3, math.exp(fast * slow / ((1 - share) * slow + share * fast)))


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
    alpha, warmup, beta_warmup = float(group["alpha"]), group["alpha_warmup"], group["beta3_warmup"]
    if warmup:
        alpha *= min(1.0, step / warmup)
    if beta_warmup and step < beta_warmup and beta1 > 0 and beta3 > 0:
        beta3 = _slow_beta(beta1, beta3, step / beta_warmup)
    signs = -1.0 if group["maximize"] else 1.0, lr * float(group["weight_decay"])
    kept = beta2, 1 - beta1, 1 - beta2, 1 - beta3, 1 / math.sqrt(1 - beta2**step), float(group["eps"])
    return (*signs, *kept, lr / (1 - beta1**step), lr * alpha)


ADEMAMIX = UpdateRule(
    "ademamix",
    ademamix,
    (*MOMENTS, StateSlot("exp_avg_slow", 1, retention=beta(2))),
    _CONSTANTS,
    _step_constants,
    homogeneous=("eps",),
    betas=3,
)
