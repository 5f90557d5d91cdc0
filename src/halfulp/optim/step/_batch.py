"""The parameters of a step in batches: their plans, kept from step to step, and what belongs to one step alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ..._torch_versions import TensorGuards
from ...kernels import has_strided_values, make_chunk_table, overlaps_itself, to_plain_memory
from ...kernels._plain_memory import raise_no_plain_memory
from ...kernels.vector._machine_function import get_array_address
from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from .._storage import PAYLOAD_STORE_BY_DTYPE, STORE_BY_DTYPE, Store
from ..parameters._local_tensors import find_index_map, get_local, get_payload, list_payloads
from ..parameters._narrowing import is_marked_to_stay_float32
from ..parameters._outside_writes import carry_payload_version, record_payload_version, reset_stale_auxiliary_tensors
from ..parameters._parameter_plan import LastingParameterRecord, ParameterPlan, PayloadVersion, PlanOptions
from ..parameters._state_tensors import STEPS_BEFORE_STATES_KEY
from ..parameters._step_spec import StepSpec, choose_step_spec
from ..rules._update_rule import UpdateRule

if TYPE_CHECKING:
    from ...kernels.triton._launch import DeviceChunks


class BatchTable:
    """The parameters of a batch and the tables of its kernel, one row per plan, rebuilt only if a plan changes."""

    def __init__(self, plans: list[ParameterPlan]) -> None:
        self.plans = plans
        self.parameter_positions: list[int] = []  # of the parameters among those of all groups
        self.group_row_ranges: list[tuple[int, int, int]] = []  # the number of a group, and its first and last row
        self.chunks = make_chunk_table([plan.index_map for plan in plans])  # int64 (chunks, 4)
        # int64 (parameters, pointers); the gradients' column is written at each step.
        self.pointers = np.array([plan.pointer_row for plan in plans], np.int64)
        self.stream_ids = np.array([[plan.stream_id] for plan in plans], np.uint64)
        seeds = [plan.options.seed for plan in plans]
        self.seeds: int | np.ndarray = seeds[0] if len({*seeds}) == 1 else np.array(seeds, np.uint64)[:, None]
        # uint64 (parameters, 1), or (parameters, 0) without draws, written at each step.
        self.random_keys = np.zeros((len(plans), int(plans[0].spec.draws_random_bits)), np.uint64)
        # The row of the constants of each parameter where all have the same.
        self.constant_rows = np.zeros(len(plans), np.int64)
        self.table_addresses = [
            *map(get_array_address, (self.chunks, self.pointers, self.constant_rows, self.random_keys))
        ]
        self.state_entries = [plan.state for plan in plans]
        # Of the tensors in these entries: their name, those of all parameters, and their addresses.
        self.state_tensor_columns = [
            (name, [plan.stored_tensors[k] for plan in plans], [plan.stored_tensor_addresses[k] for plan in plans])
            for k, name in enumerate(plans[0].spec.tensor_names)
        ]
        self.has_states_begun_later = any(STEPS_BEFORE_STATES_KEY in plan.state for plan in plans)
        self.write_tracking_records = [plan.record for plan in plans if plan.tracks_writes]
        self.parameter_addresses = [plan.payload_address for plan in plans]
        self.noncontiguous_rows = [row for row, plan in enumerate(plans) if not plan.is_contiguous]
        self.has_only_plain_tensors = all(plan.is_plain_tensor for plan in plans)
        # The checks of the parameters and of their gradients; None where these are looked at one by one.
        self.tensor_guards: tuple[TensorGuards, TensorGuards] | None = None
        self.chunks_on_device: DeviceChunks | None = None  # on an accelerator

    def select_values_of_batch(self, values: list[Any]) -> list[Any]:
        """Return the values of the batch's parameters, given those of all."""
        places = self.parameter_positions
        return values if len(places) == len(values) else [values[place] for place in places]

    def is_valid_for(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
        """Return whether all plans are valid for the parameters of a step, and their gradients plain memory.

        It is `is_plan_valid` of every plan, column by column, but for what `CachedBatchTables` asks once for all. A no
        says nothing: tensor classes and memory with gaps are looked at one by one.
        """
        return (
            self.tensor_guards is not None
            and self.tensor_guards[0].check(*parameters)
            and self.tensor_guards[1].check(*gradients)
            and [*map(torch.Tensor.data_ptr, parameters)] == self.parameter_addresses
            and all(self._has_same_state_tensors(*column) for column in self.state_tensor_columns)
        )

    def renew_tensor_guards(self, gradients: list[torch.Tensor]) -> None:
        """Make the checks of class, dtype, shape, strides, sign bit and mode (autocast) anew, unless they pass."""
        parameters, plans = [plan.parameter for plan in self.plans], self.plans
        if (
            TensorGuards is None
            or not self.has_only_plain_tensors
            or self.noncontiguous_rows
            or {*map(type, gradients)} != {torch.Tensor}
        ):
            self.tensor_guards = None
        elif self.tensor_guards is None or not (
            self.tensor_guards[0].check(*parameters) and self.tensor_guards[1].check(*gradients)
        ):
            sizes = [[*plan.shape] for plan in plans]
            # The stride along a dimension of one element says nothing.
            strides = [[step if n > 1 else None for n, step in zip(plan.shape, plan.stride)] for plan in plans]
            own, given = (
                TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
                for tensors in (parameters, gradients)
            )
            self.tensor_guards = own, given

    def _has_same_state_tensors(self, name: str, held: list[torch.Tensor], addresses: list[int]) -> bool:
        """Return whether the optimizer's state has the tensors of a column where they were."""
        try:
            now = [entry[name] for entry in self.state_entries]
        except KeyError:
            return False
        return all(map(is_, now, held)) and [*map(torch.Tensor.data_ptr, held)] == addresses


@dataclass(eq=False, slots=True)
class Batch:
    """The input of a running step for the parameters of one step specification; it lives as long as the step.

    Columns instead of one object per parameter, of which there may be 100,000.
    """

    spec: StepSpec  # of this step, metered or not
    table: BatchTable
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]  # their memory, without gaps
    gradient_scales: list[float | torch.Tensor]  # 1 or a scaled gradient's scale, wherever that lies
    step_numbers: list[int]
    constants: list[tuple[float, ...]]  # the rule's; equal ones of one group are one object
    groups_and_steps: list[tuple[Mapping[str, Any], int]]  # groups, and steps that the rule counts, where it is late
    prepared_tensors: list[torch.Tensor] = field(default_factory=list)  # by row, of a rule's `prepare`
    # By row, copies without gaps of a parameter's own tensors, which the step writes and `record_step` copies back.
    contiguous_copies: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    payload_versions: list[PayloadVersion] = field(default_factory=list)  # of those whose writes are tracked
    engine: str = ""

    def __post_init__(self) -> None:
        records = self.table.write_tracking_records
        self.payload_versions = [held for record in records if (held := record.payload_version) is not None]
        for row in self.table.noncontiguous_rows:
            parts = list_payloads(self.parameters[row])
            self.contiguous_copies[row] = tuple(to_plain_memory(part.detach()).contiguous() for part in parts)

    @property
    def plans(self) -> list[ParameterPlan]:
        """The plans of the parameters."""
        return self.table.plans

    @property
    def device(self) -> torch.device:
        """The device of the gradients and the parameters."""
        return self.gradients[0].device

    def list_step_tensors(self, row: int) -> tuple[list[torch.Tensor], torch.Tensor, list[list[torch.Tensor]]]:
        """Return the tensors of a parameter's weight without gaps, its gradient, its states and what is prepared."""
        plan = self.plans[row]
        weight = (
            [*self.contiguous_copies[row], *plan.auxiliary_tensors]
            if row in self.contiguous_copies
            else plan.weight_tensors
        )
        return weight, self.gradients[row], [*plan.states, *([one] for one in self.prepared_tensors[row : row + 1])]

    def reset_stale_auxiliary_tensors(self) -> None:
        """Reset the auxiliary tensors of parameters that were written from outside."""
        recorded, parameters = self.payload_versions, self.parameters
        versions = [held.version for held in recorded]
        if len(versions) == len(parameters) and versions == [parameter._version for parameter in parameters]:
            return
        for plan, parameter in zip(self.plans, parameters) if recorded else ():
            held = plan.payload_version
            if held is not None and held.version != parameter._version:
                reset_stale_auxiliary_tensors(plan)

    def complete_step(self) -> None:
        """Record a step that has been written."""
        stepped = self.parameters
        if not self.table.has_only_plain_tensors and not self.spec.scaled:
            stepped = [get_local(parameter) for parameter in stepped]
        torch.autograd.graph.increment_version(stepped)
        for row, copies in self.contiguous_copies.items():
            for part, copy in zip(self.plans[row].payloads, copies, strict=True):
                part.copy_(copy)
        for entry, step in zip(self.table.state_entries, self.step_numbers):
            entry["step"] = step
        # Auxiliary tensors belong to the present payloads.
        if len(self.payload_versions) == len(self.parameters):
            for held, parameter in zip(self.payload_versions, self.parameters):
                held.version = parameter._version
        elif self.payload_versions:
            self.record_payload_versions_again()

    def record_payload_versions_again(self) -> None:
        """Record the versions again, once all batches are written: parameters cut from one tensor share a counter."""
        for plan in self.plans:
            record_payload_version(plan)


