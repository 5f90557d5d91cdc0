"""Muon (Jordan et al., kellerjordan.github.io/posts/muon) as torch.optim has it: a momentum made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ._update_rule import StateSlot, UpdateRule, option


def muon(w, g, prepared, buffer, decay, take, size):
    """b = mu b + (1-mu) g; u = -lr wd w - size o, with o the orthogonal matrix near to mu b + (1-mu) g, or to b."""
    return -(decay * w) - size * prepared, buffer + take * (g - buffer)


def prepare(tensors: Any, group: Mapping, step: int) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Return the orthogonal matrix, and the learning rate for its shape."""
    momentum, g = float(group["momentum"]), tensors.gradient
    buffer = tensors.state("momentum_buffer").lerp(g, 1 - momentum)
    wanted = g.lerp(buffer, momentum) if group["nesterov"] else buffer
    a, b, c = map(float, group["ns_coefficients"])
    rows, columns = tensors.shape
    ratio = {None: 1.0, "original": 1.0}.get(group["adjust_lr_fn"])
    ratio = 0.2 * math.sqrt(max(rows, columns)) if ratio is None else math.sqrt(max(1.0, rows / max(columns, 1)))
    made = newton_schulz(wanted, (a, b, c), int(group["ns_steps"]), float(group["eps"]))
    return made.float(), (float(group["lr"]) * ratio,)


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T, by steps of X = a X + (b X X^T + c (X X^T)^2) X.

    In bfloat16, as torch.optim.Muon; in float32 on a processor that has no products of bfloat16.
    """
    a, b, c = coefficients
    x = matrix.to(_dtype_of_products(matrix.device))
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _dtype_of_products(device: torch.device) -> torch.dtype:
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return float(group["lr"]) * float(group["weight_decay"]), 1 - float(group["momentum"])


MUON = UpdateRule(
    "muon",
    muon,
    (StateSlot("momentum_buffer", 1, retention=option("momentum")),),
    ("decay", "take", "size"),
    _step_constants,
    prepare=prepare,
)
