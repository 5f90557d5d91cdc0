"""LAMB (You et al., arXiv 1904.00962) as an update rule: AdamW whose step has the size of the weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels import divide, sqrt
from ._adam import MOMENTS
from ._update_rule import Reduction, UpdateRule

_CONSTANTS = ("sign", "decay", "keep_v", "take_m", "take_v", "unbias_m", "unbias_v", "eps", "lr")


def lamb_weight(w):
    """Return the weight, whose norm a tensor's step is to have."""
    return w


def lamb_direction(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias_m, unbias_v, eps):
    """r = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd w, of the new m and v."""
    g = sign * g
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return divide(unbias_m * m, sqrt(v) * unbias_v + eps) + decay * w


def lamb(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias_m, unbias_v, eps, lr):
    """u = -lr |w|/|r| r with r of `lamb_direction`."""
    g = sign * g
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return -(lr * (divide(unbias_m * m, sqrt(v) * unbias_v + eps) + decay * w)), m, v


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    (beta1, beta2), decay = map(float, group["betas"]), float(group["weight_decay"])
    unbias = (1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)) if group["bias_correction"] else (1.0, 1.0)
    sign = -1.0 if group["maximize"] else 1.0
    return (sign, decay, beta2, 1 - beta1, 1 - beta2, *unbias, float(group["eps"]))


def _late_values(group: Mapping, step: int, sums: tuple[float, ...]) -> tuple[float, ...]:
    """Give lr times the trust ratio: 1 where either norm is 0, and where nothing decays unless `always_adapt`."""
    weight, direction = (math.sqrt(total) for total in sums)
    adapts = (group["weight_decay"] or group["always_adapt"]) and weight > 0 and direction > 0
    ratio = weight / direction if adapts else 1.0
    return (float(group["lr"]) * (min(ratio, 1.0) if group["trust_clip"] else ratio),)


LAMB = UpdateRule(
    "lamb",
    lamb,
    MOMENTS,
    _CONSTANTS,
    _step_constants,
    ("eps",),
    betas=2,
    reductions=(Reduction(lamb_weight, squares=True), Reduction(lamb_direction, squares=True)),
    late_values=_late_values,
)