# Of one group: its rule, plan options, report interval and number of parameters.
GroupSetting = tuple[UpdateRule, Any, int, int]


class CachedBatchTables:
    """The parameters that step together, batch by batch, which the next step takes over while nothing has changed."""

    def __init__(
        self,
        settings: list[GroupSetting],
        plans: list[ParameterPlan | None],
        idle_positions: list[int],
        places: Sequence[list[int]],
        state: Mapping[Any, Any],
        before: CachedBatchTables | None,
    ) -> None:
        """Make the batches of parameters by their `places`; the tables `before` stay where their plans do."""
        self.settings, self.plans, self.idle_positions = settings, plans, idle_positions
        self.state_entries = [*state.values()]
        self.tables: list[BatchTable] = []
        group_of = [number for number, setting in enumerate(settings) for _ in range(setting[-1])]
        known = {} if before is None else {table.plans[0]: table for table in before.tables}
        for chosen in places:
            own = [plan for plan in map(plans.__getitem__, chosen) if plan is not None]
            table = known.get(own[0])
            if table is None or table.plans != own:
                table = BatchTable(own)
            groups = [group_of[place] for place in chosen]
            cuts = [0, *(k for k in range(1, len(groups)) if groups[k] != groups[k - 1]), len(groups)]
            table.parameter_positions = chosen
            table.group_row_ranges = [(groups[first], first, last) for first, last in itertools.pairwise(cuts)]
            self.tables.append(table)

    def is_valid_for(
        self,
        settings: list[GroupSetting],
        plans: list[ParameterPlan | None],
        idle_positions: list[int],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
        state: Mapping[Any, Any],
    ) -> bool:
        """Return whether a step has the same parameters with gradients, under plans that are all valid."""
        if not (
            settings == self.settings
            and plans == self.plans
            and idle_positions == self.idle_positions
            and len(state) == len(self.state_entries)
            and all(map(is_, state.values(), self.state_entries))
        ):
            return False
        return all(
            table.is_valid_for(table.select_values_of_batch(parameters), table.select_values_of_batch(gradients))
            for table in self.tables
        )

    def make_batches(
        self,
        groups: list[dict[str, Any]],
        parameters: list[torch.Tensor],
        gradients: list[Any],
        scales: dict[int, torch.Tensor],
    ) -> list[Batch] | None:
        """Return the batches of a step; None if some of a batch's parameters are metered in this step and others not.

        Auxiliary tensors are reset where their parameters were written from outside. `scales` are those of scaled
        gradients, by place.
        """
        found = []
        for table in self.tables:
            constants: list[tuple[float, ...]] = []
            counted: list[tuple[Mapping[str, Any], int]] = []
            steps: list[int] = [entry["step"] + 1 for entry in table.state_entries]
            metered = set()
            for number, first, last in table.group_row_ranges:
                rule, _, interval, _ = self.settings[number]
                own = steps[first:last]
                ages = own
                if table.has_states_begun_later:
                    ages = [
                        step - entry.get(STEPS_BEFORE_STATES_KEY, 0)
                        for step, entry in zip(own, table.state_entries[first:last])
                    ]
                made = {age: tuple(rule.values(groups[number], age)) for age in {*ages}}
                for one in () if rule.has_data_dependent_constants else made.values():
                    if len(one) != len(rule.constants):
                        rule.refuse_constant_count(one)
                constants += [*made.values()] * len(ages) if len(made) == 1 else [made[age] for age in ages]
                if rule.has_data_dependent_constants:
                    counted += [(groups[number], age) for age in ages]
                metered |= {bool(interval) and step % interval == 0 for step in {*own}}
            if len(metered) > 1:
                return None
            spec = table.plans[0].spec
            found.append(
                Batch(
                    spec.lost_update_counting_spec if metered.pop() else spec,
                    table,
                    table.select_values_of_batch(parameters),
                    table.select_values_of_batch(gradients),
                    [scales.get(place, 1.0) for place in table.parameter_positions] if scales else [1.0] * len(steps),
                    steps,
                    constants,
                    counted,
                )
            )
        for batch in found:
            batch.reset_stale_auxiliary_tensors()
        return found


