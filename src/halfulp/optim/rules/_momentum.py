"""SGD with momentum, Lion, Muon and the schedule-free averages as update rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels import divide, sign_of, sqrt
from ._update_rule import GRADIENT_SIGN_BY_MAXIMIZE, StateSlot, UpdateRule

_MOMENTUM_STATES = (StateSlot("momentum_buffer", 1),)


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


def feed_back_momentum_error(lost, buffer, sign, decay, keep, take, lr, feedback_gain):
    """Return the buffer whose later updates add up to `lost` more: b - (1 - momentum)/momentum lost / lr.

    Nesterov's updates take the buffer times momentum, so their gain is larger by 1/momentum.
    """
    return buffer - feedback_gain * lost


def _list_momentum_constants(group: Mapping, step: int) -> tuple[float, ...]:
    lr, momentum = float(group["lr"]), float(group["momentum"])
    take = 1.0 if step == 1 else 1 - float(group["dampening"])
    share = momentum * momentum if group["nesterov"] else momentum
    feedback_gain = (1 - momentum) / (share * lr) if lr > 0 and share > 0 else 0.0
    return (
        GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])],
        float(group["weight_decay"]),
        momentum,
        take,
        lr,
        feedback_gain,
    )


SGD = UpdateRule("sgd", sgd, (), _list_momentum_constants)
SGD_MOMENTUM = UpdateRule(
    "sgd_momentum", sgd_momentum, _MOMENTUM_STATES, _list_momentum_constants, error_feedback=feed_back_momentum_error
)
SGD_NESTEROV = UpdateRule(
    "sgd_nesterov", sgd_nesterov, _MOMENTUM_STATES, _list_momentum_constants, error_feedback=feed_back_momentum_error
)


def lion(w, g, m, sign, decay, keep, take, keep_m, take_m, lr):
    """u = -lr sign(b1 m + (1-b1) g) - lr wd w; then m = b2 m + (1-b2) g."""
    g = sign * g
    direction = sign_of(keep * m + take * g)
    return -(decay * w) - lr * direction, keep_m * m + take_m * g


def _list_lion_constants(group: Mapping, step: int) -> tuple[float, ...]:
    lr, (beta1, beta2) = float(group["lr"]), (float(b) for b in group["betas"])
    sign, decay = GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])], lr * float(group["weight_decay"])
    return sign, decay, beta1, 1 - beta1, beta2, 1 - beta2, lr


LION = UpdateRule("lion", lion, (StateSlot("exp_avg", 1),), _list_lion_constants, betas=2)


def muon(w, g, prepared, buffer, decay, take, size):
    """b = mu b + (1-mu) g; u = -lr wd w - size o, with o the orthogonal matrix near to mu b + (1-mu) g, or to b."""
    return -(decay * w) - size * prepared, buffer + take * (g - buffer)


def orthogonalize_momentum(tensors: Any, group: Mapping, step: int) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Return the orthogonal matrix, and the learning rate for its shape."""
    momentum, g = float(group["momentum"]), tensors.gradient
    buffer = tensors.state("momentum_buffer").lerp(g, 1 - momentum)
    wanted = g.lerp(buffer, momentum) if group["nesterov"] else buffer
    a, b, c = map(float, group["ns_coefficients"])
    rows, columns = tensors.shape
    ratio = {None: 1.0, "original": 1.0}.get(group["adjust_lr_fn"])
    ratio = 0.2 * math.sqrt(max(rows, columns)) if ratio is None else math.sqrt(max(1.0, rows / max(columns, 1)))
    made = orthogonalize_by_newton_schulz(wanted, (a, b, c), int(group["ns_steps"]), float(group["eps"]))
    return made.float(), (float(group["lr"]) * ratio,)


def orthogonalize_by_newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T, by steps of X = a X + (b X X^T + c (X X^T)^2) X.

    In bfloat16, as torch.optim.Muon; in float32 on a processor that has no products of bfloat16.
    """
    a, b, c = coefficients
    x = matrix.to(_choose_product_dtype(matrix.device))
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _choose_product_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def _list_muon_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return float(group["lr"]) * float(group["weight_decay"]), 1 - float(group["momentum"])


MUON = UpdateRule("muon", muon, _MOMENTUM_STATES, _list_muon_constants, prepare=orthogonalize_momentum)


# The point that steps; the parameter lies between it and the average, z + beta (x - z).
_SCHEDULE_FREE_SGD_STATES = (StateSlot("z", 1, exact=True),)


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


def compute_next_schedule_free_counters(group: Mapping) -> tuple[float, float, float]:
    """Return lr under warmup, the largest so far, and the sum of the averages' weights, after one more step."""
    made, warmup = group["k"] + 1, group["warmup_steps"]
    lr = float(group["lr"]) * (min(1.0, made / warmup) if warmup else 1.0)
    largest = max(lr, group["lr_max"])
    return lr, largest, group["weight_sum"] + made ** float(group["r"]) * largest ** float(group["weight_lr_power"])


def _list_schedule_free_constants(group: Mapping, step: int, momentum: float) -> tuple[float, ...]:
    lr, _, total = compute_next_schedule_free_counters(group)
    mix = (total - group["weight_sum"]) / total if total else 0.0
    signs = GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])], float(group["weight_decay"]), 1.0 if step == 1 else 0.0
    return (*signs, mix, lr * (1 - momentum * (1 - mix)), lr)


def _list_schedule_free_sgd_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return _list_schedule_free_constants(group, step, float(group["momentum"]))


def _list_schedule_free_adamw_constants(group: Mapping, step: int) -> tuple[float, ...]:
    beta1, beta2 = map(float, group["betas"])
    own = beta2, 1 - beta2, 1 / math.sqrt(1 - beta2**step), float(group["eps"])
    return (*_list_schedule_free_constants(group, step, beta1), *own)


_SCHEDULE_FREE_ADAMW_STATES = (*_SCHEDULE_FREE_SGD_STATES, StateSlot("exp_avg_sq", 2))
SCHEDULE_FREE_SGD = UpdateRule(
    "schedule_free_sgd", schedule_free_sgd, _SCHEDULE_FREE_SGD_STATES, _list_schedule_free_sgd_constants
)
SCHEDULE_FREE_ADAMW = UpdateRule(
    "schedule_free_adamw",
    schedule_free_adamw,
    _SCHEDULE_FREE_ADAMW_STATES,
    _list_schedule_free_adamw_constants,
    betas=2,
)
