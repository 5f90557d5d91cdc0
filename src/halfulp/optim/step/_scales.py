"""Scales of a step, chosen before anything is written, so that nothing overflows and no digit is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..parameters._local_tensors import scale_of
from ..parameters._parameter_plan import ParameterPlan
from ..states._scaled import finite_amax
from ._spec import StepSpec

Constants = tuple[float, ...]
# Binades of a payload's largest magnitude: the first and the last in which a scale is kept; where a new one puts it.
WINDOWS = {
    torch.float16: (-4, 13, 3),
    torch.float8_e4m3fn: (-1, 7, 5),
    torch.float8_e5m2: (-4, 14, 4),
    torch.bfloat16: (-40, 40, 0),
    torch.float32: (-40, 40, 0),
}
# Of a payload under the new scale, before the update is added: float32 holds it, and some binades more.
LARGEST_BINADE = 120


def with_present_scales(spec: StepSpec, plan: ParameterPlan, constants: Constants, gradient_scale: float) -> Constants:
    """Return a rule's constants with a parameter's present scales behind them; placeholders for the new ones."""
    scale = plan.scale
    own = [number for k in spec.scaled_states for number in (plan.states[k][1].item(), 1.0)]
    return (*constants, scale, 1 / scale, gradient_scale, 1.0, scale, *own)


def with_new_scales(spec: StepSpec, plan: ParameterPlan, constants: Constants, amax: Sequence[float]) -> Constants:
    """Return constants with the scales under which a step's results will be stored; tensors are not changed yet.

    A step reads the payload under its present scale and rounds the sum once, under the new one.

    Args:
        spec: the step specification.
        plan: of the parameter.
        constants: with the present scales.
        amax: the largest finite magnitudes of the weight and of each scaled state.
    """
    at = spec.constant_places
    numbers = list(constants)
    present = numbers[at["weight_scale"]]
    scale, ratio = weight_scale(spec.store.dtype, present, amax[0]), 1.0
    if scale != present:
        scale, ratio = reachable_scale(spec.store.dtype, present, scale, finite_amax(plan.payloads[0].float()))
    numbers[at["weight_inverse"]], numbers[at["new_scale"]] = 1 / scale, scale
    numbers[at["weight_ratio"]] = ratio
    for (k, codec), largest in zip(spec.scaled_states.items(), amax[1:], strict=True):
        numbers[at[f"inverse_{k}"]] = 1 / codec.fitting(largest)
    return tuple(numbers)


def keep_scales(spec: StepSpec, plan: ParameterPlan, constants: Constants) -> None:
    """Write the scales of the weight and the states that a step has stored."""
    at = spec.constant_places
    if constants[at["new_scale"]] != constants[at["weight_scale"]]:
        scale_of(plan.parameter).fill_(constants[at["new_scale"]])
    for k in spec.scaled_states:
        plan.states[k][1].fill_(1 / constants[at[f"inverse_{k}"]])


def weight_scale(dtype: torch.dtype, scale: float, largest: float) -> float:
    """Return the present scale if a magnitude lies well inside the payload's range, else one that puts it there.

    >>> weight_scale(torch.float16, 1.0, 100.0), weight_scale(torch.float16, 1.0, 40000.0)
    (1.0, 4096.0)
    """
    if largest == 0:
        return scale
    lowest, highest, target = WINDOWS[dtype]
    binade = math.frexp(largest)[1] - 1
    if lowest <= binade - (math.frexp(scale)[1] - 1) <= highest:
        return scale
    return math.ldexp(1.0, min(max(binade - target, -126), 126))


def reachable_scale(dtype: torch.dtype, present: float, scale: float, stored: float) -> tuple[float, float]:
    """A scale that a step can bring a payload to, and the factor that does: both in float32's range.

    Args:
        dtype: of the payload.
        present: its scale.
        scale: the one that is wanted, and nearly always given.
        stored: the payload's largest finite magnitude, which the factor must leave finite.

    >>> reachable_scale(torch.float16, 1.0, 2.0**-40, 1.5), reachable_scale(torch.float16, 2.0**-126, 1.0, 0.0)
    ((9.094947017729282e-13, 1099511627776.0), (1.0, 1.0))
    """
    if stored == 0:
        return scale, 1.0
    scale = max(scale, math.ldexp(present, max(math.frexp(stored)[1], 0) - LARGEST_BINADE))
    if holds_the_rest(dtype):
        scale = min(scale, math.ldexp(present, 126))
    scale = min(scale, 2.0**126)
    return scale, max(present / scale, 2.0**-126)


def holds_the_rest(dtype: torch.dtype) -> bool:
    """Return whether a payload's own range is wide enough for what a factor in float32's range leaves to do."""
    return torch.finfo(dtype).max > 2.0**LARGEST_BINADE
