"""An optimizer whose parameters step by tensors handed to it, not by their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from ...scaled import ScaledTensor
from .._group_options import check_number
from .._optimizer import Optimizer, _holds
from .._outside_writes import settle
from .._parameter_plan import Slot, options_of
from ..rules._update_rule import UpdateRule
from ..states._storage import Store
from ..step._kernel import Kind


def assignment(w, g):
    """The weight becomes g, which lies in the gradient's place."""
    return (g - w,)


ASSIGNMENT = UpdateRule("assignment", assignment, (), (), lambda group, step: (), assigns=True, decays=False)


class GivenOptimizer(Optimizer):
    """Rounding, companions, meter and checkpoints of Optimizer, around tensors that something else has made."""

    def __init__(self, params: Iterable, defaults: dict, **narrow) -> None:
        self._given: Mapping[torch.Tensor, torch.Tensor] = {}
        super().__init__(params, defaults, **narrow)

    def _kind(self, group: dict, parameter: torch.Tensor, gradient: Store | None, name: str) -> Kind:
        if isinstance(parameter, ScaledTensor):
            raise ValueError(
                f"parameter {name} is a ScaledTensor, which wrap and EMA do not take: torch.optim's optimizers run on "
                "it unwrapped, and hu.optim's AdamW, Adam, SGD and Lion step it"
            )
        return super()._kind(group, parameter, gradient, name)

    def _step_by(self, given: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step every parameter that a tensor is given for."""
        self._given = given
        try:
            self._take_step()
        finally:
            self._given = {}

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._given.get(parameter)

    def _check_numbers(self, group: dict) -> None:
        lr = group.get("lr")
        if isinstance(lr, torch.Tensor):
            check_number("lr", lr)
        if isinstance(lr, (int, float, torch.Tensor)) and not (math.isfinite(value := float(lr)) and value >= 0):
            raise ValueError(f"lr={value} is not allowed: give a finite number that is not negative")

    def _check_switches(self, group: dict) -> None:
        """They are the wrapped optimizer's."""

    def _current(self, group: dict, position: int, given: Store) -> Slot:
        """What is known of a parameter, looked at again if it has changed."""
        parameter = group["params"][position]
        slot = self._slots.get(parameter)
        like = torch.empty(0, dtype=given.dtype, device="cpu")
        if slot is None or not _holds(
            slot, parameter, like, self.rule(group), options_of(group), self.state[parameter]
        ):
            slot = self._prepare(group, position, given)
        settle(slot)
        return slot

    def __getstate__(self) -> dict:
        """For copy and pickle."""
        return {**super().__getstate__(), "_given": {}}
