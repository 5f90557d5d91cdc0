"""Lion (Chen et al., arXiv 2302.06675) as an update rule."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels import sign_of
from ._update_rule import StateSlot, UpdateRule, beta


def lion(w, g, m, sign, decay, keep, take, keep_m, take_m, lr):
    """u = -lr sign(b1 m + (1-b1) g) - lr wd w; then m = b2 m + (1-b2) g."""
    g = sign * g
    direction = sign_of(keep * m + take * g)
    return -(decay * w) - lr * direction, keep_m * m + take_m * g


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    lr, (beta1, beta2) = float(group["lr"]), (float(b) for b in group["betas"])
    sign = -1.0 if group["maximize"] else 1.0
    return sign, lr * float(group["weight_decay"]), beta1, 1 - beta1, beta2, 1 - beta2, lr


LION = UpdateRule(
    "lion",
    lion,
    (StateSlot("exp_avg", 1, retention=beta(1)),),
    ("sign", "decay", "keep", "take", "keep_m", "take_m", "lr"),
    _step_constants,
    betas=2,
)
