"""Formulas that public training code writes by hand, each a scalar loss of a layer's outputs: one registry.

`h` is what a linear layer gives, [16, 32]; `p.v`, `p.w` and `p.s` are parameters, [32], [32, 32] and [1]; `d` holds
plain data: classes `y` [16], normal `t` and uniform `u` [16, 32], a mask `m` [16, 32] and normal `r` [16].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Formula:
    """A loss of hidden activations, parameters and data, and the code that writes it so."""

    name: str
    source: str
    loss: Callable[[Tensor, Any, Any], Tensor]


FORMULAS: dict[str, Formula] = {}


def formula(name: str, source: str, loss: Callable[[Tensor, Any, Any], Tensor]) -> None:
    """Add one."""
    assert name not in FORMULAS, name
    FORMULAS[name] = Formula(name, source, loss)


def probabilities(h: Tensor) -> Tensor:
    """Of the classes."""
    return torch.softmax(h, -1)


def chosen(x: Tensor, y: Tensor) -> Tensor:
    """One number of each row."""
    return x.gather(-1, y[:, None]).squeeze(-1)


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, with no eps."""
    return x / x.norm(dim=-1, keepdim=True)


def pairs(h: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of a batch."""
    return h[:8], h[8:]


def causal(scores: Tensor, value: float = float("-inf")) -> Tensor:
    """Scores without the future."""
    size = scores.shape[-1]
    return scores.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), value)


def mean_square(x: Tensor) -> Tensor:
    """A loss for what is no loss itself."""
    return (x * x).mean()


def to_target(name: str, source: str, layer: Callable[[Tensor, Any, Any], Tensor]) -> None:
    """Add a layer, whose outputs are compared with a target."""
    formula(name, source, lambda h, p, d: F.mse_loss(layer(h, p, d), d.t[:, : layer_width(layer, h, p, d)]))


def layer_width(layer: Callable, h: Tensor, p: Any, d: Any) -> int:
    """How many features a layer of this registry gives: all, or a gated half."""
    return getattr(layer, "width", h.shape[-1])