class PlanCache:
    """All that an optimizer derives from its parameters, groups and states, and can derive again.

    A plan is out of date as soon as `is_plan_valid` finds that something it was made from has changed: whoever uses
    plans asks that first, and replaces the plan by `renew_plan`. `invalidate_all` is for changes that no plan shows,
    such as of the names that key the random bits when a state_dict is loaded. Copies of an optimizer begin with an
    empty cache.
    """

    def __init__(self) -> None:
        self.plan_by_parameter_id: dict[int, ParameterPlan] = {}  # for loops that cannot pay for a method call
        self._invalidations = 0
        # Equal specifications are one object, because the parameters of one object step in one call.
        self._shared_specs: dict[tuple[StepSpec, torch.device], StepSpec] = {}
        # What the keys refer to by id is kept alive by the values.
        self._shared_spec_by_options: dict[tuple, tuple[StepSpec, tuple]] = {}
        self.batch_tables: CachedBatchTables | None = None

    def get(self, parameter: torch.Tensor) -> ParameterPlan | None:
        """Return a parameter's plan, valid or not; None where there is none."""
        return self.plan_by_parameter_id.get(id(parameter))

    def __getitem__(self, parameter: torch.Tensor) -> ParameterPlan:
        """Return a parameter's plan; raises KeyError where there is none."""
        return self.plan_by_parameter_id[id(parameter)]

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has a plan."""
        return id(parameter) in self.plan_by_parameter_id

    def pop(self, parameter: torch.Tensor) -> None:
        """Drop a parameter's plan."""
        self.plan_by_parameter_id.pop(id(parameter), None)

    def values(self) -> Iterable[ParameterPlan]:
        """Return all plans."""
        return self.plan_by_parameter_id.values()

    def invalidate_all(self) -> None:
        """Make every plan invalid."""
        self._invalidations += 1
        self.batch_tables = None

    def read_plan_options(self, group: Mapping[str, Any]) -> PlanOptions:
        """Return the options of a group, for `is_plan_valid` and `renew_plan`."""
        given = group["state_dtype"]
        states = tuple(given.items()) if isinstance(given, Mapping) else given  # which may change inside
        return PlanOptions(
            group["weight_update"], states, group["format"], group["param_dtype"], group["seed"], self._invalidations
        )

    def renew_plan(
        self,
        parameter: torch.Tensor,
        spec: StepSpec,
        state: dict[str, Any],
        options: PlanOptions,
        name: str,
        stream_id: int,
        gradient: torch.Tensor | None,
    ) -> ParameterPlan:
        """Make a parameter's plan, in place of the one that is not valid any more."""
        known, part, index_map = self.get(parameter), get_payload(parameter), find_index_map(parameter)
        stored = tuple(get_local(state[key]) for key in spec.tensor_names)
        plan = ParameterPlan(
            parameter=parameter,
            options=options,
            name=name,
            stream_id=stream_id,
            spec=spec,
            index_map=index_map,
            state=state,
            stored_tensors=stored,
            stored_tensor_addresses=[tensor.data_ptr() for tensor in stored],
            payload_address=part.data_ptr(),
            shape=index_map.shape,
            stride=part.stride(),
            is_contiguous=part.is_contiguous(),
            component_addresses=tuple(other.data_ptr() for other in list_payloads(parameter)[1:]),
            is_plain_tensor=part is parameter,
            tracks_writes=bool(spec.auxiliary_names) and not parameter.is_inference(),
            record=LastingParameterRecord() if known is None else known.record,
        )
        if gradient is not None:
            check_kernel_memory(plan, gradient)
        if plan.tracks_writes:
            plan.record.payload_version = carry_payload_version(parameter, part, plan.record.payload_version)
        self.plan_by_parameter_id[id(parameter)] = plan
        return plan

    def get_shared_step_spec(
        self, rule: UpdateRule, group: Mapping[str, Any], parameter: torch.Tensor, gradient: Store | None, name: str
    ) -> StepSpec:
        """Return a parameter's step specification; equal ones on one device are one object."""
        given = rule, group["weight_update"], group["format"], group["param_dtype"], gradient
        states, is_plain = self.read_plan_options(group).state_dtype, get_payload(parameter) is parameter
        is_float32 = is_marked_to_stay_float32(parameter)
        key = *map(id, given), states, is_float32, parameter.dtype, parameter.shape, parameter.device
        if is_plain and key in self._shared_spec_by_options:
            return self._shared_spec_by_options[key][0]
        spec = choose_step_spec(rule, group, parameter, gradient, name)
        spec = self._shared_specs.setdefault((spec, get_local(parameter).device), spec)
        if is_plain:
            self._shared_spec_by_options[key] = spec, given
        return spec


