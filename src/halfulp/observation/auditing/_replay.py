"""The last update that an optimizer wanted, computed again from its states, and what rounding makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import formats
from ...formats import Format
from ...rounding import quantize
from .._text import WIDE
from ..checkpoints._stored import Stored, of_tensor
from ._audit import Lost

_AT_ONCE = 1 << 18


def replay(
    weight: Stored, states: Mapping[str, Any], options: Mapping[str, Any], step: int | None
) -> tuple[Lost | None, Lost | None]:
    """Return what becomes of the last update, and of weight decay alone, where nearest rounding stores the weight.

    Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1; AdamW, amsgrad): lr m' / (sqrt(v') + eps) with bias-corrected
    moments, which after step t are those that step t used. Lion: lr sign(m). SGD with momentum: lr times the buffer.
    The weight is that after the step: an update that was lost left it as it was.

    Args:
        weight: floating-point.
        states: tensors of the parameter by name.
        options: of its group.
        step: how many steps it has made.

    Returns:
        None where the rule is not known from the names of its states, and for decay where the optimizer does not
        round it on its own.
    """
    rule = _rule(states, options, step)
    lr = options.get("lr")
    if rule is None or not lr or weight.numel == 0:
        return None, None
    names, form = _needed(rule, options), formats.get(weight.dtype)
    parts = {name: _as_stored(states[name]) for name in names}
    if any(part.shape != weight.shape or not part.dtype.is_floating_point for part in parts.values()):
        return None, None
    rate = _own_decay(rule, options)
    update, decay = _Sum(form), _Sum(form) if rate else None
    for rows in weight.rows(_AT_ONCE):
        w = weight.read(rows).double()
        wanted = _wanted(rule, {name: part.read(rows).double() for name, part in parts.items()}, options, step or 1)
        update.add(w, -wanted if options.get("maximize") else wanted)
        if decay is not None and rate is not None:
            decay.add(w, rate * w)
    return update.lost(), None if decay is None else decay.lost()


def _as_stored(value: Any) -> Stored:
    return value if isinstance(value, Stored) else of_tensor(value)


def _rule(states: Mapping[str, Any], options: Mapping[str, Any], step: int | None) -> str | None:
    if any(f"{name}_{part}" in states for name in ("exp_avg", "exp_avg_sq") for part in ("scale", "codes", "residual")):
        return None
    pair = isinstance(options.get("betas"), list | tuple) and len(options["betas"]) >= 2
    if pair and {"exp_avg", "exp_avg_sq"} <= states.keys():
        return "adam" if step and (not options.get("amsgrad") or "max_exp_avg_sq" in states) else None
    if pair and "exp_avg" in states:
        return "lion"
    return "sgd" if "momentum_buffer" in states else None


def _needed(rule: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    if rule == "adam":
        return "exp_avg", "max_exp_avg_sq" if options.get("amsgrad") else "exp_avg_sq"
    return ("exp_avg",) if rule == "lion" else ("momentum_buffer",)


def _wanted(rule: str, parts: Mapping[str, Tensor], options: Mapping[str, Any], step: int) -> Tensor:
    lr = float(options["lr"])
    first, *rest = parts.values()
    if rule == "lion":
        return lr * first.sign()
    if rule == "sgd":
        return lr * first
    beta1, beta2 = (float(beta) for beta in options["betas"][:2])
    denominator = (rest[0] / (1 - beta2**step)).sqrt() + float(options.get("eps", 0.0))
    return lr * (first / (1 - beta1**step)) / denominator


def _own_decay(rule: str, options: Mapping[str, Any]) -> float | None:
    """Return what a step takes off of a weight by decay that torch's AdamW rounds on its own, before the update."""
    rate = options.get("weight_decay")
    if not rate or rule != "adam" or not options.get("decoupled_weight_decay"):
        return None
    if options.get("fused") or "weight_update" in options:
        return None
    return float(options["lr"]) * float(rate)


class _Sum:
    """Wanted changes, and what nearest rounding to a format leaves of them."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._wanted, self._lost = 0, 0
        self._squares, self._products = 0.0, 0.0
        self._lost_by = {"split8": 0, "kahan": 0, "float32": 0} if form.precision < WIDE else {}

    def add(self, w: Tensor, u: Tensor) -> None:
        known = w.isfinite() & u.isfinite() & (u != 0)
        w, u = w[known], u[known]
        if not len(w):
            return
        rounded = quantize(w - u, self._form)
        largest = float(u.abs().max())
        scaled, moved = u / largest, (w - rounded) / largest
        self._wanted += len(w)
        self._lost += int((rounded == w).sum())
        self._squares += float(scaled.square().sum()) * min(largest, 1e150) ** 2
        self._products += float((scaled * moved).sum()) * min(largest, 1e150) ** 2
        if self._lost_by:
            binade = torch.frexp(w)[1].clamp(min=self._form.emin + 1) - 1 - self._form.mantissa_bits
            halves = u.abs() / torch.exp2(binade.double() - 1)
            self._lost_by["split8"] += int((halves < 2.0**-8).sum())
            # A residual of few bits, which is mostly above an eighth of the weight's ulp, rounds too.
            self._lost_by["kahan"] += int((halves < 2.0 ** -(self._form.precision + 2)).sum())
            self._lost_by["float32"] += int((quantize(w - u, "fp32") == w).sum())

    def lost(self) -> Lost:
        realised = self._products / self._squares if self._squares else 1.0
        return Lost(self._wanted, self._lost, realised if math.isfinite(realised) else 1.0, self._lost_by)
