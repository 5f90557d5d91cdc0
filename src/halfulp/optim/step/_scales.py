"""Scales of a step, chosen before anything is written, so that nothing overflows and no digit is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..parameters._local_tensors import get_scaled_parameter_scale
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._step_spec import StepSpec
from ..states._codec import compute_finite_amax, floor_to_power_of_two, get_array_module

ConstantRow = tuple[float, ...]
# Binades of a payload's largest magnitude: the first and the last in which a scale is kept; where a new one puts it.
PAYLOAD_BINADE_WINDOW_BY_DTYPE = {
    torch.float16: (-4, 13, 3),
    torch.float8_e4m3fn: (-1, 7, 5),
    torch.float8_e5m2: (-4, 14, 4),
    torch.bfloat16: (-40, 40, 0),
    torch.float32: (-40, 40, 0),
}
# Of a payload under the new scale, before the update is added: float32 holds it, and some binades more.
LARGEST_PAYLOAD_EXPONENT = 120


def append_current_scales(
    spec: StepSpec, plan: ParameterPlan, constants: ConstantRow, gradient_scale: float
) -> ConstantRow:
    """Return a rule's constants with a parameter's present scales behind them; placeholders for the new ones."""
    scale = plan.scale
    own = [number for k in spec.scaled_codec_by_state for number in (plan.states[k][1].item(), 1.0)]
    return (*constants, scale, 1 / scale, gradient_scale, 1.0, scale, *own)


def choose_new_scales(
    spec: StepSpec, plans: Sequence[ParameterPlan], constants: Sequence[ConstantRow], amax: np.ndarray
) -> list[ConstantRow]:
    """Return constants with the scales under which a step's results will be stored; tensors are not changed yet.

    A step reads the payload under its present scale and rounds the sum once, under the new one. `amax` has a row per
    parameter: the largest finite magnitudes of the weight and of each scaled state.
    """
    first = len(spec.rule.constants)
    present = np.array([row[first:] for row in constants]).T[list_current_scale_columns(spec)]
    largest = np.vstack([amax.T, np.zeros(len(plans))])
    chosen = compute_scale_constants(spec, present, largest)
    moved = np.flatnonzero(chosen[find_scale_column(spec, "new_scale")] != present[0]).tolist()
    for row in moved:
        largest[-1, row] = compute_finite_amax(plans[row].payloads[0].float())
    chosen = compute_scale_constants(spec, present, largest) if moved else chosen
    return [(*row[:first], *scales) for row, scales in zip(constants, chosen.T.tolist(), strict=True)]


def write_new_scales(spec: StepSpec, plan: ParameterPlan, constants: ConstantRow) -> None:
    """Write the scales of the weight and the states that a step has stored."""
    at = spec.constant_columns
    if constants[at["new_scale"]] != constants[at["weight_scale"]]:
        get_scaled_parameter_scale(plan.parameter).fill_(constants[at["new_scale"]])
    for k in spec.scaled_codec_by_state:
        plan.states[k][1].fill_(1 / constants[at[f"inverse_{k}"]])


def find_scale_column(spec: StepSpec, name: str) -> int:
    """Return the place of a scale among the constants of a step that are not the rule's."""
    return spec.constant_columns[name] - len(spec.rule.constants)


def list_current_scale_columns(spec: StepSpec) -> list[int]:
    """Return the places of the present scales: of weights, of gradients, and of each scaled state."""
    names = ["weight_scale", "gradient_scale", *(f"scale_{k}" for k in spec.scaled_codec_by_state)]
    return [find_scale_column(spec, name) for name in names]


def compute_scale_constants(spec: StepSpec, present: Any, largest: Any) -> Any:
    """Return the constants of a step that are not the rule's, (constants, parameters), of NumPy or torch as given.

    `present` are float64 (2 + scaled states, parameters): the scales of weights, of gradients, and of each scaled
    state. `largest`, of that shape, are the largest finite magnitudes of weights and of each scaled state, as they are
    about to be stored, and last of payloads as they are.
    """
    weights, gradients, *states = present
    new, ratio = fit_weight_scale(spec.store.dtype, weights, largest[0], largest[-1])
    columns = [weights, 1 / new, gradients, ratio, new]
    for codec, held, greatest in zip(spec.scaled_codec_by_state.values(), states, largest[1:-1], strict=True):
        columns += [held, 1 / codec.fit_scale(greatest)]
    return get_array_module(present).stack(columns)


def fit_weight_scale(dtype: torch.dtype, present: Any, largest: Any, stored: Any) -> tuple[Any, Any]:
    """Return the new scale of a payload's dtype, and the factor that brings a payload there; 1 for one of zeros.

    The scale stays while the weight lies in the window; else it moves as far as a factor in float32's range can bring
    the payload there and leave it finite. All are float64 arrays or tensors of one shape: the present scale, and the
    largest magnitudes of weight and payload, as float32 holds them.

    >>> ones = np.ones(3)
    >>> fit_weight_scale(torch.float16, ones, np.array([100.0, 40000.0, 0.0]), 0 * ones)[0]
    array([1.000e+00, 4.096e+03, 1.000e+00])
    """
    where = get_array_module(present).where
    lowest, highest, target = PAYLOAD_BINADE_WINDOW_BY_DTYPE[dtype]
    binade = floor_to_power_of_two(largest)
    wanted = (binade * 2.0**-target).clip(2.0**-126, 2.0**126)
    keeps = (largest == 0) | ((binade >= 2.0**lowest * present) & (binade <= 2.0**highest * present))
    reached = present * (2 * floor_to_power_of_two(stored)).clip(1) * 2.0**-LARGEST_PAYLOAD_EXPONENT
    reached = where(wanted > reached, wanted, reached)
    if torch.finfo(dtype).max > 2.0**LARGEST_PAYLOAD_EXPONENT:
        # The payload's own range is wide enough for what a factor in float32's range leaves to do.
        reached = where(reached < 2.0**126 * present, reached, 2.0**126 * present)
    reached = where(stored == 0, wanted, reached.clip(max=2.0**126))
    new = where(keeps | (wanted == present), present, reached)
    return new, where(stored == 0, 1.0, (present / new).clip(2.0**-126))
