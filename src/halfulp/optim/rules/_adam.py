"""Adam (Kingma and Ba, arXiv 1412.6980) and AdamW (Loshchilov and Hutter, arXiv 1711.05101) as update rules."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels import divide, maximum, sqrt
from ._update_rule import StateSlot, UpdateRule, beta, decay_of

MOMENTS = (StateSlot("exp_avg", 1, retention=beta(0)), StateSlot("exp_avg_sq", 2, retention=beta(1)))
_MAXIMUM = (*MOMENTS, StateSlot("max_exp_avg_sq", 2, maximum_of="exp_avg_sq"))
_CONSTANTS = ("sign", "decay", "keep_v", "take_m", "take_v", "unbias", "eps", "step", "feedback_gain")


def adamw(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """u = -lr wd w - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)."""
    g = sign * g
    m = m + take_m * (g - m)
    # (1-b2) g first: g g alone overflows at gradients of 2e19, whose v float32 still holds.
    v = keep_v * v + take_v * g * g
    return -(decay * w) - step * divide(m, sqrt(v) * unbias + eps), m, v


def adam(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Compute `adamw`'s update with the decay added to the gradient: g + wd w."""
    g = sign * g + decay * w
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return -(step * divide(m, sqrt(v) * unbias + eps)), m, v


def adamw_amsgrad(w, g, m, v, top, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Compute `adamw`'s update divided by the largest v so far (Reddi et al., arXiv 1904.09237)."""
    g = sign * g
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    top = maximum(top, v)
    return -(decay * w) - step * divide(m, sqrt(top) * unbias + eps), m, v, top


def adam_amsgrad(w, g, m, v, top, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Compute `adam`'s update divided by the largest v so far."""
    g = sign * g + decay * w
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    top = maximum(top, v)
    return -(step * divide(m, sqrt(top) * unbias + eps)), m, v, top


def adam_error_feedback(lost, m, v, sign, decay, keep_v, take_m, take_v, unbias, eps, step, feedback_gain):
    """Return the first moment whose later updates add up to `lost` more: m - (1-b1)/b1 lost denominator / step."""
    return m - feedback_gain * (lost * (sqrt(v) * unbias + eps))


def _step_constants(group: Mapping, step: int, decoupled: bool = False) -> tuple[float, ...]:
    lr, (beta1, beta2) = float(group["lr"]), (float(b) for b in group["betas"])
    size = lr / (1 - beta1**step)
    feedback_gain = (1 - beta1) / (beta1 * size) if size > 0 and beta1 > 0 else 0.0
    sign = -1.0 if group["maximize"] else 1.0
    return (
        sign,
        decay_of(group, decoupled),
        beta2,
        1 - beta1,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step),
        float(group["eps"]),
        size,
        feedback_gain,
    )


def _decoupled_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return _step_constants(group, step, decoupled=True)


ADAM = UpdateRule("adam", adam, MOMENTS, _CONSTANTS, _step_constants, ("decay", "eps"), adam_error_feedback, betas=2)
ADAMW = UpdateRule("adamw", adamw, MOMENTS, _CONSTANTS, _decoupled_constants, ("eps",), adam_error_feedback, betas=2)
ADAM_AMSGRAD = UpdateRule(
    "adam_amsgrad", adam_amsgrad, _MAXIMUM, _CONSTANTS, _step_constants, ("decay", "eps"), betas=2
)
ADAMW_AMSGRAD = UpdateRule(
    "adamw_amsgrad", adamw_amsgrad, _MAXIMUM, _CONSTANTS, _decoupled_constants, ("eps",), betas=2
)
