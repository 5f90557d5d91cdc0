"""An optimizer of one's own: AdaBelief (Zhuang et al., arXiv 2010.07468), with every weight update and state dtype."""

import math

import halfulp as hu
from halfulp.kernels import divide, sqrt
from halfulp.optim import StateSlot, UpdateRule


def adabelief(w, g, m, s, decay, keep_s, take_m, take_s, unbias, eps, step):
    """u = -lr wd w - lr/(1-b1^t) m / (sqrt(s/(1-b2^t)) + eps), s the mean of (g - m)^2, plus eps."""
    m = m + take_m * (g - m)
    s = keep_s * s + take_s * (g - m) * (g - m) + eps
    return -(decay * w) - step * divide(m, sqrt(s) * unbias + eps), m, s


def constants(group, step):
    """Made in float64 from a group's options."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    unbias, size = 1 / math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    return lr * group["weight_decay"], beta2, 1 - beta1, 1 - beta2, unbias, group["eps"], size


STATES = (StateSlot("exp_avg", 1), StateSlot("exp_avg_var", 2))
RULE = UpdateRule("adabelief", adabelief, STATES, constants, betas=2)


@hu.optim.register_optimizer
class AdaBelief(hu.optim.Optimizer):
    """AdaBelief: Adam whose denominator is how far gradients are from their mean."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.0, **options):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)

    def rule(self, group):
        """The same for every group."""
        return RULE
