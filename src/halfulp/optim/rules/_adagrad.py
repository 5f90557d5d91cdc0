"""Adagrad (Duchi, Hazan and Singer, JMLR 12 (2011) 2121) as an update rule."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels import divide, sqrt
from ._update_rule import StateSlot, UpdateRule


def _first_sum(group: Mapping) -> float:
    return float(group["initial_accumulator_value"])


def adagrad(w, g, total, sign, decay, eps, lr):
    """s = s + g^2, with g the gradient + wd w; u = -lr g / (sqrt(s) + eps)."""
    g = sign * g + decay * w
    total = total + g * g
    return -(lr * divide(g, sqrt(total) + eps)), total


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    rate = float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))
    return -1.0 if group["maximize"] else 1.0, float(group["weight_decay"]), float(group["eps"]), rate


ADAGRAD = UpdateRule(
    "adagrad",
    adagrad,
    (StateSlot("sum", 2, initial=_first_sum),),
    ("sign", "decay", "eps", "lr"),
    _step_constants,
    homogeneous=("decay", "eps"),
)
