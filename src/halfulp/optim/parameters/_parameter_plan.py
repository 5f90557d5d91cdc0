"""The plan of one parameter's step, kept from step to step: its memory, its state tensors, its step specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...formats import Format
from ...kernels import IndexMap
from ..rules._update_rule import UpdateRule
from ..states._state import StateChoice
from ..weight_updates._weight_update import WeightUpdate
from ._local_tensors import get_local, get_payload, get_scaled_parameter_scale, list_payloads
from ._step_spec import StepSpec

# Stand for a version counter in `PayloadVersion`.
UNKNOWN_VERSION, MOVED_VERSION = -1, -2
# Stand for a step number there.
NO_RESET_STEP, WARNED_STEP = -2, -3


@dataclass(slots=True)
class LostUpdateCounts:
    """Counts of one parameter's metered steps."""

    counted_steps: int = 0
    updates: float = 0.0
    cancelled_updates: float = 0.0
    squared_updates: float = 0.0
    update_times_change: float = 0.0
    mostly_lost_steps: int = 0


@dataclass(eq=False, slots=True)
class PayloadVersion:
    """The version of a parameter that its auxiliary tensors were stored beside."""

    # UNKNOWN_VERSION after loading or copying auxiliary tensors, as their payload may be loaded before or after them;
    # MOVED_VERSION after the parameter was given other memory.
    version: int
    memory: torch.Tensor  # the parameter's memory when this was read
    checksums: torch.Tensor | None = None  # of each row of the payload of loaded tensors; None if the file has none
    # The step at which a write from outside last reset them; WARNED_STEP once a second in a row was warned of.
    last_reset_step: int = NO_RESET_STEP


@dataclass(eq=False, slots=True)
class LastingParameterRecord:
    """The lasting data of a parameter, across plans: lost updates and payload version, None before there is any."""

    lost_updates: LostUpdateCounts | None = None
    payload_version: PayloadVersion | None = None

    def add_counted_step(self, updates: float, cancelled: float, squared: float, times_change: float) -> None:
        """Count the updates of one metered step."""
        lost = self.lost_updates = self.lost_updates or LostUpdateCounts()
        lost.counted_steps += 1
        lost.updates, lost.cancelled_updates = lost.updates + updates, lost.cancelled_updates + cancelled
        lost.squared_updates += squared
        lost.update_times_change += times_change
        lost.mostly_lost_steps += cancelled > 0.5 * updates


class PlanOptions(NamedTuple):
    """The options of a group that the plans of its parameters are made from, besides its rule."""

    weight_update: WeightUpdate | None
    state_dtype: StateChoice | tuple[tuple[str, StateChoice], ...]  # the items of a dict
    format: Format | str | None
    param_dtype: torch.dtype | None
    seed: int
    invalidations: int  # how often the cache that holds the plan was cleared before


@dataclass(frozen=True, eq=False, slots=True)
class ParameterPlan:
    """Everything that each step of one parameter needs; `is_plan_valid` tells when it must be rebuilt.

    There may be 100,000 parameters: a plan is one object of few others.
    """

    parameter: torch.Tensor
    options: PlanOptions
    name: str  # qualified if names were given, else its position
    stream_id: int  # keys its random bits
    spec: StepSpec  # unmetered
    index_map: IndexMap
    state: dict[str, Any]  # the parameter's entry in the optimizer's state
    stored_tensors: tuple[torch.Tensor, ...]  # auxiliary tensors, those of the states, then factors, local
    stored_tensor_addresses: list[int]  # when the plan was made, as what follows
    payload_address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool
    component_addresses: tuple[int, ...]  # of an MCTensor's components behind the first
    is_plain_tensor: bool  # neither a DTensor nor a tensor class of this package
    tracks_writes: bool  # there are auxiliary tensors, and a version counter that shows writes to the parameter
    record: LastingParameterRecord

    @property
    def scale(self) -> float:
        """The scale of a scaled parameter; 1 of any other."""
        return get_scaled_parameter_scale(self.parameter).item() if self.spec.scaled else 1.0

    @property
    def auxiliary_tensors(self) -> tuple[torch.Tensor, ...]:
        """The auxiliary tensors beside the parameter, local."""
        return self.stored_tensors[: len(self.spec.auxiliary_names)]

    @property
    def payload_version(self) -> PayloadVersion | None:
        """The version that the auxiliary tensors were stored beside; None where writes are not tracked."""
        return self.record.payload_version if self.tracks_writes else None

    @property
    def payloads(self) -> list[torch.Tensor]:
        """The parameter's own tensors, local."""
        return [part.detach() for part in list_payloads(self.parameter)]

    @property
    def weight_tensors(self) -> list[torch.Tensor]:
        """The parameter's own tensors and its auxiliary tensors, local."""
        return [*self.payloads, *self.auxiliary_tensors]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Auxiliary tensors and state tensors, local, by their names in the optimizer's state."""
        return dict(zip(self.spec.tensor_names, self.stored_tensors))

    @property
    def states(self) -> list[list[torch.Tensor]]:
        """The tensors of each state, local."""
        tensors = self.tensors
        return [[tensors[name] for name in names] for names in self.spec.state_tensor_names]

    @property
    def pointer_row(self) -> list[int]:
        """One row of the pointer table; the gradient's address and what is prepared are filled in at each step."""
        spec, beside = self.spec, len(self.spec.auxiliary_names)
        pointers = self.stored_tensor_addresses[: len(spec.tensor_names) - len(spec.factor_names)]
        weight = [self.payload_address, *self.component_addresses, *pointers[:beside]]
        weight += [0] * (4 - len(weight))
        prepared = [0] * (spec.rule.prepare is not None)
        return [*weight, 0, *pointers[beside:], *prepared]


def is_plan_valid(
    plan: ParameterPlan, parameter: torch.Tensor, rule: UpdateRule, options: PlanOptions, state: dict
) -> bool:
    """Return whether all that a plan was made from is as it was: memory, rule, options, and the optimizer's state."""
    part, spec = parameter if plan.is_plain_tensor else get_payload(parameter), plan.spec
    if not (
        part.data_ptr() == plan.payload_address
        and part.dtype is spec.store.dtype
        and part.shape == plan.shape
        and part.stride() == plan.stride
        and (rule is spec.rule or rule == spec.rule)
        and state is plan.state
        and options == plan.options
    ):
        return False
    if (
        spec.has_components_in_parameter
        and tuple([other.data_ptr() for other in list_payloads(parameter)[1:]]) != plan.component_addresses
    ):
        return False
    for key, tensor, address in zip(spec.tensor_names, plan.stored_tensors, plan.stored_tensor_addresses):
        held = state.get(key)
        if (held is not tensor and get_local(held) is not tensor) or tensor.data_ptr() != address:
            return False
    return True
