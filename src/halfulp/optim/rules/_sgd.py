"""Stochastic gradient descent, plain, with momentum, and with Nesterov's, as update rules (torch.optim's equations)."""

from __future__ import annotations

from collections.abc import Mapping

from ._update_rule import StateSlot, UpdateRule, option

_BUFFER = (StateSlot("momentum_buffer", 1, retention=option("momentum")),)
_CONSTANTS = ("sign", "decay", "keep", "take", "lr", "feedback_gain")


def sgd(w, g, sign, decay, keep, take, lr, feedback_gain):
    """u = -lr (g + wd w)."""
    return (-(lr * (sign * g + decay * w)),)


def sgd_momentum(w, g, buffer, sign, decay, keep, take, lr, feedback_gain):
    """b = momentum b + (1 - dampening) (g + wd w); u = -lr b."""
    buffer = keep * buffer + take * (sign * g + decay * w)
    return -(lr * buffer), buffer


def sgd_nesterov(w, g, buffer, sign, decay, keep, take, lr, feedback_gain):
    """Compute `sgd_momentum`'s update with u = -lr (g + wd w + momentum b)."""
    g = sign * g + decay * w
    buffer = keep * buffer + take * g
    return -(lr * (g + keep * buffer)), buffer


def momentum_error_feedback(lost, buffer, sign, decay, keep, take, lr, feedback_gain):
    """Return the buffer whose later updates add up to `lost` more: b - (1 - momentum)/momentum lost / lr.

    Nesterov's updates take the buffer times momentum, so their gain is larger by 1/momentum.
    """
    return buffer - feedback_gain * lost


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    lr, momentum = float(group["lr"]), float(group["momentum"])
    take = 1.0 if step == 1 else 1 - float(group["dampening"])
    share = momentum * momentum if group["nesterov"] else momentum
    feedback_gain = (1 - momentum) / (share * lr) if lr > 0 and share > 0 else 0.0
    return -1.0 if group["maximize"] else 1.0, float(group["weight_decay"]), momentum, take, lr, feedback_gain


SGD = UpdateRule("sgd", sgd, (), _CONSTANTS, _step_constants)
SGD_MOMENTUM = UpdateRule(
    "sgd_momentum", sgd_momentum, _BUFFER, _CONSTANTS, _step_constants, error_feedback=momentum_error_feedback
)
SGD_NESTEROV = UpdateRule(
    "sgd_nesterov", sgd_nesterov, _BUFFER, _CONSTANTS, _step_constants, error_feedback=momentum_error_feedback
)
