"""AdEMAMix, Adan, LAMB and Prodigy as update rules: Adam with other moments, or with the step's size found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...kernels import divide, maximum, sqrt
from ._adam import MOMENT_STATES, compute_inverse_root_bias_correction, list_leading_adam_constants, update_moments
from ._update_rule import GRADIENT_SIGN_BY_MAXIMIZE, Reduction, StateSlot, UpdateRule


def ademamix(w, g, m, v, slow, sign, decay, keep_v, take_m, take_v, take_slow, unbias, eps, size_m, size_slow):
    """u = -lr (m/(1-b1^t) + a s) / (sqrt(v)/sqrt(1-b2^t) + eps) - lr wd w; s the mean of the gradients by b3."""
    g = sign * g
    m, v = update_moments(g, m, v, keep_v, take_m, take_v)
    slow = slow + take_slow * (g - slow)
    return -(decay * w) - divide(size_m * m + size_slow * slow, sqrt(v) * unbias + eps), m, v, slow


def _list_ademamix_constants(group: Mapping, step: int) -> tuple[float, ...]:
    lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
    alpha, warmup, beta_warmup = float(group["alpha"]), group["alpha_warmup"], group["beta3_warmup"]
    if warmup:
        alpha *= min(1.0, step / warmup)
    if beta_warmup and step < beta_warmup and beta1 > 0 and beta3 > 0:
        # Between the two betas such that half-lives grow linearly.
        fast, slow, share = math.log(beta1), math.log(beta3), step / beta_warmup
        beta3 = min(beta3, math.exp(fast * slow / ((1 - share) * slow + share * fast)))
    kept = (
        *list_leading_adam_constants(group),
        1 - beta3,
        compute_inverse_root_bias_correction(beta2, step),
        float(group["eps"]),
    )
    return (*kept, lr / (1 - beta1**step), lr * alpha)


_ADEMAMIX_STATES = (*MOMENT_STATES, StateSlot("exp_avg_slow", 1))
ADEMAMIX = UpdateRule("ademamix", ademamix, _ADEMAMIX_STATES, _list_ademamix_constants, homogeneous=("eps",), betas=3)


def adan(
    w, g, m, d, n, before, sign, decay, follow, take_m, keep_d, take_d, keep_n, take_n, size_m, size_d, unbias, eps
):
    """w = (w - lr (m + b2 d) / (sqrt(n) + eps)) / (1 + lr wd); m, d, n the means of g, g - g', (g + b2 (g - g'))^2.

    g' is the gradient before, and the means are unbiased, as in the authors' code, where betas are what is kept.
    """
    g = sign * g
    change = follow * (g - before)
    ahead = g + keep_d * change
    m = m + take_m * (g - m)
    d = d + take_d * (change - d)
    n = keep_n * n + take_n * ahead * ahead
    return -(decay * w) - divide(size_m * m + size_d * d, sqrt(n) * unbias + eps), m, d, n, g


def _list_adan_constants(group: Mapping, step: int) -> tuple[float, ...]:
    """Return the constants of a step, made in float64; the first step has no change of gradients."""
    lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
    decay, shrink = lr * float(group["weight_decay"]), 1.0
    if not group["no_prox"]:
        shrink = 1 / (1 + decay)
        decay = 1 - shrink
    sizes = lr * shrink / (1 - beta1**step), lr * shrink * beta2 / (1 - beta2**step)
    kept = 1 - beta1, beta2, 1 - beta2, beta3, 1 - beta3
    follow = 0.0 if step == 1 else 1.0
    sign, eps = GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])], float(group["eps"])
    return (sign, decay, follow, *kept, *sizes, compute_inverse_root_bias_correction(beta3, step), eps)


_ADAN_STATES = (
    StateSlot("exp_avg", 1),
    StateSlot("exp_avg_diff", 1),
    StateSlot("exp_avg_sq", 2),
    StateSlot("gradient_before", 1),
)
ADAN = UpdateRule("adan", adan, _ADAN_STATES, _list_adan_constants, homogeneous=("eps",), betas=3)


def get_lamb_weight(w):
    """Return the weight, whose norm a tensor's step is to have."""
    return w


def compute_lamb_direction(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias_m, unbias_v, eps):
    """r = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd w, of the new m and v."""
    m, v = update_moments(sign * g, m, v, keep_v, take_m, take_v)
    return divide(unbias_m * m, sqrt(v) * unbias_v + eps) + decay * w


def lamb(w, g, m, v, sign, decay, keep_v, take_m, take_v, unbias_m, unbias_v, eps, lr):
    """u = -lr |w|/|r| r with r of `compute_lamb_direction`."""
    m, v = update_moments(sign * g, m, v, keep_v, take_m, take_v)
    return -(lr * (divide(unbias_m * m, sqrt(v) * unbias_v + eps) + decay * w)), m, v


def _list_lamb_constants(group: Mapping, step: int) -> tuple[float, ...]:
    beta1, beta2 = map(float, group["betas"])
    unbias = (
        (1 / (1 - beta1**step), compute_inverse_root_bias_correction(beta2, step))
        if group["bias_correction"]
        else (1.0, 1.0)
    )
    return (*list_leading_adam_constants(group, decoupled=False), *unbias, float(group["eps"]))


