"""The tensors of a parameter's state: made, given their first values, and refused."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ..._messages import quote
from .._storage import STORE_BY_DTYPE
from ..states._int8_blocks import CODEC_VERSION
from ..states._state import encode_constant_state
from ..weight_updates._weight_update import WEIGHT_UPDATE_BY_NAME
from ._local_tensors import get_local
from ._step_spec import StepSpec

# What the names of a state's tensors end in, over all storages.
STATE_NAME_SUFFIXES = ("", "_codes", "_packed", "_scale", "_residual")
# How many steps a parameter had made when the states of its rule began, if that was later than the parameter.
STEPS_BEFORE_STATES_KEY = "states_begun"


def add_missing_state_tensors(
    state: MutableMapping[str, Any], spec: StepSpec, group: Mapping, parameter: torch.Tensor, name: str
) -> None:
    """Add the tensors that a parameter's state lacks, and its step number."""
    held = ("step", STEPS_BEFORE_STATES_KEY, *spec.tensor_names)
    if twice := sorted({key for key in held if held.count(key) > 1}):
        raise ValueError(
            f"rule {spec.rule.name!r} under weight update {spec.update.name!r} has {quote(twice)} twice among what the "
            f"state of parameter {name} holds: give each state, factor and auxiliary tensor a name of its own"
        )
    shape = get_local(parameter).shape
    auxiliary = () if spec.has_components_in_parameter else spec.update.describe_auxiliary_tensors(spec.store)
    wanted = {key: (shape, dtype) for key, dtype in auxiliary}
    for codec, slot in zip(spec.codecs, spec.rule.states):
        wanted |= codec.describe_tensors(slot.name, shape)
    factors = {} if spec.rule.factors is None else spec.rule.factors(tuple(parameter.shape))
    wanted |= {key: (torch.Size(size), torch.float32) for key, size in factors.items()}
    _refuse_mismatched_tensors(state, wanted, name)
    missing = {key: value for key, value in wanted.items() if key not in state}
    if missing:
        _refuse_partial_states(state, spec, name)
        device = get_local(parameter).device
        new = {key: torch.zeros(shape, dtype=dtype, device=device) for key, (shape, dtype) in missing.items()}
        set_initial_state_values(spec, group, new)
        state.update(new)
        # States that all begin after some steps, as where a momentum is switched on: the rule counts from there.
        of_rule = {key for names in spec.state_tensor_names for key in names}
        if of_rule and of_rule <= missing.keys() and state.get("step", 0):
            state[STEPS_BEFORE_STATES_KEY] = state["step"]
    state.setdefault("step", 0)


def is_auxiliary_tensor_name(name: str) -> bool:
    """Return whether an entry of a saved state is an auxiliary tensor of a weight update."""
    updates, stores = WEIGHT_UPDATE_BY_NAME.values(), STORE_BY_DTYPE.values()
    auxiliary = {key for update in updates for store in stores for key, _ in update.describe_auxiliary_tensors(store)}
    return name in auxiliary or name.startswith("component_")


def set_initial_state_values(spec: StepSpec, group: Mapping, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give states the values that they have before the first step, where all of their new `tensors` are given."""
    for codec, slot, names in zip(spec.codecs, spec.rule.states, spec.state_tensor_names):
        value = slot.initial_value(group)
        if value and tensors.keys() >= set(names):
            for name, number in zip(names, encode_constant_state(codec, value)):
                tensors[name].copy_(number.expand(tensors[name].shape))


def refuse_changed_weight_update(state: Mapping, before: StepSpec | None, spec: StepSpec, name: str) -> None:
    """Refuse to step under another weight update than the one whose auxiliary tensors a state holds."""
    # A copy of an optimizer has no step specification `before`, but it has the tensors.
    left = [] if before is None or before.update == spec.update else sorted(before.auxiliary_names)
    left += [
        key for key in state.keys() - set(spec.tensor_names) - {"step", *left} if is_auxiliary_tensor_name(str(key))
    ]
    if left:
        raise ValueError(
            f"weight_update={spec.update.name!r}, but the state of parameter {name} holds {quote(left)} of another: "
            "put the group's weight_update and the parameter's dtype back; to go on under another, take the weights by "
            "float32_state_dict then, and give them to a new optimizer by load_float32_state_dict"
        )


def _refuse_mismatched_tensors(state: Mapping, wanted: Mapping, name: str) -> None:
    """Refuse states that were made before the parameter was converted or resized."""
    for key, (shape, dtype) in wanted.items():
        held = get_local(state[key]) if key in state else None
        if held is not None and (held.shape != shape or held.dtype != dtype):
            kept = ", ".join(repr(other) for other in wanted if other in state)
            raise ValueError(
                f"state {key!r} of parameter {name} is {held.dtype} of shape {tuple(held.shape)}, but {dtype} of shape "
                f"{tuple(shape)} is needed: convert a model before its optimizer is made, and choose amsgrad and its "
                f"like then; who adds or removes rows of a parameter does so in all of {kept}, zeros for new ones"
            )


def _refuse_partial_states(state: Mapping, spec: StepSpec, name: str) -> None:
    """Refuse a state some of whose tensors are missing: those that are there mean nothing, or something else, alone."""
    for slot, names in zip(spec.rule.states, spec.state_tensor_names):
        missing = [key for key in names if key not in state]
        forms = {*names, *(f"{slot.name}{suffix}" for suffix in STATE_NAME_SUFFIXES)}
        held = sorted(key for key in forms & state.keys() if key in names or key not in spec.tensor_names)
        if missing and held:
            raise ValueError(
                f"state {slot.name!r} of parameter {name} lacks {quote(missing)} beside {quote(held)}: put back what "
                f"is missing, or delete {quote(held)} too, and it begins anew; to store it in another way, give "
                "state_dtype= to a new optimizer and load this one's state_dict there"
            )


def check_codec_version(name: str, state: Mapping[str, object]) -> None:
    """Raise ValueError for codes of another version than this one."""
    version = state.get(name)
    if f"{name}_codes" in state and version not in (None, CODEC_VERSION):
        raise ValueError(
            f"saved state {name!r} has 8-bit codes of version {version!r}, known is {CODEC_VERSION}: load it with the "
            "halfulp that saved it, into an optimizer with state_dtype=torch.float32, and save that"
        )
