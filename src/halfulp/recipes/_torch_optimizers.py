"""Recipes that torch.optim steps: weights of several components or of float64, and a trial's readings of them."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from .._names import unknown
from ..mctensor import MCTensor
from ..mctensor._state_dict import plain_state_dict
from ..optim import Optimizer
from ..optim._lost_updates import LostUpdateReport, lost_update_report
from ._recipe import Recipe


class TorchOptimizer(torch.optim.Optimizer):
    """The measurements of ``halfulp.optim``'s optimizers, for an optimizer of torch.optim."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def report(self) -> LostUpdateReport:
        """Return None: nothing is metered."""
        return lost_update_report(())

    def bytes_per_parameter(self) -> float:
        """Bytes of weights, states and gradients per parameter element, as held now."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        states = [value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held = sum(_bytes(tensor) for tensor in (*parameters, *states, *gradients))
        return held / max(1, sum(parameter.numel() for parameter in parameters))

    def float32_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state_dict with every sum of components, and every other floating tensor, as float32."""
        plain = plain_state_dict(model.state_dict(), torch.float32)
        return {name: value.float() if value.is_floating_point() else value for name, value in plain.items()}


class SGD(TorchOptimizer, torch.optim.SGD):
    """torch.optim.SGD."""


class Adam(TorchOptimizer, torch.optim.Adam):
    """torch.optim.Adam."""


class AdamW(TorchOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW."""


# What `halfulp.recipes.optimizer` gives: either measures itself.
MeasuredOptimizer = Optimizer | TorchOptimizer


_KINDS = {kind.__name__: kind for kind in (SGD, Adam, AdamW)}


def optimizer(recipe: Recipe, model: nn.Module, rule: str, **hyper: Any) -> TorchOptimizer:
    """torch.optim's optimizer of a converted model.

    Raises:
        ValueError: torch.optim has no such rule.
    """
    if rule not in _KINDS:
        raise ValueError(f"recipe {recipe.name!r} steps by torch.optim: {unknown('rule', rule, _KINDS)}")
    return _KINDS[rule](model.parameters(), **hyper)


def _bytes(tensor: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _parts(tensor))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.components if isinstance(tensor, MCTensor) else (tensor,)
