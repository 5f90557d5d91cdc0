"""Adan (Xie et al., arXiv 2208.06677) as an update rule: three betas, and the gradient before as a state."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels import divide, sqrt
from ._update_rule import StateSlot, UpdateRule, beta

_CONSTANTS = ("sign", "decay", "follow", "take_m", "keep_d", "take_d", "keep_n", "take_n", "size_m", "size_d", "unbias")


def adan(
    w, g, m, d, n, before, sign, decay, follow, take_m, keep_d, take_d, keep_n, take_n, size_m, size_d, unbias, eps
):
    """w = (w - lr (m + b2 d) / (sqrt(n) + eps)) / (1 + lr wd); m, d, n the means of g, g - g', (g + b2 (g - g'))^2.

    g' is the gradient before, and the means are unbiased, as in the authors' code, where betas are what is kept.
    """
    g = sign * g
    change = follow * (g - before)
    ahead = g + keep_d * change
    m = m + take_m * (g - m)
    d = d + take_d * (change - d)
    n = keep_n * n + take_n * ahead * ahead
    return -(decay * w) - divide(size_m * m + size_d * d, sqrt(n) * unbias + eps), m, d, n, g


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    """Return the constants of a step, made in float64; the first step has no change of gradients."""
    lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
    decay, shrink = lr * float(group["weight_decay"]), 1.0
    if not group["no_prox"]:
        shrink = 1 / (1 + decay)
        decay = 1 - shrink
    sizes = lr * shrink / (1 - beta1**step), lr * shrink * beta2 / (1 - beta2**step)
    kept = 1 - beta1, beta2, 1 - beta2, beta3, 1 - beta3
    signs = -1.0 if group["maximize"] else 1.0, decay, 0.0 if step == 1 else 1.0
    return (*signs, *kept, *sizes, 1 / math.sqrt(1 - beta3**step), float(group["eps"]))


ADAN = UpdateRule(
    "adan",
    adan,
    (
        StateSlot("exp_avg", 1, retention=beta(0)),
        StateSlot("exp_avg_diff", 1, retention=beta(1)),
        StateSlot("exp_avg_sq", 2, retention=beta(2)),
        StateSlot("gradient_before", 1, retention=0.0),
    ),
    (*_CONSTANTS, "eps"),
    _step_constants,
    homogeneous=("eps",),
    betas=3,
)
