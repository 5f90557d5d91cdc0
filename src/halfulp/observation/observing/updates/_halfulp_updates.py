"""Updates of halfulp's optimizers: the float32 weight behind a parameter, and the change that their rule wants."""

from __future__ import annotations

from typing import Any

import torch

from ....optim import Optimizer
from ....optim._float32_weights import read_weights
from ....optim.parameters._parameter_plan import ParameterPlan
from ....optim.step._reference import change_by_rule
from ...sampling._sampler import sampled


def represented(optimizer: Optimizer, parameter: torch.Tensor, key: int) -> torch.Tensor | None:
    """Return the sample of the float32 weight that a parameter and its auxiliary tensors stand for.

    None before the parameter's first step, and where the weight is a ScaledTensor's or an MCTensor's.
    """
    plan = optimizer._plans.get(parameter)
    if plan is None or plan.spec.scaled or plan.spec.in_parameter or not plan.spec.auxiliary_names:
        return None
    return sampled(read_weights([plan])[0], key)


def halfulp_change(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    group: dict[str, Any],
    gradient: torch.Tensor,
    weight: torch.Tensor,
    key: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
    """Return what the rule, in float32, adds to sampled weights, and the states that it wants.

    None where it is not computed from such numbers: before the first step, under `wrap` or scaled parameters, and where
    the rule needs sums over whole tensors.
    """
    plan = optimizer._plans.get(parameter)
    rule = optimizer.rule(group)
    if plan is None or plan.spec.scaled or rule.assigns or rule.late_values is not None:
        return None
    states = decoded_states(plan, key).values()
    step = plan.state["step"] + 1
    change, new = change_by_rule(rule, weight, gradient, states, rule.values(group, step))
    return change, dict(zip([slot.name for slot in rule.states], new))


def decoded_states(plan: ParameterPlan, key: int) -> dict[str, torch.Tensor]:
    """Return samples of a parameter's states as float32 values, whatever they are stored as."""
    names = [slot.name for slot in plan.spec.rule.states]
    decoded = (codec.decode(tensors).reshape(-1) for codec, tensors in zip(plan.spec.codecs, plan.states))
    return {name: sampled(values, key) for name, values in zip(names, decoded)}
