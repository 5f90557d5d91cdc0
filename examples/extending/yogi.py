"""Yogi (Zaheer et al., Adaptive methods for nonconvex optimization, NeurIPS 2018): a state that does not begin at 0."""

import halfulp as hu
from halfulp.kernels import divide, sign_of, sqrt
from halfulp.optim import StateSlot, UpdateRule


def yogi(w, g, m, v, decay, take_m, take_v, eps, lr):
    """v = v - (1-b2) sign(v - g^2) g^2; u = -lr (m / (sqrt(v) + eps) + wd w), m the mean of g."""
    m = m + take_m * (g - m)
    v = v - take_v * g * g * sign_of(v - g * g)
    return -(decay * w) - lr * divide(m, sqrt(v) + eps), m, v


def constants(group, step):
    """Made in float64 from a group's options."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return lr * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"], lr


STATES = (
    StateSlot("exp_avg", 1),
    StateSlot("exp_avg_sq", 2, initial=lambda group: group["initial_accumulator_value"]),
)
RULE = UpdateRule("yogi", yogi, STATES, constants, homogeneous=("eps",), betas=2)


@hu.optim.register_optimizer
class Yogi(hu.optim.Optimizer):
    """Yogi: Adam whose second moment moves by a share of the gradient's square only, up or down."""

    def __init__(
        self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0, initial_accumulator_value=1e-6, **options
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "initial_accumulator_value": initial_accumulator_value}, **options)

    def rule(self, group):
        """The same for every group."""
        return RULE
