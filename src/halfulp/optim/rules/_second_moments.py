"""Adagrad, RMSprop and Adafactor as update rules: gradients divided by the root of a second moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels import divide, maximum, sqrt
from ._update_rule import GRADIENT_SIGN_BY_MAXIMIZE, StateSlot, UpdateRule


def _read_initial_accumulator(group: Mapping) -> float:
    return float(group["initial_accumulator_value"])


def adagrad(w, g, total, sign, decay, eps, lr):
    """s = s + g^2, with g the gradient + wd w; u = -lr g / (sqrt(s) + eps)."""
    g = sign * g + decay * w
    total = total + g * g
    return -(lr * divide(g, sqrt(total) + eps)), total


def _list_adagrad_constants(group: Mapping, step: int) -> tuple[float, ...]:
    rate = float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))
    return GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])], float(group["weight_decay"]), float(group["eps"]), rate


ADAGRAD = UpdateRule(
    "adagrad",
    adagrad,
    (StateSlot("sum", 2, initial=_read_initial_accumulator),),
    _list_adagrad_constants,
    homogeneous=("decay", "eps"),
)


_SQUARE_STATE = StateSlot("square_avg", 2)
_MOMENTUM_STATE = StateSlot("momentum_buffer", 1)
# A variance is the small difference of two means.
_CENTERED_STATES = (StateSlot("square_avg", 2, exact=True), StateSlot("grad_avg", 1, exact=True))


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


def _list_rmsprop_constants(group: Mapping, step: int) -> tuple[float, ...]:
    alpha, sign = float(group["alpha"]), GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])]
    decay, eps = float(group["weight_decay"]), float(group["eps"])
    return sign, decay, alpha, 1 - alpha, eps, float(group["momentum"]), float(group["lr"]), 0.0


_DECAY_AND_EPS = ("decay", "eps")
RMSPROP = UpdateRule("rmsprop", rmsprop, (_SQUARE_STATE,), _list_rmsprop_constants, _DECAY_AND_EPS)
RMSPROP_CENTERED = UpdateRule(
    "rmsprop_centered", rmsprop_centered, _CENTERED_STATES, _list_rmsprop_constants, _DECAY_AND_EPS
)
# The buffer is a sum of quotients, which a power of two that multiplies the gradients leaves as it is.
RMSPROP_MOMENTUM = UpdateRule(
    "rmsprop_momentum", rmsprop_momentum, (_SQUARE_STATE, _MOMENTUM_STATE), _list_rmsprop_constants
)
RMSPROP_CENTERED_MOMENTUM = UpdateRule(
    "rmsprop_centered_momentum",
    rmsprop_centered_momentum,
    (*_CENTERED_STATES, _MOMENTUM_STATE),
    _list_rmsprop_constants,
)


_ELEMENTS_PER_PARTIAL_SUM = 1 << 15  # elements that torch adds up in one thread


def adafactor(w, g, prepared, decay, size):
    """u = -lr wd w - size d, with d the gradient over the root of the factored second moment."""
    return (-(decay * w) - size * prepared,)


def list_adafactor_state_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Adafactor's states: means of squares over columns and over rows, or a vector's squares."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def normalize_adafactor_gradient(tensors: Any, group: Mapping, step: int) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Move the second moment on, and return g / sqrt(it) and the step size, clipped by both roots of mean squares."""
    if not math.prod(tensors.shape):  # no rows or columns to average over
        return tensors.gradient, (0.0,)
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(torch.float32).eps if eps1 is None else float(eps1)
    g, take = tensors.gradient, step ** float(group["beta2_decay"])
    rate = min(float(group["lr"]), 1 / math.sqrt(step)) * max(float(eps2), compute_root_mean_square(tensors.weight))
    held = tensors.factors
    if len(tensors.shape) < 2:
        variance = held["variance"].lerp_(g * g, take).clone()
    else:
        row = held["row_var"].lerp_(_compute_mean_square(g, -1), take)
        column = held["col_var"].lerp_(_compute_mean_square(g, -2), take)
        variance = row * column / row.mean(-2, keepdim=True).clamp(min=eps1)
    direction = variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(g)
    clip = max(1.0, compute_root_mean_square(direction) / float(group["d"]))
    return direction, ((-rate if group["maximize"] else rate) / clip,)


def _compute_mean_square(g: torch.Tensor, dimension: int) -> torch.Tensor:
    if g.numel() == g.shape[dimension]:  # one sum, whose order is of the number of threads
        return torch.full_like(g.narrow(dimension, 0, 1), compute_root_mean_square(g) ** 2)
    return (g * g).mean(dimension, keepdim=True)


def compute_root_mean_square(x: torch.Tensor) -> float:
    """Return the root of the mean square, 0 of nothing; the same bits on any number of threads."""
    if not x.numel():
        return 0.0
    parts = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in x.reshape(-1).split(_ELEMENTS_PER_PARTIAL_SUM)
    ]
    return math.sqrt(torch.stack(parts).square().sum().item() / x.numel())


def _list_adafactor_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return (float(group["lr"]) * float(group["weight_decay"]),)


ADAFACTOR = UpdateRule(
    "adafactor",
    adafactor,
    (),
    _list_adafactor_constants,
    prepare=normalize_adafactor_gradient,
    factors=list_adafactor_state_shapes,
)
