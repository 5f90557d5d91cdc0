"""An optimizer whose parameters step by given tensors instead of their `.grad`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch

from ...scaled import ScaledTensor
from .._group_options import NarrowOptions, Parameters, check_number
from .._optimizer import Optimizer
from ..parameters._outside_writes import drop_stale
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._step_spec import StepSpec
from ..rules._update_rule import UpdateRule
from ..stores._storage import Store


def assignment(w, g):
    """Return u and no states; the new weight is g, passed in the gradient's place."""
    return (g - w,)


def _no_constants(group: Mapping, step: int) -> tuple[float, ...]:
    return ()


ASSIGNMENT = UpdateRule("assignment", assignment, (), (), _no_constants, assigns=True, decays=False)


class ExplicitGradientOptimizer(Optimizer):
    """Rounding, auxiliary tensors, lost updates and checkpoints of Optimizer, for updates computed elsewhere."""

    def __init__(self, params: Parameters, defaults: dict[str, Any], **narrow: Unpack[NarrowOptions]) -> None:
        self._explicit_gradients: Mapping[torch.Tensor, torch.Tensor] = {}
        super().__init__(params, defaults, **narrow)

    def _step_spec(self, group: dict, parameter: torch.Tensor, gradient: Store | None, name: str) -> StepSpec:
        if isinstance(parameter, ScaledTensor):
            raise ValueError(
                f"parameter {name} is a ScaledTensor, which wrap and EMA do not take: torch.optim's optimizers run on "
                "it unwrapped, and hu.optim's AdamW, Adam, SGD and Lion step it"
            )
        return super()._step_spec(group, parameter, gradient, name)

    def _step_by(self, given: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step every parameter that a tensor is given for."""
        self._explicit_gradients = given
        try:
            self._take_step()
        finally:
            self._explicit_gradients = {}

    def _gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [*map(self._explicit_gradients.get, parameters)]

    def _check_numbers(self, group: dict) -> None:
        lr = group.get("lr")
        if isinstance(lr, torch.Tensor):
            check_number("lr", lr)
        if isinstance(lr, (int, float, torch.Tensor)) and not (math.isfinite(value := float(lr)) and value >= 0):
            raise ValueError(f"lr={value} is not allowed: give a finite number that is not negative")

    def _check_switches(self, group: dict) -> None:
        """Accept all: these options belong to the wrapped optimizer."""

    def _current(self, group: dict, position: int, given: Store) -> ParameterPlan:
        """Return a parameter's plan for gradients that are stored as given, its auxiliary tensors up to date."""
        plan = self._plan(group, position, given)
        drop_stale(plan)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle."""
        return {**super().__getstate__(), "_explicit_gradients": {}}
