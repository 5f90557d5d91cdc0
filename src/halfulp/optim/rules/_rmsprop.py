"""RMSprop (Hinton's lecture 6e; centered: Graves, arXiv 1308.0850) as update rules."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels import divide, maximum, sqrt
from ._update_rule import StateSlot, UpdateRule, option

_SQUARE = StateSlot("square_avg", 2, retention=option("alpha"))
_MOMENTUM = StateSlot("momentum_buffer", 1, retention=option("momentum"))
# A variance is the small difference of two means.
_CENTERED = (
    StateSlot("square_avg", 2, retention=option("alpha"), exact=True),
    StateSlot("grad_avg", 1, retention=option("alpha"), exact=True),
)
_CONSTANTS = ("sign", "decay", "keep", "take", "eps", "momentum", "lr", "none")


def rmsprop(w, g, v, sign, decay, keep, take, eps, momentum, lr, none):
    """v = a v + (1-a) g^2, with g the gradient + wd w; u = -lr g / (sqrt(v) + eps)."""
    g = sign * g + decay * w
    v = keep * v + take * g * g
    return -(lr * divide(g, sqrt(v) + eps)), v


def rmsprop_momentum(w, g, v, buffer, sign, decay, keep, take, eps, momentum, lr, none):
    """Compute `rmsprop`'s update with b = momentum b + g / (sqrt(v) + eps); u = -lr b."""
    g = sign * g + decay * w
    v = keep * v + take * g * g
    buffer = momentum * buffer + divide(g, sqrt(v) + eps)
    return -(lr * buffer), v, buffer


def rmsprop_centered(w, g, v, mean, sign, decay, keep, take, eps, momentum, lr, none):
    """Compute `rmsprop`'s update with m = a m + (1-a) g, sqrt(v - m^2); 0 where rounding makes that negative."""
    g = sign * g + decay * w
    v = keep * v + take * g * g
    mean = mean + take * (g - mean)
    return -(lr * divide(g, sqrt(maximum(v - mean * mean, none)) + eps)), v, mean


def rmsprop_centered_momentum(w, g, v, mean, buffer, sign, decay, keep, take, eps, momentum, lr, none):
    """Compute `rmsprop_centered`'s update with b = momentum b + g / (sqrt(v - m^2) + eps); u = -lr b."""
    g = sign * g + decay * w
    v = keep * v + take * g * g
    mean = mean + take * (g - mean)
    buffer = momentum * buffer + divide(g, sqrt(maximum(v - mean * mean, none)) + eps)
    return -(lr * buffer), v, mean, buffer


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    alpha, sign = float(group["alpha"]), -1.0 if group["maximize"] else 1.0
    decay, eps = float(group["weight_decay"]), float(group["eps"])
    return sign, decay, alpha, 1 - alpha, eps, float(group["momentum"]), float(group["lr"]), 0.0


_INNER = ("decay", "eps")
RMSPROP = UpdateRule("rmsprop", rmsprop, (_SQUARE,), _CONSTANTS, _step_constants, _INNER)
RMSPROP_CENTERED = UpdateRule("rmsprop_centered", rmsprop_centered, _CENTERED, _CONSTANTS, _step_constants, _INNER)
# The buffer is a sum of quotients, which a power of two that multiplies the gradients leaves as it is.
RMSPROP_MOMENTUM = UpdateRule("rmsprop_momentum", rmsprop_momentum, (_SQUARE, _MOMENTUM), _CONSTANTS, _step_constants)
RMSPROP_CENTERED_MOMENTUM = UpdateRule(
    "rmsprop_centered_momentum", rmsprop_centered_momentum, (*_CENTERED, _MOMENTUM), _CONSTANTS, _step_constants
)
