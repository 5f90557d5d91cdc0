"""The optimizer: param groups, state layout and the step's bookkeeping, without arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar, overload

import torch

from .._messages import name_type
from .._names import describe_unknown_name, read_own_docstring, register_entry
from ..formats import Format
from ..kernels import break_graph_and_run_eagerly, keeping_subnormals
from ..subclass.models._parameter_holders import wrap_distributed_checkpoint_functions
from ._checkpoint import CheckpointMixin
from ._group_options import (
    NON_NEGATIVE_OPTIONS,
    OptimizerParams,
    check_betas,
    check_group_options,
    check_hyperparameters,
    parse_options,
    read_default_arguments,
    refuse_non_iterable_params,
    refuse_unsupported_torch_switches,
)
from ._lost_updates import LostUpdateReport, summarize_lost_updates, warn_if_mostly_lost
from ._storage import PAYLOAD_STORE_BY_DTYPE, STORE_BY_DTYPE, Store
from .parameters._local_tensors import get_local, get_payload, get_scaled_parameter_scale, list_payloads
from .parameters._narrow_groups import (
    check_data_parallel_ranks,
    check_holders_and_list_sharded,
    check_sharded_ranks,
    narrow_group_parameters,
    read_parameter_name,
    refuse_overlapping_parameters,
    refuse_replaced_parameters,
    refuse_unused_weight_update,
    walk_group_parameters,
)
from .parameters._outside_writes import (
    CHECKSUMS_KEY,
    PAYLOAD_IDENTITY_KEYS,
    is_payload_version_current,
    record_loaded_auxiliary_tensors,
    record_payload_version,
)
from .parameters._parameter_plan import ParameterPlan, PlanOptions, is_plan_valid
from .parameters._random_identity import (
    NamedStreamIdByParameter,
    assign_stream_ids,
    record_stream_ids,
    update_stream_ids_of_edited_group,
)
from .parameters._state_tensors import add_missing_state_tensors, refuse_changed_weight_update
from .parameters._step_spec import StepSpec
from .rules._update_rule import UpdateRule
from .states._state import StateChoice
from .step._batch import (
    Batch,
    CachedBatchTables,
    GroupSetting,
    PlanCache,
    choose_gradient_store,
    convert_to_plain_gradient,
    refuse_unwritable_parameter,
)
from .step._run import add_constants_from_sums, add_prepared_tensors, compile_kernels, compute_rule_sums, run_step
from .weight_updates._weight_update import WeightUpdate

Loss = TypeVar("Loss")
OptimizerClass = TypeVar("OptimizerClass", bound="type[Optimizer]")


class Optimizer(CheckpointMixin):
    """The base of all optimizers here; a subclass names its update rule and its hyper-parameters.

    Args:
        params: parameters, named parameters, or param groups, as for torch.optim. With names, random bits are keyed by
            them; without, by position.
        defaults: the hyper-parameters.
        weight_update: how updates enter narrow parameters: a name, a WeightUpdate, or None for "split8" where
            parameters have 16 bits and "stochastic" where they are scaled. float32 parameters (without `format`) need
            none and take none.
        state_dtype: how states are stored: torch.float32, torch.bfloat16, "8bit", "bfloat16x2" (two of them), beside
            scaled parameters torch.float16 and "fp8" (a payload and one scale per tensor), a State, or a dict from
            state name to one of these. By default bfloat16 beside 16-bit parameters, float16 beside scaled ones and
            float32 beside float32 ones; a running maximum (amsgrad) and its source need more bits. Parameters whose
            rows (numel / shape[0]) are not a multiple of the block keep bfloat16 states under "8bit".
        param_dtype: torch.bfloat16 or torch.float16: narrow float32 parameters in place; the bits that fall off go
            into auxiliary tensors beside them.
        format: a Format or its name: parameters stay float32 tensors and hold values of that format.
        seed: of the random bits, which depend on (seed, step, parameter, global element index) only. Two optimizers
            over unnamed parameters, or of equal names, share them: seed the second.
        report_interval: steps from one count of lost updates (`report()`) to the next; 0 for never.

    Raises:
        ValueError: a hyper-parameter out of range, options that do not go together, or values beyond `param_dtype`.
        TypeError: an unknown option, or `params` that are no parameters.

    Options may be words, as a command line or a YAML file gives them: "1e-3", "bf16", "torch.bfloat16", "true",
    "0.9,0.95", "None". torch.optim's `foreach` and `fused` are ignored, with a warning where they ask for another
    implementation than the fused kernel; `capturable=True` and `differentiable=True` are refused.
    """

    # The option that makes parameters narrow.
    narrowing_option = "param_dtype=torch.bfloat16"
    # The names of options that are finite numbers and not negative; those not among these may be None.
    _non_negative_options: ClassVar[tuple[str, ...]] = NON_NEGATIVE_OPTIONS
    # Options of a class above that this one decides, and no user.
    _options_fixed_by_class: ClassVar[tuple[str, ...]] = ()
    # The update rule, where it is the same for all groups.
    _rule: ClassVar[UpdateRule | None] = None
    # Whether options that choose another implementation in torch.optim are refused, or ignored with a warning.
    _refuses_torch_switches: ClassVar[bool] = True
    # Whether a step of one parameter depends on no other.
    _can_step_one_parameter: ClassVar[bool] = True
    # Of copies, which have all groups and made no step.
    _is_built, _steps_taken = True, 0
    # The sums of a step's reductions, of its first parameter; the same for all where a reduction is over all.
    _reduction_sums: tuple[float, ...] = ()

    def __init__(
        self,
        params: OptimizerParams,
        defaults: dict[str, Any],
        *,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | str | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **unknown_options: Any,
    ) -> None:
        known = read_default_arguments(type(self))
        for name in unknown_options:
            allowed = [option for option in known if option not in self._options_fixed_by_class]
            raise TypeError(describe_unknown_name(f"option of {type(self).__name__}", name, allowed))
        switches = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        refuse_unsupported_torch_switches(type(self).__name__, parse_options(switches, dict.fromkeys(switches)))
        refuse_non_iterable_params(params)
        self._create_caches()
        self._is_built = False
        own: dict[str, Any] = {
            "weight_update": weight_update,
            "state_dtype": state_dtype,
            "param_dtype": param_dtype,
            "format": format,
            "seed": seed,
            "report_interval": report_interval,
        }
        super().__init__(params, parse_options({**defaults, **own}, known))
        complete_state_dict: Any = type(self)._complete_state_dict
        self.register_state_dict_post_hook(complete_state_dict)
        refuse_unused_weight_update(self, self.param_groups)
        # After all groups were accepted: what is refused leaves every parameter as it was.
        narrow_group_parameters(self, self.param_groups, check_holders_and_list_sharded(self.param_groups))
        self._is_built = True

    def _create_caches(self) -> None:
        """Create the empty caches by parameter, plans and identities; also in a copy."""
        wrap_distributed_checkpoint_functions()
        self._plans = PlanCache()
        self._stream_ids: NamedStreamIdByParameter = {}

    @classmethod
    def split_groups(cls, params: OptimizerParams) -> OptimizerParams:
        """Return parameters in groups that this optimizer steps; one that steps matrices alone splits others off."""
        return params

    def rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return the update rule of a param group."""
        if self._rule is None:
            raise TypeError(f"{type(self).__name__} has no rule: write rule(self, group), which gives an UpdateRule")
        return self._rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch.optim does; what its parameters cannot do is refused before anything is changed.

        Raises:
            ValueError: a dtype, option or weight update that does not go together, with what to use instead.
        """
        given = param_group["params"] if isinstance(param_group.get("params"), list | tuple) else []
        parameters = [id(entry[1] if isinstance(entry, tuple) else entry) for entry in given]
        if len(set(parameters)) != len(parameters):
            raise ValueError(
                "a param group holds the same parameter twice: it would make two steps in one; name it once"
            )
        before, is_chosen = len(self.param_groups), param_group.get("weight_update") is not None
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            group.update(parse_options(options, self.defaults))
            self._check_hyperparameters(group)
            check_group_options(group, self.defaults)
            for name in self._options_fixed_by_class:
                if group[name] != self.defaults[name]:
                    known = self.defaults[name]
                    raise ValueError(f"{name}={group[name]!r} in a group: this optimizer has {known}; leave it out")
            if self._refuses_torch_switches:
                refuse_unsupported_torch_switches(type(self).__name__, group)
            assign_stream_ids(group, self.param_groups[:before], self._stream_ids)
            for position, parameter in enumerate(group["params"]):
                self._choose_step_spec(group, parameter, None, read_parameter_name(group, position))
            refuse_overlapping_parameters(self.param_groups)
            refuse_unused_weight_update(self, [group] if is_chosen else ())
            sharded = check_holders_and_list_sharded([group]) if self._is_built else None
        except Exception:
            del self.param_groups[before:]
            raise
        record_stream_ids(group, self._stream_ids)
        if sharded is not None:
            narrow_group_parameters(self, [group], sharded)

    def _choose_step_spec(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: Store | None, name: str
    ) -> StepSpec:
        """Return a parameter's step specification; without `gradient`, as it will be after narrowing."""
        refuse_unwritable_parameter(parameter, get_payload(parameter), name)
        return self._plans.get_shared_step_spec(self.rule(group), group, parameter, gradient, name)

    def _update_edited_groups(self) -> None:
        """Bring names, identities and plans in line with the groups' lists of parameters, which users may edit."""
        for group in self.param_groups:
            update_stream_ids_of_edited_group(group, self._stream_ids)
        members = {id(parameter): self._stream_ids[parameter] for _, _, parameter in walk_group_parameters(self)}
        taken, replaced = {*members.values()}, set()
        for parameter, stream_id in tuple(self._stream_ids.items()):
            # Another one stands in its place, or nothing is kept of it.
            if id(parameter) not in members and (stream_id in taken or parameter not in self.state):
                del self._stream_ids[parameter]
                self._plans.pop(parameter)
                if self.state.pop(parameter, {}).get("step") == 0:
                    replaced.add(stream_id)
        # torch.distributed.checkpoint loads into states that are there; shards may stand in for what was narrowed.
        for group, position, parameter in walk_group_parameters(self):
            if self._stream_ids[parameter] in replaced:
                self._get_valid_plan(group, position)

    def _make_plan(
        self,
        group: dict[str, Any],
        position: int,
        gradient_store: Store,
        options: PlanOptions | None = None,
        gradient: torch.Tensor | None = None,
    ) -> ParameterPlan:
        """Make a parameter's plan, and the state tensors that it lacks; a step's gradient is checked beside them."""
        parameter = group["params"][position]
        if parameter not in self._stream_ids:
            self._update_edited_groups()
        (_, stream_id), name = self._stream_ids[parameter], read_parameter_name(group, position)
        spec = self._choose_step_spec(group, parameter, gradient_store, name)
        if get_payload(parameter).dtype != spec.store.dtype:
            raise ValueError(
                f"parameter {name} is {get_payload(parameter).dtype}, but its group holds {spec.store.dtype}: add "
                "parameters by add_param_group, which narrows them, and convert a model before its optimizer is made"
            )
        state = self.state[parameter]
        known = self._plans.get(parameter)
        refuse_changed_weight_update(state, None if known is None else known.spec, spec, name)
        add_missing_state_tensors(state, spec, group, parameter, name)
        options = options or self._plans.read_plan_options(group)
        plan = self._plans.renew_plan(parameter, spec, state, options, name, stream_id, gradient)
        if CHECKSUMS_KEY in state:  # a copy, which says what a file does
            record_loaded_auxiliary_tensors(plan, state)
            for key in PAYLOAD_IDENTITY_KEYS:
                state.pop(key, None)
        return plan

    def _get_valid_plan(self, group: dict[str, Any], position: int, gradient: Store | None = None) -> ParameterPlan:
        """Return a parameter's valid plan, for gradients of some store if one is given."""
        parameter = group["params"][position]
        plan, options = self._plans.get(parameter), self._plans.read_plan_options(group)
        fits = plan is not None and (gradient is None or plan.spec.gradient.dtype is gradient.dtype)
        if (
            plan is None
            or not fits
            or not is_plan_valid(plan, parameter, self.rule(group), options, self.state[parameter])
        ):
            likely = PAYLOAD_STORE_BY_DTYPE.get(get_payload(parameter).dtype, STORE_BY_DTYPE[torch.float32])
            plan = self._make_plan(group, position, gradient or likely, options)
        return plan

    def _invalidate_plans(self) -> None:
        """Make every plan anew before it is used again, under the identities that the groups say."""
        self._plans.invalidate_all()
        for group in self.param_groups:
            record_stream_ids(group, self._stream_ids)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @break_graph_and_run_eagerly
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """Take one optimizer step.

        Args:
            closure: reevaluates the model and returns the loss, as for torch.optim.

        Raises:
            ValueError: a sparse gradient, a parameter or state whose dtype has changed, or a hyper-parameter that is
                not finite; nothing is written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._take_step()
        return loss

    @torch._disable_dynamo
    @torch.no_grad()
    @keeping_subnormals()
    def _step_one_parameter(
        self, parameter: torch.Tensor, group: dict[str, Any], position: int, storage_peers: Iterable[torch.Tensor] = ()
    ) -> None:
        """Step one parameter alone, inside of backward; `storage_peers` are cut from the same tensor."""
        self._update_groups_if_edited()
        self._check_hyperparameters(group)
        alone = {**group, "params": [parameter], "param_names": [read_parameter_name(group, position)]}
        settings: list[GroupSetting] = [
            (self.rule(group), self._plans.read_plan_options(group), group["report_interval"], 1)
        ]
        plans, gradients = [self._plans.get(parameter)], self._list_gradients([parameter])
        scales: dict[int, torch.Tensor] = {}
        places = self._renew_plans_and_list_batches([alone], settings, plans, gradients, scales)
        batches = CachedBatchTables(settings, plans, [], places, {}, None).make_batches(
            [alone], [parameter], gradients, scales
        )
        assert batches is not None, "one parameter is metered or not"
        # They share its version counter, which the step moves.
        known = [plan for one in storage_peers if (plan := self._plans.get(one)) is not None]
        waiting = [plan for plan in known if is_payload_version_current(plan)]
        self._step_batches(batches)
        for plan in waiting:
            record_payload_version(plan)
        # Schedulers ask whether there was a step.
        self._opt_called = True

    def train(self, mode: bool = True) -> None:
        """Do nothing: the parameters are the weights to train and to evaluate; some optimizers have two."""

    def eval(self) -> None:
        """Do what `train(False)` does."""
        self.train(False)

    @keeping_subnormals()
    def _take_step(self) -> None:
        """Step every parameter that has a gradient."""
        self._update_groups_if_edited()
        if not self._steps_taken:  # before anything raises on one rank alone
            check_sharded_ranks(self)
        batches, waiting = self._collect_batches()
        self._step_batches(batches)
        for plan in waiting:
            record_payload_version(plan)

    def _update_groups_if_edited(self) -> None:
        """Follow what users have done to the groups since the last step."""
        counts = [len(group["params"]) for group in self.param_groups]
        known = [len(group.get("identities") or group.get("param_names", ())) for group in self.param_groups]
        if known != counts:
            self._update_edited_groups()

    def _step_batches(self, batches: list[Batch]) -> None:
        self._check_parameter_holders(bool(batches))
        for batch in batches:
            compile_kernels(batch)
        # What rules need before their updates: prepared tensors, sums, and the constants that follow.
        for batch in batches:
            add_prepared_tensors(batch)
        if any(batch.spec.rule.late_values is not None for batch in batches):
            sums = compute_rule_sums(batches)
            self._reduction_sums = next((own for batch in sums for own in batch), ())
            add_constants_from_sums(batches, sums)
        for batch in batches:
            run_step(batch)
            batch.complete_step()
            if batch.spec.counts_lost_updates:
                warn_if_mostly_lost(batch.plans)
        # A parameter cut from the same tensor as another shares its counter, which the other's step has moved.
        for batch in batches if len(batches) > 1 else ():
            batch.record_payload_versions_again()

    def _check_parameter_holders(self, has_gradients: bool) -> None:
        """Check at the first step what else holds the parameters."""
        if not self._steps_taken:
            check_data_parallel_ranks(self)
            if not has_gradients:
                refuse_replaced_parameters(self)
        self._steps_taken += 1

    def _list_gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients that parameters step by, or None."""
        return [parameter.grad for parameter in parameters]

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Check the hyper-parameters that a scheduler may write; raises ValueError."""
        check_hyperparameters(group, self._non_negative_options)
        rule = self.rule(group)
        if not isinstance(rule, UpdateRule):
            raise TypeError(f"{type(self).__name__}.rule gives {rule!r}: return an UpdateRule")
        check_betas(group, rule.betas)
        for state in rule.states:
            if state.initial != 0.0:
                state.initial_value(group)

    def _collect_batches(self) -> tuple[list[Batch], list[ParameterPlan]]:
        """Return the parameters with gradients in batches of one step specification, and unwritten others' plans."""
        groups = self.param_groups
        for group in groups:
            self._check_hyperparameters(group)
        settings = [
            (self.rule(group), self._plans.read_plan_options(group), group["report_interval"], len(group["params"]))
            for group in groups
        ]
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = self._list_gradients(parameters)
        plans = [*map(self._plans.plan_by_parameter_id.get, map(id, parameters))]
        idle = [place for place, gradient in enumerate(gradients) if gradient is None]
        waiting = [plan for place in idle if (plan := plans[place]) is not None and is_payload_version_current(plan)]
        cached, batches = self._plans.batch_tables, None
        if cached is not None and cached.is_valid_for(settings, plans, idle, parameters, gradients, self.state):
            batches = cached.make_batches(groups, parameters, gradients, {})
        if batches is None:
            scales: dict[int, torch.Tensor] = {}
            places = self._renew_plans_and_list_batches(groups, settings, plans, gradients, scales)
            cached = self._plans.batch_tables = CachedBatchTables(settings, plans, idle, places, self.state, cached)
            for table in cached.tables:
                table.renew_tensor_guards(table.select_values_of_batch(gradients))
            batches = cached.make_batches(groups, parameters, gradients, scales)
            assert batches is not None, "parameters of a batch are all metered or none"
        return batches, waiting

    def _renew_plans_and_list_batches(
        self,
        groups: list[dict[str, Any]],
        settings: list[GroupSetting],
        plans: list[ParameterPlan | None],
        gradients: list[torch.Tensor | None],
        scales: dict[int, torch.Tensor],
    ) -> list[list[int]]:
        """Make valid plans, plain gradients, and scales by place; return the places of those that step together."""
        places: dict[tuple[int, bool], list[int]] = {}
        place = -1
        for group, (rule, options, interval, _) in zip(groups, settings):
            for position, parameter in enumerate(group["params"]):
                place += 1
                plan, gradient = plans[place], gradients[place]
                if gradient is None:
                    continue
                if plan is None or not plan.is_plain_tensor or type(gradient) is not torch.Tensor or gradient.is_neg():
                    name = read_parameter_name(group, position)
                    gradient, scale = convert_to_plain_gradient(get_local(gradient), parameter, name)
                    if isinstance(scale, torch.Tensor):
                        scales[place] = scale
                if (
                    plan is None
                    or gradient.dtype is not plan.spec.gradient.dtype
                    or gradient.layout is not torch.strided
                    or not is_plan_valid(plan, parameter, rule, options, self.state[parameter])
                ):
                    store = choose_gradient_store(gradient, parameter, read_parameter_name(group, position))
                    plan = plans[place] = self._make_plan(group, position, store, options, gradient)
                if gradient.shape != plan.shape:
                    raise ValueError(
                        f"the gradient of {plan.name} has shape {tuple(gradient.shape)}, the parameter "
                        f"{tuple(plan.shape)}: set .grad to None after a parameter has changed its shape"
                    )
                gradients[place] = gradient if gradient.is_contiguous() else gradient.contiguous()
                metered = bool(interval) and (plan.state["step"] + 1) % interval == 0
                places.setdefault((id(plan.spec), metered), []).append(place)
        return [*places.values()]

    def report(self) -> LostUpdateReport:
        """Return the share of updates that rounding cancelled on metered steps."""
        return summarize_lost_updates(self._plans.values())

    def bytes_per_parameter(self) -> float:
        """Return bytes per element: weights, auxiliary tensors, states, gradients.

        A frozen parameter has none but its own until it is stepped.
        """
        total = elements = 0
        for group, position, parameter in walk_group_parameters(self):
            held = [*list_payloads(parameter)]
            if parameter.requires_grad or self.state.get(parameter):
                plan = self._get_valid_plan(group, position)
                held += self._list_state_tensors(plan)
                held += [get_scaled_parameter_scale(parameter)] if plan.spec.scaled else []
                gradient = plan.spec.gradient.dtype if parameter.grad is None else get_payload(parameter.grad).dtype
                total += get_local(parameter).numel() * gradient.itemsize
            total += sum(tensor.numel() * tensor.element_size() for tensor in held)
            elements += get_local(parameter).numel()
        return total / elements if elements else 0.0

    def _list_state_tensors(self, plan: ParameterPlan) -> list[torch.Tensor]:
        return [*plan.tensors.values()]

    def __repr__(self) -> str:
        """torch.optim's description, then the lost updates."""
        return f"{super().__repr__()}\n{self.report()}"


