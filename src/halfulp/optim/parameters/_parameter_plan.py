"""The plan of one parameter's step, kept from step to step: its memory, its state tensors, its step specification."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import IndexMap
from ..rules._update_rule import UpdateRule
from ..states._state import constant_of
from ..step._spec import StepSpec
from ._local_tensors import local, memory, own_parts, scale_of

SMALL = 1024
# Stand for a version counter in `PayloadVersion`.
ANY, MOVED = -1, -2
# Stands for the tensors of a step between steps.
NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(slots=True)
class LostUpdates:
    """Counts of one parameter's metered steps."""

    samples: int = 0
    seen: float = 0.0
    cancelled: float = 0.0
    wanted: float = 0.0
    kept: float = 0.0
    mostly_lost: int = 0

    def add(self, seen: float, cancelled: float, wanted: float, kept: float) -> None:
        """Count one metered step."""
        self.samples += 1
        self.seen, self.cancelled = self.seen + seen, self.cancelled + cancelled
        self.wanted, self.kept = self.wanted + wanted, self.kept + kept
        self.mostly_lost += cancelled > 0.5 * seen


@dataclass(eq=False, slots=True)
class PayloadVersion:
    """The version of a parameter that its auxiliary tensors were stored beside.

    Attributes:
        version: the parameter's version counter at that time. ANY after loading or copying auxiliary tensors, as their
            payload may be loaded before or after them; MOVED after the parameter was given other memory.
        memory: the parameter's memory at that time; it still holds the payload if the parameter was given other memory.
        payload: a copy of the payload, if one is kept.
        steps: how many more steps the copy is kept for.
        scale: a scaled parameter's scale, in whose units its auxiliary tensors are.
        checksums: of each row of the payload that loaded auxiliary tensors belong to; None if the file has none.
    """

    version: int
    memory: torch.Tensor
    payload: torch.Tensor | None = None
    steps: int = 0
    scale: float = 1.0
    checksums: torch.Tensor | None = None


@dataclass(eq=False, slots=True)
class ParameterPlan:
    """What steps of one parameter need; few objects, as there may be 100,000 parameters.

    Attributes:
        reference: weak, to the user's parameter: a plan keeps neither the parameter nor its memory alive.
        options: the options of its group that its step specification and random bits depend on.
        name: qualified if names were given, else its position.
        identity: the number that keys its random bits.
        spec: the step specification, unmetered.
        index_map: where the local elements stand in the whole parameter.
        state: the parameter's entry in the optimizer's state.
        stored: its auxiliary tensors, then the tensors of its states, local.
        stored_addresses: their addresses when the plan was made.
        is_small: whether comparing all these addresses would cost more than stepping the elements.
        address, shape, stride, contiguous: of the local parameter when the plan was made.
        component_addresses: of the components behind the first, if the parameter is an MCTensor.
        plain: neither a DTensor nor a tensor class of this package.
        lost: the counts of lost updates, None before the first metered step.
        payload_version: the version that the auxiliary tensors were stored beside, None if there are none.
        stepping, gradient, gradient_scale, step, constants, copied: the input of the running step. `stepping` is the
            tensor whose version counter it increments, `copied` are contiguous copies of the parameter's tensors
            if these are not contiguous; their values are copied back after the step.
    """

    reference: weakref.ref
    options: tuple
    name: str
    identity: int
    spec: StepSpec
    index_map: IndexMap
    state: dict[str, Any]
    stored: tuple[torch.Tensor, ...]
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    component_addresses: tuple[int, ...]
    plain: bool
    lost: LostUpdates | None = None
    payload_version: PayloadVersion | None = None
    stepping: torch.Tensor = NOTHING
    gradient: torch.Tensor = NOTHING
    gradient_scale: float = 1.0
    step: int = 0
    constants: tuple[float, ...] = ()
    copied: tuple[torch.Tensor, ...] | None = None
    stored_addresses: Sequence[int] = ()
    is_small: bool = False

    def __post_init__(self) -> None:
        """Derive what follows from the stored tensors."""
        self.stored_addresses = [tensor.data_ptr() for tensor in self.stored]
        self.is_small = bool(self.stored) and math.prod(self.shape) < SMALL

    @property
    def parameter(self) -> torch.Tensor:
        """The user's parameter."""
        parameter = self.reference()
        assert parameter is not None, "a plan is used only while its parameter lives"
        if hasattr(parameter, "_fix_weakref"):
            parameter._fix_weakref()
        return parameter

    @property
    def scale(self) -> float:
        """The scale of a scaled parameter; 1 of any other."""
        return scale_of(self.parameter).item() if self.spec.scaled else 1.0

    @property
    def seed(self) -> int:
        """The seed of the random bits."""
        return self.options[3]

    @property
    def auxiliary_tensors(self) -> tuple[torch.Tensor, ...]:
        """The auxiliary tensors beside the parameter, local."""
        return self.stored[: len(self.spec.auxiliary_names)]

    @property
    def tracks_writes(self) -> bool:
        """Whether there are auxiliary tensors, and a version counter that shows writes to the parameter."""
        return bool(self.spec.auxiliary_names) and not self.parameter.is_inference()

    @property
    def payloads(self) -> list[torch.Tensor]:
        """The parameter's own tensors, local."""
        return [part.detach() for part in own_parts(self.parameter)]

    @property
    def parts(self) -> list[torch.Tensor]:
        """The parameter's own tensors and its auxiliary tensors, local."""
        return [*self.payloads, *self.auxiliary_tensors]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Auxiliary tensors and state tensors, local, by their names in the optimizer's state."""
        return dict(zip(self.spec.tensors, self.stored))

    @property
    def watched(self) -> list[torch.Tensor]:
        """The copy of the payload that is kept for some steps after a write from outside."""
        version = self.payload_version
        return [] if version is None or version.payload is None else [version.payload]

    @property
    def states(self) -> list[list[torch.Tensor]]:
        """The tensors of each state, local."""
        tensors = self.tensors
        return [[tensors[name] for name in names] for names in self.spec.state_tensors]

    @property
    def addresses(self) -> list[int]:
        """One row of the pointer table; the gradient's address is filled in at each step."""
        pointers, beside = self.stored_addresses, len(self.spec.auxiliary_names)
        weight = [self.address, *self.component_addresses, *pointers[:beside]]
        weight += [0] * (4 - len(weight))
        return [*weight, 0, *pointers[beside:]]

    def count(self, seen: float, cancelled: float, wanted: float, kept: float) -> None:
        """Count the updates of one metered step."""
        if self.lost is None:
            self.lost = LostUpdates()
        self.lost.add(seen, cancelled, wanted, kept)


