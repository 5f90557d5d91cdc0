"""The optimizer's cache: plans, the step specifications that they share, and the roster of the last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..parameters._local_tensors import local, memory
from ..parameters._narrowing import is_kept
from ..parameters._outside_writes import SavedPayload, payload_version_of
from ..parameters._parameter_plan import ParameterPlan, ParameterRecord, PlanOptions, stored_choice
from ..parameters._step_spec import StepSpec, step_spec_of
from ..parameters._tensor_map import TensorMap
from ..rules._update_rule import UpdateRule
from ..stores._storage import Store
from ._memory import check_memory
from ._roster import Roster


class PlanCache(TensorMap[ParameterPlan]):
    """All that an optimizer derives from its parameters, groups and states, and can derive again.

    It maps each parameter to its plan. One rule says what is out of date: a plan, as soon as `is_valid` finds that
    something it was made from has changed. Whoever uses plans asks that first and replaces the plan by `renew`.
    Nothing else has a rule of its own:

    - The roster of the last step stands only for the plans of its parameters, so that a plan which is replaced takes
      its tables with it.
    - A step specification is a value and never out of date; equal ones are one object, because the parameters of one
      object step in one call.
    - A parameter's record of lost updates and of its payload is no part of a plan, and goes on with the next one.

    `clear` is the only way to make plans invalid by hand. It is for changes that no plan shows, such as of the names
    that key the random bits when a state_dict is loaded; copies of an optimizer begin with an empty cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generation = 0
        self._specs: dict[tuple[StepSpec, torch.device], StepSpec] = {}
        # What the keys refer to by id is kept alive by the values.
        self._specs_by_options: dict[tuple, tuple[StepSpec, tuple]] = {}
        self.roster: Roster | None = None

    def clear(self) -> None:
        """Make every plan invalid."""
        self._generation += 1
        self.roster = None

    def options_of(self, group: Mapping[str, Any]) -> PlanOptions:
        """Return the options of a group, for `is_valid` and `renew`."""
        return PlanOptions.of(group, self._generation)

    def renew(
        self,
        parameter: torch.Tensor,
        spec: StepSpec,
        state: dict[str, Any],
        options: PlanOptions,
        name: str,
        identity: int,
        saved: SavedPayload | None,
        gradient: torch.Tensor | None = None,
    ) -> ParameterPlan:
        """Make a parameter's plan, in place of the one that is not valid any more.

        Args:
            parameter: as the user holds it.
            spec: its step specification.
            state: its entry in the optimizer's state, which holds all tensors of the specification.
            options: of its group.
            name: of the parameter, for messages.
            identity: that keys its random bits.
            saved: of the payload that the auxiliary tensors belong to, if these are a copy without a plan so far.
            gradient: with which it is to be stepped, if it is.

        Raises:
            TypeError, ValueError: memory that a step cannot use, as `check_memory` says; the plan is not kept.
        """
        known = self.get(parameter)
        record = ParameterRecord() if known is None else known.record
        plan = ParameterPlan.of(parameter, self.reference(parameter), spec, state, options, name, identity, record)
        if gradient is not None:
            check_memory(plan, gradient)
        if plan.tracks_writes:
            record.payload_version = payload_version_of(parameter, memory(parameter), record.payload_version, saved)
        self[parameter] = plan
        return plan

    def step_spec(
        self, rule: UpdateRule, group: Mapping[str, Any], parameter: torch.Tensor, gradient: Store | None, name: str
    ) -> StepSpec:
        """Return a parameter's step specification, as `step_spec_of` does; equal ones on one device are one object."""
        if memory(parameter) is not parameter:
            return self._interned(step_spec_of(rule, group, parameter, gradient, name), parameter)
        given = rule, group["weight_update"], group["format"], group["param_dtype"], gradient
        states = stored_choice(group["state_dtype"])
        key = *map(id, given), states, is_kept(parameter), parameter.dtype, parameter.shape, parameter.device
        found = self._specs_by_options.get(key)
        if found is None:
            spec = self._interned(step_spec_of(rule, group, parameter, gradient, name), parameter)
            found = self._specs_by_options[key] = spec, given
        return found[0]

    def _interned(self, spec: StepSpec, parameter: torch.Tensor) -> StepSpec:
        return self._specs.setdefault((spec, local(parameter).device), spec)
