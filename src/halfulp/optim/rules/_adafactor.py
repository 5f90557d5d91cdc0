"""Adafactor (Shazeer and Stern, arXiv 1804.04235) as torch.optim has it: a factored second moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ._update_rule import UpdateRule

_AT_ONCE = 1 << 15  # elements that torch adds up in one thread


def adafactor(w, g, prepared, decay, size):
    """u = -lr wd w - size d, with d the gradient over the root of the factored second moment."""
    return (-(decay * w) - size * prepared,)


def factors(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Adafactor's states: means of squares over columns and over rows, or a vector's squares."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def prepare(tensors: Any, group: Mapping, step: int) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Move the second moment on, and return g / sqrt(it) and the step size, clipped by both roots of mean squares."""
    if not math.prod(tensors.shape):  # no rows or columns to average over
        return tensors.gradient, (0.0,)
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(torch.float32).eps if eps1 is None else float(eps1)
    g, take = tensors.gradient, step ** float(group["beta2_decay"])
    rate = min(float(group["lr"]), 1 / math.sqrt(step)) * max(float(eps2), root_mean_square(tensors.weight))
    held = tensors.factors
    if len(tensors.shape) < 2:
        variance = held["variance"].lerp_(g * g, take).clone()
    else:
        row = held["row_var"].lerp_(_mean_square(g, -1), take)
        column = held["col_var"].lerp_(_mean_square(g, -2), take)
        variance = row @ column / row.mean(-2, keepdim=True).clamp(min=eps1)
    direction = variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(g)
    clip = max(1.0, root_mean_square(direction) / float(group["d"]))
    return direction, ((-rate if group["maximize"] else rate) / clip,)


def _mean_square(g: torch.Tensor, dimension: int) -> torch.Tensor:
    if g.numel() == g.shape[dimension]:  # one sum, whose order is of the number of threads
        return torch.full_like(g.narrow(dimension, 0, 1), root_mean_square(g) ** 2)
    return (g * g).mean(dimension, keepdim=True)


def root_mean_square(x: torch.Tensor) -> float:
    """Return the root of the mean square, 0 of nothing; the same bits on any number of threads."""
    if not x.numel():
        return 0.0
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in x.reshape(-1).split(_AT_ONCE)]
    return math.sqrt(torch.stack(parts).square().sum().item() / x.numel())


def _step_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return (float(group["lr"]) * float(group["weight_decay"]),)


ADAFACTOR = UpdateRule("adafactor", adafactor, (), ("decay", "size"), _step_constants, prepare=prepare, factors=factors)