def refuse_unwritable_parameter(parameter: torch.Tensor, part: torch.Tensor, name: str) -> None:
    """Refuse a parameter whose numbers no step here can write; memory still to come is looked at when it steps."""
    if torch.nn.parameter.is_lazy(parameter):
        raise ValueError(f"parameter {name} has no shape yet: run one batch through the model, then make its optimizer")
    if part.is_meta or has_strided_values(part):
        return
    dense = part.layout is torch.strided and not part.is_quantized and not part.is_nested
    if dense and type(part) in (torch.Tensor, torch.nn.Parameter):
        return
    raise_no_plain_memory(part, f"parameter {name}", "torch.optim's optimizers step what such a class allows")


def check_kernel_memory(plan: ParameterPlan, gradient: torch.Tensor) -> None:
    """Check every tensor whose address a step's kernel is given."""
    own = len(plan.weight_tensors) - len(plan.auxiliary_tensors)
    named = [("parameter", part) for part in plan.weight_tensors[:own]]
    named += [(f"state {key!r} of parameter", tensor) for key, tensor in plan.tensors.items()]
    for what, tensor in named:
        if not has_strided_values(tensor) or (tensor.is_neg() and tensor.is_contiguous()):
            raise_no_plain_memory(tensor, f"{what} {plan.name}")
        if tensor.device != gradient.device:
            raise ValueError(
                f"{what} {plan.name} is on {tensor.device} and the gradient on {gradient.device}: move them to one "
                "device, and make the optimizer after moving the model"
            )
    for what, tensor in named[own:]:
        if not tensor.is_contiguous():
            raise ValueError(f"{what} {plan.name} is a view with gaps or of another order: store state.contiguous()")
    if overlaps_itself(named[0][1]):
        raise ValueError(
            f"parameter {plan.name} is expanded: several of its elements are one number in memory, so it has no step "
            "of its own: make it by .clone(), or train what it was expanded from"
        )


