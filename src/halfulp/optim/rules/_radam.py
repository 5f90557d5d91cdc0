"""RAdam (Liu et al., arXiv 1908.03265) as update rules."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels import divide, sqrt
from ._adam import MOMENTS
from ._update_rule import UpdateRule, decay_of

_CONSTANTS = ("sign", "decay", "keep_v", "take_m", "take_v", "eps", "plain", "adaptive")


def radam(w, g, m, v, sign, decay, keep_v, take_m, take_v, eps, plain, adaptive):
    """u = -lr m/(1-b1^t) r sqrt(1-b2^t) / (sqrt(v) + eps); -lr m/(1-b1^t) in the first steps."""
    g = sign * g + decay * w
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return -(plain * m) - adaptive * divide(m, sqrt(v) + eps), m, v


def radamw(w, g, m, v, sign, decay, keep_v, take_m, take_v, eps, plain, adaptive):
    """Compute `radam`'s update with the decay taken from the weight."""
    g = sign * g
    m = m + take_m * (g - m)
    v = keep_v * v + take_v * g * g
    return -(decay * w) - plain * m - adaptive * divide(m, sqrt(v) + eps), m, v


def _step_constants(group: Mapping, step: int, decoupled: bool = False) -> tuple[float, ...]:
    lr, (beta1, beta2), eps = float(group["lr"]), map(float, group["betas"]), float(group["eps"])
    size, left = lr / (1 - beta1**step), 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / left
    plain, adaptive = size, 0.0
    if length > 5:  # the variance of the second moment is finite
        rest = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        plain, adaptive = 0.0, size * math.sqrt(left * rest)
    else:
        eps = 1.0  # the quotient is multiplied by 0
    return (
        -1.0 if group["maximize"] else 1.0,
        decay_of(group, decoupled),
        beta2,
        1 - beta1,
        1 - beta2,
        eps,
        plain,
        adaptive,
    )


def _decoupled_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return _step_constants(group, step, decoupled=True)


# Not homogeneous: the first steps grow with the gradient.
RADAM = UpdateRule("radam", radam, MOMENTS, _CONSTANTS, _step_constants, betas=2)
RADAMW = UpdateRule("radamw", radamw, MOMENTS, _CONSTANTS, _decoupled_constants, betas=2)