def options_of(group: Mapping) -> tuple:
    """Return the options of a group that plans of its parameters depend on, besides the rule."""
    return group["weight_update"], group["state_dtype"], group["format"], group["seed"]


def is_valid(plan: ParameterPlan, parameter: torch.Tensor, rule: UpdateRule, options: tuple, state: dict) -> bool:
    """Return whether a plan still matches the parameter: its memory, its group's options, its state."""
    part, spec = parameter if plan.plain else memory(parameter), plan.spec
    if not (
        part.data_ptr() == plan.address
        and part.dtype is spec.store.dtype
        and part.shape == plan.shape
        and part.stride() == plan.stride
        and rule is spec.rule
        and state is plan.state
        and options == plan.options
    ):
        return False
    if (
        spec.in_parameter
        and tuple([other.data_ptr() for other in own_parts(parameter)[1:]]) != plan.component_addresses
    ):
        return False
    stored, addresses = plan.stored, plan.stored_addresses
    for key, tensor in zip(spec.tensors, stored):
        kept = state.get(key)
        if kept is not tensor and local(kept) is not tensor:
            return False
    if plan.is_small:  # each step compares the address of one stored tensor, in turn
        turn = plan.step % len(stored)
        return stored[turn].data_ptr() == addresses[turn]
    return [tensor.data_ptr() for tensor in stored] == addresses


def can_step(
    plan: ParameterPlan, parameter: torch.Tensor, gradient: torch.Tensor, rule: UpdateRule, options: tuple, state: dict
) -> bool:
    """Return whether a plan still matches the parameter and fits a gradient."""
    fits = gradient.dtype is plan.spec.gradient.dtype and gradient.layout is torch.strided
    return fits and is_valid(plan, parameter, rule, options, state)


def refuse_other_states(state: Mapping, wanted: Mapping, name: str) -> None:
    """Refuse states that were made before the parameter was converted or resized.

    Raises:
        ValueError: a state of another shape or dtype than is wanted.
    """
    for key, (shape, dtype) in wanted.items():
        held = local(state[key]) if key in state else None
        if held is not None and (held.shape != shape or held.dtype != dtype):
            raise ValueError(
                f"state {key!r} of parameter {name} is {held.dtype} of shape {tuple(held.shape)}, but {dtype} of shape "
                f"{tuple(shape)} is needed: convert a model before its optimizer is made, or make a new optimizer"
            )


def refuse_other_dtype(parameter: torch.Tensor, spec: StepSpec, name: str) -> None:
    """Refuse a parameter that was put into a group, or converted, behind the optimizer's back.

    Raises:
        ValueError: it does not have the dtype of its group's parameters.
    """
    if memory(parameter).dtype != spec.store.dtype:
        raise ValueError(
            f"parameter {name} is {memory(parameter).dtype}, but its group holds {spec.store.dtype}: add parameters by "
            "add_param_group, which narrows them, and do not convert a model after its optimizer is made"
        )


def allocate(tensors: dict, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return zeros for each (local shape, dtype), on the parameter's device."""
    device = local(parameter).device
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in tensors.items()}


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


def state_spec(spec: StepSpec, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor that a parameter's state holds: auxiliary tensors, then states."""
    auxiliary = () if spec.in_parameter else spec.update.auxiliary_tensors(spec.store)
    wanted = {name: (shape, dtype) for name, dtype in auxiliary}
    for codec, plan in zip(spec.codecs, spec.rule.states):
        wanted |= codec.tensors(plan.name, shape)
    return wanted
