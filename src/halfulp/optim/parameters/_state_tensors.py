"""The tensors that a parameter's state holds under a step specification: made, given their first values, refused."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ..._messages import listed
from ..rules._update_rule import StateSlot
from ..states._int8_blocks import scale_shape
from ..states._state import Codec, constant_of
from ._local_tensors import local
from ._parameter_plan import ParameterPlan
from ._saved_states import saved_tensor, saved_value
from ._step_spec import StepSpec

# What the names of a state's tensors end in, over all storages.
STORAGE_SUFFIXES = ("", "_codes", "_packed", "_scale", "_residual")
# How many steps a parameter had made when the states of its rule began, if that was later than the parameter.
BEGUN = "states_begun"


def complete_state(
    state: MutableMapping[str, Any],
    spec: StepSpec,
    group: Mapping,
    parameter: torch.Tensor,
    name: str,
    known: ParameterPlan | None = None,
) -> None:
    """Add the tensors that a parameter's state lacks, and its step number.

    States that all begin after some steps, as where a momentum is switched on, are noted: the rule counts from there.

    Args:
        state: of the parameter.
        spec: its step specification.
        group: its options.
        parameter: as the user holds it.
        name: for messages.
        known: its plan so far. Where the group has another rule since, as under another `amsgrad`, the states that both
            have are stored as this one stores them.

    Raises:
        ValueError: a tensor of another shape or dtype than is needed, or a part of a state without the rest of it.
        TypeError: an initial value that is no number.
    """
    wanted = state_spec(spec, local(parameter).shape) | factor_spec(spec, parameter.shape)
    if known is not None and known.spec.rule is not spec.rule:
        _store_anew(state, known.spec, spec, local(parameter).shape)
    _refuse_other_tensors(state, wanted, name)
    missing = {key: value for key, value in wanted.items() if key not in state}
    if missing:
        _refuse_partial_states(state, spec, name)
        device = local(parameter).device
        new = {key: torch.zeros(shape, dtype=dtype, device=device) for key, (shape, dtype) in missing.items()}
        set_initial(spec, group, new)
        state.update(new)
        of_rule = {key for names in spec.state_tensors for key in names}
        if of_rule and of_rule <= missing.keys() and state.get("step", 0):
            state[BEGUN] = state["step"]
    state.setdefault("step", 0)


def _store_anew(state: MutableMapping[str, Any], before: StepSpec, spec: StepSpec, shape: torch.Size) -> None:
    """Convert the states that two rules share, or that a third has left, to what the second one stores them in."""
    places = {slot.name: place for place, slot in enumerate(before.rule.states)}
    for slot, codec, wanted in zip(spec.rule.states, spec.codecs, spec.state_tensors):
        if slot.name not in places:
            _store_left_state(state, slot, codec, wanted, shape)
            continue
        old, names = before.codecs[places[slot.name]], before.state_tensors[places[slot.name]]
        if old == codec or not state.keys() >= set(names):
            continue
        tensors = [local(state.pop(name)) for name in names]
        new = {
            name: torch.zeros(size, dtype=dtype, device=tensors[0].device)
            for name, (size, dtype) in codec.tensors(slot.name, shape).items()
        }
        codec.encode(list(new.values()), old.decode(tensors).contiguous(), None)
        state.update(new)


def _store_left_state(
    state: MutableMapping[str, Any], slot: StateSlot, codec: Codec, wanted: tuple[str, ...], shape: torch.Size
) -> None:
    """Convert a state that was switched off, perhaps under another storage or in a file of torch.optim's."""
    held = {name: local(state[name]) for s in STORAGE_SUFFIXES if (name := f"{slot.name}{s}") in state}
    given = saved_tensor(held, slot.name)
    new = codec.tensors(slot.name, shape)
    same = held.keys() == set(wanted) and all((t.shape, t.dtype) == new[n] for n, t in held.items() if n in new)
    wanted_shape = scale_shape(shape, 2) if f"{slot.name}_packed" in held else shape
    if same or not isinstance(given, torch.Tensor) or given.shape != wanted_shape:
        return
    made = {name: torch.zeros(size, dtype=dtype, device=given.device) for name, (size, dtype) in new.items()}
    codec.encode(list(made.values()), saved_value(given, state, slot).contiguous(), None)
    for name in held:
        del state[name]
    state.update(made)


def state_spec(spec: StepSpec, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor that a parameter's state holds: auxiliary tensors, then states."""
    auxiliary = () if spec.in_parameter else spec.update.auxiliary_tensors(spec.store)
    wanted = {name: (shape, dtype) for name, dtype in auxiliary}
    for codec, plan in zip(spec.codecs, spec.rule.states):
        wanted |= codec.tensors(plan.name, shape)
    return wanted


def factor_spec(spec: StepSpec, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of the tensors that the rule prepares its steps with, by the whole parameter's shape."""
    shapes = {} if spec.rule.factors is None else spec.rule.factors(tuple(shape))
    return {name: (torch.Size(size), torch.float32) for name, size in shapes.items()}


def set_initial(spec: StepSpec, group: Mapping, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give states the values that they have before the first step.

    Args:
        spec: the step specification.
        group: the options that these values may depend on.
        tensors: the new ones, local and zero; a state is left as it is where one of its tensors is not among them.
    """
    for codec, slot, names in zip(spec.codecs, spec.rule.states, spec.state_tensors):
        value = slot.initial_value(group)
        if value and tensors.keys() >= set(names):
            for name, number in zip(names, constant_of(codec, value)):
                tensors[name].copy_(number.expand(tensors[name].shape))


def _refuse_other_tensors(state: Mapping, wanted: Mapping, name: str) -> None:
    """Refuse states that were made before the parameter was converted or resized.

    Raises:
        ValueError: a state of another shape or dtype than is wanted.
    """
    for key, (shape, dtype) in wanted.items():
        held = local(state[key]) if key in state else None
        if held is not None and held.dim() and held.shape[1:] == shape[1:] and held.dtype == dtype:
            if held.shape != shape:
                kept = ", ".join(repr(other) for other in wanted if other in state)
                raise ValueError(
                    f"state {key!r} of parameter {name} has {held.shape[0]} rows, but {shape[0]} are needed: who adds "
                    f"or removes rows of a parameter does so in all of {kept}; rows of zeros are right for new ones, "
                    "in companions as in moments, beside the kept ones in order"
                )
        elif held is not None and (held.shape != shape or held.dtype != dtype):
            raise ValueError(
                f"state {key!r} of parameter {name} is {held.dtype} of shape {tuple(held.shape)}, but {dtype} of shape "
                f"{tuple(shape)} is needed: convert a model before its optimizer is made, or make a new optimizer"
            )


def _refuse_partial_states(state: Mapping, spec: StepSpec, name: str) -> None:
    """Refuse a state some of whose tensors are missing: those that are there mean nothing, or something else, alone.

    Raises:
        ValueError: one was deleted, or `state_dtype` was changed in the group.
    """
    for slot, names in zip(spec.rule.states, spec.state_tensors):
        missing = [key for key in names if key not in state]
        forms = {*names, *(f"{slot.name}{suffix}" for suffix in STORAGE_SUFFIXES)}
        held = sorted(key for key in forms & state.keys() if key in names or key not in spec.tensors)
        if missing and held:
            raise ValueError(
                f"state {slot.name!r} of parameter {name} lacks {listed(missing)} beside {listed(held)}: put back what "
                f"is missing, or delete {listed(held)} too, and it begins anew; to store it in another way, give "
                "state_dtype= to a new optimizer and load this one's state_dict there"
            )
