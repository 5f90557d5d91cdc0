"""ADOPT (Taniguchi et al., arXiv 2411.02853): Adam that divides by the second moment before the gradient."""

import halfulp as hu
from halfulp.kernels import divide, maximum, sqrt
from halfulp.optim import StateSlot, UpdateRule


def adopt(w, g, m, v, decay, take_m, keep_v, take_v, eps, bound, lr, moves):
    """m = m + (1-b1) (c - m), c = g / max(sqrt(v), eps) within t^(1/4); u = -lr m - lr wd w; then v as in Adam."""
    scaled = divide(g, maximum(sqrt(v), eps))
    within = maximum(-maximum(-scaled, -bound), -bound)
    m = m + take_m * (moves * within - m)
    return -(moves * (lr * m + decay * w)), m, keep_v * v + take_v * g * g


def constants(group, step):
    """Made in float64; the first step only begins the second moment."""
    lr, (beta1, beta2), moves = float(group["lr"]), group["betas"], 0.0 if step == 1 else 1.0
    keep_v, take_v = (beta2, 1 - beta2) if moves else (0.0, 1.0)
    bound = (step - 1) ** 0.25
    return lr * group["weight_decay"], 1 - beta1, keep_v, take_v, group["eps"], bound, lr, moves


STATES = (
    StateSlot("exp_avg", 1),
    StateSlot("exp_avg_sq", 2),
)
RULE = UpdateRule("adopt", adopt, STATES, constants, betas=2)


@hu.optim.register_optimizer
class ADOPT(hu.optim.Optimizer):
    """ADOPT: Adam that converges for every beta2."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.9999), eps=1e-6, weight_decay=0.0, **options):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)

    def rule(self, group):
        """The same for every group."""
        return RULE
