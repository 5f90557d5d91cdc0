"""Adan (Xie et al., arXiv 2208.06677): three betas, and the gradient before as a state."""

import math

import halfulp as hu
from halfulp.kernels import divide, sqrt
from halfulp.optim import StateSlot, UpdateRule

CONSTANTS = ("decay", "follow", "take_m", "keep_d", "take_d", "keep_n", "take_n", "size_m", "size_d", "unbias", "eps")


def adan(w, g, m, d, n, before, decay, follow, take_m, keep_d, take_d, keep_n, take_n, size_m, size_d, unbias, eps):
    """w = (w - lr (m + b2 d) / (sqrt(n) + eps)) / (1 + lr wd); m, d, n the means of g, g - g', (g + b2 (g - g'))^2.

    g' is the gradient before, and the means are unbiased, as in the authors' code, where betas are what is kept.
    """
    change = follow * (g - before)
    ahead = g + keep_d * change
    m = m + take_m * (g - m)
    d = d + take_d * (change - d)
    n = keep_n * n + take_n * ahead * ahead
    return -(decay * w) - divide(size_m * m + size_d * d, sqrt(n) * unbias + eps), m, d, n, g


def constants(group, step):
    """Made in float64 from a group's options; there is no change of gradients at the first step."""
    lr, (beta1, beta2, beta3) = float(group["lr"]), group["betas"]
    shrink = 1 / (1 + lr * group["weight_decay"])
    sizes = lr * shrink / (1 - beta1**step), lr * shrink * beta2 / (1 - beta2**step)
    unbias = 1 / math.sqrt(1 - beta3**step)
    kept = 1 - beta1, beta2, 1 - beta2, beta3, 1 - beta3
    return (1 - shrink, 0.0 if step == 1 else 1.0, *kept, *sizes, unbias, group["eps"])


STATES = (
    StateSlot("exp_avg", 1, retention=lambda group: group["betas"][0]),
    StateSlot("exp_avg_diff", 1, retention=lambda group: group["betas"][1]),
    StateSlot("exp_avg_sq", 2, retention=lambda group: group["betas"][2]),
    StateSlot("gradient_before", 1, retention=0.0),
)
RULE = UpdateRule("adan", adan, STATES, CONSTANTS, constants, homogeneous=("eps",), betas=3)


@hu.optim.register_optimizer
class Adan(hu.optim.Optimizer):
    """Adan: Adam with Nesterov's momentum, by the change of the gradient."""

    def __init__(self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0, **options):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)

    def rule(self, group):
        """The same for every group."""
        return RULE
