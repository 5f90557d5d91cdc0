"""Schedule-free SGD and AdamW (Defazio et al., arXiv 2405.15682) as update rules: an average in a schedule's place."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels import divide, sqrt
from ._update_rule import StateSlot, UpdateRule, beta

# The point that steps; the parameter lies between it and the average, z + beta (x - z).
_Z = StateSlot("z", 1, exact=True)
_CONSTANTS = ("sign", "decay", "first", "mix", "size_y", "size_z")


def schedule_free_sgd(w, g, z, sign, decay, first, mix, size_y, size_z):
    """z = z - lr d, with d the gradient + wd w; u = c (z' - w) - lr (1 - b (1-c)) d, z' being z before."""
    z = z + first * (w - z)
    d = sign * g + decay * w
    return mix * (z - w) - size_y * d, z - size_z * d


def schedule_free_adamw(w, g, z, v, sign, decay, first, mix, size_y, size_z, keep_v, take_v, unbias, eps):
    """Compute `schedule_free_sgd`'s update with d = g / (sqrt(v)/sqrt(1-b2^t) + eps) + wd w."""
    z = z + first * (w - z)
    g = sign * g
    v = keep_v * v + take_v * g * g
    d = divide(g, sqrt(v) * unbias + eps) + decay * w
    return mix * (z - w) - size_y * d, z - size_z * d, v


def following(group: Mapping) -> tuple[float, float, float]:
    """Return lr under warmup, the largest so far, and the sum of the averages' weights, after one more step."""
    made, warmup = group["k"] + 1, group["warmup_steps"]
    lr = float(group["lr"]) * (min(1.0, made / warmup) if warmup else 1.0)
    largest = max(lr, group["lr_max"])
    return lr, largest, group["weight_sum"] + made ** float(group["r"]) * largest ** float(group["weight_lr_power"])


def _step_constants(group: Mapping, step: int, momentum: float) -> tuple[float, ...]:
    lr, _, total = following(group)
    mix = (total - group["weight_sum"]) / total if total else 0.0
    signs = -1.0 if group["maximize"] else 1.0, float(group["weight_decay"]), 1.0 if step == 1 else 0.0
    return (*signs, mix, lr * (1 - momentum * (1 - mix)), lr)


def _sgd_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return _step_constants(group, step, float(group["momentum"]))


def _adamw_constants(group: Mapping, step: int) -> tuple[float, ...]:
    beta1, beta2 = map(float, group["betas"])
    own = beta2, 1 - beta2, 1 / math.sqrt(1 - beta2**step), float(group["eps"])
    return (*_step_constants(group, step, beta1), *own)


SCHEDULE_FREE_SGD = UpdateRule("schedule_free_sgd", schedule_free_sgd, (_Z,), _CONSTANTS, _sgd_constants)
SCHEDULE_FREE_ADAMW = UpdateRule(
    "schedule_free_adamw",
    schedule_free_adamw,
    (_Z, StateSlot("exp_avg_sq", 2, retention=beta(1))),
    (*_CONSTANTS, "keep_v", "take_v", "unbias", "eps"),
    _adamw_constants,
    betas=2,
)