def convert_to_plain_gradient(
    gradient: torch.Tensor, parameter: torch.Tensor, name: str
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Return a gradient as plain memory, with its scale, which only the step of a scaled parameter uses."""
    if isinstance(gradient, ScaledTensor):
        if isinstance(parameter, ScaledTensor):
            payload = cast("ScaledTensor", gradient.detach()).payload
            return to_plain_memory(payload, f"the gradient of {name}"), gradient.scale.detach()
        gradient = cast("ScaledTensor", gradient.detach()).decode()
    elif isinstance(gradient, MCTensor):
        gradient = cast("MCTensor", gradient.detach()).decode(torch.float32)
    if gradient.layout is not torch.strided:
        return gradient, 1.0  # refused, or kept sparse, where its dtype is looked at
    return to_plain_memory(gradient, f"the gradient of {name}"), 1.0


def choose_gradient_store(gradient: torch.Tensor, parameter: torch.Tensor, name: str) -> Store:
    """Return the store that a gradient's numbers are read by."""
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"parameter {name} has a sparse gradient: give its Embedding sparse=False, or use "
            "hu.optim.wrap(torch.optim.SparseAdam, ...)"
        )
    if isinstance(parameter, ScaledTensor) and gradient.dtype in PAYLOAD_STORE_BY_DTYPE:
        return PAYLOAD_STORE_BY_DTYPE[gradient.dtype]
    if gradient.dtype not in STORE_BY_DTYPE:
        raise ValueError(f"the gradient of {name} is {gradient.dtype}: allowed are bfloat16, float16 and float32")
    return STORE_BY_DTYPE[gradient.dtype]
