"""Prodigy (Mishchenko and Defazio, arXiv 2306.06101) as an update rule: AdamW that estimates its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...kernels import divide, maximum, sqrt
from ._adam import MOMENTS
from ._update_rule import Reduction, StateSlot, UpdateRule

_CONSTANTS = (
    *("sign", "coupled", "counts", "first", "take_s", "keep_s", "decay", "keep_m", "take_m", "keep_v", "take_v"),
    *("size", "eps"),
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


def prodigy_progress(w, g, m, v, s, start, sign, coupled, counts, first):
    """g (w0 - w): how far along the gradients the weight has come."""
    return counts * ((sign * g + coupled * w) * (start + first * (w - start) - w))


def prodigy_distance(w, g, m, v, s, start, sign, coupled, counts, first, take_s, keep_s):
    """|s|, s being the sum of gradients after this step."""
    s = keep_s * s + take_s * (sign * g + coupled * w)
    return counts * maximum(s, -s)


def _third_beta(group: Mapping) -> float:
    return math.sqrt(float(group["betas"][1])) if group["beta3"] is None else float(group["beta3"])


def _rate(group: Mapping) -> float:
    (beta1, beta2), made = map(float, group["betas"]), group["k"] + 1
    unbias = math.sqrt(1 - beta2**made) / (1 - beta1**made) if group["use_bias_correction"] else 1.0
    return group["d"] * float(group["lr"]) * unbias


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    (beta1, beta2), d, rate = map(float, group["betas"]), group["d"], _rate(group)
    decay, counts = float(group["weight_decay"]), 1.0 if group["lr"] > 0 else 0.0
    gain = d / group["d0"] * (d if group["safeguard_warmup"] else rate) * counts
    apart = (0.0, rate * decay) if group["decouple"] else (decay, 0.0)
    return (
        *(-1.0 if group["maximize"] else 1.0, apart[0], counts, 1.0 if step == 1 else 0.0),
        *(gain, _third_beta(group), apart[1], beta1, d * (1 - beta1), beta2, d * d * (1 - beta2), rate),
    )


def estimate(group: Mapping, sums: Sequence[float]) -> dict[str, float]:
    """Return d, the largest so far and the numerator after the sums of a step."""
    progress, distance = sums
    d, d0, largest = group["d"], group["d0"], group["d_max"]
    numerator = _third_beta(group) * group["d_numerator"] + d / d0 * _rate(group) * progress
    if not (distance > 0 and group["lr"] > 0 and math.isfinite(numerator) and math.isfinite(distance)):
        return {"d": d, "d_max": largest, "d_numerator": group["d_numerator"]}
    found = group["d_coef"] * numerator / distance
    d = max(d, found) if d == d0 else d
    largest = max(largest, found)
    return {"d": min(largest, d * group["growth_rate"]), "d_max": largest, "d_numerator": numerator}


def _late_values(group: Mapping, step: int, sums: tuple[float, ...]) -> tuple[float, ...]:
    return (float(group["eps"]) * estimate(group, sums)["d"],)


PRODIGY = UpdateRule(
    "prodigy",
    prodigy,
    (*MOMENTS, StateSlot("s", 1, retention=_third_beta), StateSlot("p0", 1, exact=True)),
    _CONSTANTS,
    _step_constants,
    betas=2,
    reductions=(Reduction(prodigy_progress, over_all=True), Reduction(prodigy_distance, over_all=True)),
    late_values=_late_values,
)
