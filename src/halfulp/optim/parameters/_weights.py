"""The float32 weight of one parameter: set, and carried over to another weight update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch

from ._local_tensors import memory
from ._outside_writes import (
    drop_stale,
    follow_version,
    is_current,
    mark_carried,
    mark_current,
    payload_version_of,
)
from ._parameter_plan import ParameterPlan
from ._step_spec import StepSpec


def set_weight(plan: ParameterPlan, value: torch.Tensor) -> None:
    """Set a parameter and its auxiliary tensors to a weight, in units of its scale, as its weight update holds it.

    What was written from outside until now is answered first: a file saved before would say that it has been.
    """
    drop_stale(plan)
    _fill(plan, value)
    mark_current(plan)


def write_carried(
    carried: Sequence[tuple[ParameterPlan, torch.Tensor]], others: Iterable[ParameterPlan | None]
) -> None:
    """Set parameters to the weights that they had under another weight update (`weight_to_carry`).

    Args:
        carried: their plans and weights.
        others: plans whose payloads stay as they are, though one cut from the same tensor shares a version counter.
    """
    held = [plan for plan in others if carried and plan is not None and plan.payload_version is not None]
    current = [plan for plan in held if is_current(plan)]
    for plan, value in carried:
        _fill(plan, value)
    for plan in current:
        follow_version(plan)
    for plan, _ in carried:
        mark_carried(plan)


def _fill(plan: ParameterPlan, value: torch.Tensor) -> None:
    parts = [part.contiguous() for part in plan.parts]
    plan.spec.update.fill(plan.spec.store, parts, value)
    for part, filled in zip(plan.parts, parts):
        if part is not filled:
            part.copy_(filled)


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
    if plan.payload_version is not None:  # the parameter may have moved since the plan was made
        parameter = plan.parameter
        plan.record.payload_version = payload_version_of(parameter, memory(parameter), plan.payload_version)
    drop_stale(plan)
    payloads = [part.contiguous() for part in plan.payloads]
    value = plan.spec.update.read(plan.spec.store, [*payloads, *plan.auxiliary_tensors]).clone()
    for name in plan.spec.auxiliary_names:
        del state[name]
    return value


@contextlib.contextmanager
def under(group: dict[str, Any], update: Any) -> Iterator[None]:
    """A context in which a group has a weight update, whatever it was given since."""
    chosen, group["weight_update"] = group["weight_update"], update
    try:
        yield
    finally:
        group["weight_update"] = chosen