OPTIMIZERS: dict[str, type[Optimizer]] = {}


def register_optimizer(kind: OptimizerClass) -> OptimizerClass:
    """Make an optimizer known by its class's name, to tasks, recipes and comparisons; a decorator of the class.

    Returns:
        The class.

    Raises:
        TypeError: it is no subclass of Optimizer, or has no `rule`.
        ValueError: another optimizer has the name, or this one has no docstring.

    >>> import torch
    >>> register_optimizer(torch.optim.Adagrad)
    Traceback (most recent call last):
    ...
    TypeError: an optimizer is a subclass of hu.optim.Optimizer, got <class 'torch.optim.adagrad.Adagrad'>
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"an optimizer is a subclass of hu.optim.Optimizer, got {kind!r}")
    if kind.rule is Optimizer.rule and kind._rule is None:
        raise TypeError(f"{kind.__name__} has no rule: write rule(self, group), which gives an UpdateRule")
    register_entry("optimizer", OPTIMIZERS, kind.__name__, kind, read_own_docstring(kind))
    return kind


def unwrap_optimizer(given: Any) -> Any:
    """Return the optimizer inside accelerate's, Fabric's and Lightning's wrappers; any other object unchanged.

    They may be optimizers by class, but have no groups of their own; Lookahead has groups, and does more than its base.
    """
    while not isinstance(given, type):
        is_wrapper = not isinstance(given, torch.optim.Optimizer) or "param_groups" not in vars(given)
        inner = getattr(given, "optimizer", None) if is_wrapper else None
        if inner is None or inner is given:
            break
        given = inner
    return given


def unwrap_halfulp_optimizer(given: Any, what: str, remedy: str) -> Optimizer:
    """Return an optimizer of hu.optim, out of the wrappers that a trainer has put round it."""
    inner = unwrap_optimizer(given)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{what} takes an optimizer of hu.optim, got {name_type(inner)}: {remedy}")
    return inner


def report(optimizer: Any) -> LostUpdateReport:
    """Return the lost updates of an optimizer, as its own `report()`, also where a trainer has prepared it.

    Args:
        optimizer: of hu.optim, or a wrapper with an attribute `optimizer`: accelerate's, Fabric's, Lightning's.

    Raises:
        TypeError: an optimizer of another library, whose updates are not metered.

    >>> import halfulp as hu
    >>> print(report(hu.optim.SGD([torch.nn.Parameter(torch.ones(2).bfloat16())], lr=0.1)))
    lost updates: none metered yet (one step in `report_interval` is)
    """
    return unwrap_halfulp_optimizer(optimizer, "report", "hu.observe shows the updates of any optimizer").report()
