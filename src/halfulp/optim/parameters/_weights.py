"""The float32 weight of one parameter: set, and carried over to another weight update."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ..step._spec import StepSpec
from ._outside_writes import current_auxiliary_tensors, mark_current
from ._parameter_plan import ParameterPlan


def set_weight(plan: ParameterPlan, value: torch.Tensor) -> None:
    """Set a parameter and its auxiliary tensors to a weight, in units of its scale, as its weight update holds it."""
    parts = [part.contiguous() for part in plan.parts]
    plan.spec.update.fill(plan.spec.store, parts, value)
    for part, filled in zip(plan.parts, parts):
        if part is not filled:
            part.copy_(filled)
    mark_current(plan)


def weight_to_carry(plan: ParameterPlan | None, spec: StepSpec, state: MutableMapping[str, Any]) -> torch.Tensor | None:
    """Return the weight that a plan's weight update held where the new specification has another; None if it has not.

    The auxiliary tensors of the old one are taken out of the state.

    Args:
        plan: of the parameter so far.
        spec: its new step specification.
        state: its entry in the optimizer's state.
    """
    if plan is None or plan.spec.in_parameter or plan.spec.update == spec.update or plan.spec.store != spec.store:
        return None
    if not plan.spec.auxiliary_names and not spec.auxiliary_names:
        return None
    if any(state.get(name) is None for name in plan.spec.auxiliary_names):
        return None
    payloads = [part.contiguous() for part in plan.payloads]
    value = plan.spec.update.read(plan.spec.store, [*payloads, *current_auxiliary_tensors(plan)]).clone()
    for name in plan.spec.auxiliary_names:
        del state[name]
    return value