def _compute_lamb_trust_rate(group: Mapping, step: int, sums: tuple[float, ...]) -> tuple[float, ...]:
    """Give lr times the trust ratio: 1 where either norm is 0, and where nothing decays unless `always_adapt`."""
    weight, direction = (math.sqrt(total) for total in sums)
    adapts = (group["weight_decay"] or group["always_adapt"]) and weight > 0 and direction > 0
    ratio = weight / direction if adapts else 1.0
    return (float(group["lr"]) * (min(ratio, 1.0) if group["trust_clip"] else ratio),)


LAMB = UpdateRule(
    "lamb",
    lamb,
    MOMENT_STATES,
    _list_lamb_constants,
    ("eps",),
    betas=2,
    reductions=(Reduction(get_lamb_weight, squares=True), Reduction(compute_lamb_direction, squares=True)),
    late_values=_compute_lamb_trust_rate,
)


def prodigy(
    w, g, m, v, s, start, sign, coupled, counts, first, take_s, keep_s, decay, keep_m, take_m, keep_v, take_v, size, eps
):
    """m = b1 m + (1-b1) d g, v = b2 v + (1-b2) d^2 g^2, s = b3 s + gain g; u = -d lr (m / (sqrt(v) + d' eps) + wd w).

    d' is the estimate after this step's sums, d the one before.
    """
    start = start + first * (w - start)
    g = sign * g + coupled * w
    m = keep_m * m + take_m * g
    v = keep_v * v + take_v * g * g
    return -(decay * w) - size * divide(m, sqrt(v) + eps), m, v, keep_s * s + take_s * g, start


def compute_prodigy_numerator_term(w, g, m, v, s, start, sign, coupled, counts, first):
    """g (w0 - w): how far along the gradients the weight has come."""
    return counts * ((sign * g + coupled * w) * (start + first * (w - start) - w))


def compute_prodigy_denominator_term(w, g, m, v, s, start, sign, coupled, counts, first, take_s, keep_s):
    """|s|, s being the sum of gradients after this step."""
    s = keep_s * s + take_s * (sign * g + coupled * w)
    return counts * maximum(s, -s)


def _read_prodigy_beta3(group: Mapping) -> float:
    return math.sqrt(float(group["betas"][1])) if group["beta3"] is None else float(group["beta3"])


def _compute_prodigy_learning_rate(group: Mapping) -> float:
    (beta1, beta2), made = map(float, group["betas"]), group["k"] + 1
    unbias = math.sqrt(1 - beta2**made) / (1 - beta1**made) if group["use_bias_correction"] else 1.0
    return group["d"] * float(group["lr"]) * unbias


def _list_prodigy_constants(group: Mapping, step: int) -> tuple[float, ...]:
    (beta1, beta2), d, rate = map(float, group["betas"]), group["d"], _compute_prodigy_learning_rate(group)
    decay, counts = float(group["weight_decay"]), 1.0 if group["lr"] > 0 else 0.0
    gain = d / group["d0"] * (d if group["safeguard_warmup"] else rate) * counts
    apart = (0.0, rate * decay) if group["decouple"] else (decay, 0.0)
    return (
        *(GRADIENT_SIGN_BY_MAXIMIZE[bool(group["maximize"])], apart[0], counts, 1.0 if step == 1 else 0.0),
        *(gain, _read_prodigy_beta3(group), apart[1], beta1, d * (1 - beta1), beta2, d * d * (1 - beta2), rate),
    )


def compute_next_prodigy_estimate(group: Mapping, sums: Sequence[float]) -> dict[str, float]:
    """Return d, the largest so far and the numerator after the sums of a step."""
    progress, distance = sums
    d, d0, largest = group["d"], group["d0"], group["d_max"]
    numerator = (
        _read_prodigy_beta3(group) * group["d_numerator"] + d / d0 * _compute_prodigy_learning_rate(group) * progress
    )
    if not (distance > 0 and group["lr"] > 0 and math.isfinite(numerator) and math.isfinite(distance)):
        return {"d": d, "d_max": largest, "d_numerator": group["d_numerator"]}
    found = group["d_coef"] * numerator / distance
    d = max(d, found) if d == d0 else d
    largest = max(largest, found)
    return {"d": min(largest, d * group["growth_rate"]), "d_max": largest, "d_numerator": numerator}


def _compute_prodigy_eps(group: Mapping, step: int, sums: tuple[float, ...]) -> tuple[float, ...]:
    return (float(group["eps"]) * compute_next_prodigy_estimate(group, sums)["d"],)


_PRODIGY_STATES = (*MOMENT_STATES, StateSlot("s", 1), StateSlot("p0", 1, exact=True))
PRODIGY = UpdateRule(
    "prodigy",
    prodigy,
    _PRODIGY_STATES,
    _list_prodigy_constants,
    betas=2,
    reductions=(
        Reduction(compute_prodigy_numerator_term, over_all=True),
        Reduction(compute_prodigy_denominator_term, over_all=True),
    ),
    late_values=_compute_prodigy_eps,
)
