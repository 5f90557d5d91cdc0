"""Saving and loading: every tensor in its own dtype, float32 weights in and out, and torch.optim's states."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from .._messages import differences, find_users_level, listed
from ..formats import Format
from ..kernels import keeping_subnormals
from ..mctensor import MCTensor
from ..scaled import ScaledTensor
from ._group_options import read_own_version
from ._state_dict_validation import (
    SWITCHED,
    VERSION,
    check_groups,
    check_shape,
    count_steps,
    find_state,
    fit_state,
    has_other_bits,
    is_auxiliary,
    is_own_file,
    read_begun,
    refuse_confusing_keys,
    refuse_newer_keys,
    refuse_other_stream,
)
from ._state_dict_validation import explain_missing_entry as _explain_missing_entry
from ._storage import Store
from .parameters._local_tensors import is_dtensor, local, memory, placed_like
from .parameters._narrow_groups import name_of
from .parameters._outside_writes import (
    CHECKSUMS,
    PAYLOAD_KEYS,
    UPDATE,
    describe_payload,
    fit_auxiliary_tensors,
    is_written,
    mark_loaded,
    place_checksums,
    read_auxiliary_tensors,
    set_weight,
    under,
)
from .parameters._parameter_plan import ParameterPlan
from .parameters._random_identity import plain_names
from .parameters._state_tensors import (
    BEGUN,
    STORAGE_SUFFIXES,
    find_block,
    find_packed_block,
    list_codec_versions,
    set_initial,
)
from .parameters._step_spec import StepSpec
from .states._codec import finite_amax
from .states._int8_blocks import scale_shape
from .states._state import StateChoice, as_state
from .step._batch import PlanCache
from .step._scales import choose_weight_scale
from .weight_updates._weight_update import WeightUpdate, weight_update


class CheckpointMixin(torch.optim.Optimizer):
    """state_dict, load_state_dict and their float32 counterparts, for Optimizer, which has the rest."""

    _plans: PlanCache

    if TYPE_CHECKING:

        def _plan(self, group: dict[str, Any], position: int, *, carry: bool = True) -> ParameterPlan: ...
        def _plan_to_read(self, group: dict[str, Any], position: int) -> ParameterPlan: ...
        def _follow_groups(self) -> None: ...
        def _clear_plans(self) -> None: ...
        def _start_caches(self) -> None: ...
        def _check_numbers(self, group: dict[str, Any]) -> None: ...
        def _step_spec(
            self, group: dict[str, Any], parameter: torch.Tensor, gradient: Store | None, name: str
        ) -> StepSpec: ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain data as torch.optim does: loads with weights_only, every state in its own dtype.

        Hooks run as torch.optim's do: those before may change the state, those after see and may replace what is saved.
        """
        saved = self._state_dict_before_hooks()
        for hook in tuple(self._optimizer_state_dict_post_hooks.values()):
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    def _state_dict_before_hooks(self) -> dict[str, Any]:
        """Return the state_dict before the post hooks have run."""
        self._follow_groups()
        places = [(group, position) for group in self.param_groups for position in range(len(group["params"]))]
        refuse_confusing_keys(self.state)
        # First: where a group was given another weight update, it takes the state over.
        held = [self.state.get(group["params"][position]) for group, position in places]
        beside = [self._auxiliary_tensors_to_save(*place) if state else {} for place, state in zip(places, held)]
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            saved = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for number, state in saved["state"].items():
            if not isinstance(number, int) or not 0 <= number < len(places):  # the user's, or a hook's
                continue
            group, position = places[number]
            parameter, state = group["params"][position], {**state, **beside[number]}
            plan = self._plans.get(parameter)
            whole = () if plan is None else plan.spec.factor_names  # the same on every rank
            placed = {
                name: value if name in whole else _saved_form(name, value, state, parameter)
                for name, value in state.items()
            }
            saved["state"][number] = list_codec_versions(state) | placed
        saved["param_groups"] = [_plain_group(group) for group in saved["param_groups"]]
        return saved

    def _auxiliary_tensors_to_save(self, group: dict, position: int) -> dict[str, object]:
        """Return the valid auxiliary tensors of a parameter written from outside, and its payload's identity."""
        try:
            plan = self._plan_to_read(group, position)
        except (ValueError, TypeError, NotImplementedError):  # its dtype has changed since; a step says why
            return {}
        # A group that was given another weight update takes its parameters over at the next step.
        is_to_change = group["weight_update"] not in (None, plan.spec.update, plan.spec.update.name)
        auxiliary: dict[str, object] = {UPDATE: plan.spec.update.to_dict()} if is_to_change else {}
        if plan.payload_version is None:
            return auxiliary
        if is_written(plan):
            names = (name for name, _ in plan.spec.update.auxiliary_tensors(plan.spec.store))
            auxiliary.update(zip(names, read_auxiliary_tensors(plan)))
        return {**auxiliary, **describe_payload(plan)}

    # Words for a flat state (flatten_optimizer_state_dict) that lacks an entry which torch looks up.
    explain_missing_entry = staticmethod(_explain_missing_entry)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class or of the torch.optim class of the same rule returned.

        States are kept in this optimizer's dtypes: equal ones are copied bit for bit, others go through float32.
        Hyper-parameters come from the saved groups, and so does what a scheduler or the user has put into them; how
        states are stored stays as this optimizer was made. Hooks run as torch.optim's do: those before may change or
        replace a shallow copy of what is loaded.

        Raises:
            ValueError: other groups, parameters, shapes, state names or another weight update; nothing is changed.
        """
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
            for hook in tuple(self._optimizer_load_state_dict_pre_hooks.values()):
                changed = hook(self, state_dict)
                state_dict = state_dict if changed is None else changed
        self._load_between_hooks(state_dict)
        for after in tuple(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _check_random_bits(self, saved_groups: list[Mapping]) -> None:
        """Refuse another stream of random bits for groups that draw some, and warn of other numbers that key them."""
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups)):
            plans = (self._plans.get(parameter) for parameter in group["params"])
            if not any(plan is not None and plan.spec.draws for plan in plans):
                continue
            refuse_other_stream(f"param group {number}", "the groups of the state_dict", saved)
            if has_other_bits(group, saved):
                warnings.warn(
                    f"param group {number} was saved without names, which key random bits: stochastic rounding goes "
                    "on, but with other bits than the saved run's; to go on with the same, save and load with "
                    "optimizers made from model.named_parameters()",
                    UserWarning,
                    stacklevel=find_users_level(),
                )

    def _load_between_hooks(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict, between pre and post hooks."""
        self._follow_groups()
        options = check_groups(self.param_groups, state_dict, self._check_numbers, self.defaults)
        given = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for position, number in enumerate(saved["params"]):
                given.append((group, position, find_state(state_dict, number, name_of(group, position))))
        known = {parameter for parameter, state in self.state.items() if state}
        before = [dict(group) for group in self.param_groups]
        for group, chosen in zip(self.param_groups, options):
            group.update(chosen)
        self._clear_plans()
        is_own = is_own_file(before, state_dict["param_groups"])
        try:
            saved_groups = state_dict["param_groups"]
            trial = [(*one, self._fit_tensors(*one, is_own, saved_groups)) for one in given]
            self._check_random_bits(saved_groups)
        except Exception:
            for group, old in zip(self.param_groups, before):
                group.clear()
                group.update(old)
            for parameter in self.state.keys() - known:
                del self.state[parameter]
            self._clear_plans()
            raise
        for group, position, state, tensors in trial:
            parameter = group["params"][position]
            if not state and not is_own and parameter in self._plans:
                # Files of torch.optim have no auxiliary tensors: they stay.
                _reset_states(self._plans[parameter], group)
                continue
            if not state:
                self.state.pop(parameter, None)
                self._plans.pop(parameter)
                continue
            held, spec = self.state[parameter], self._plans[parameter].spec
            for name in [name for name in held if is_auxiliary(name) and name not in spec.tensors]:
                del held[name]
            for name, value in tensors.items():
                if name in spec.tensors:
                    local(held[name]).copy_(local(value))
                else:
                    held[name] = copy.deepcopy(value)
            held["step"] = count_steps(state, "")
            held.pop(BEGUN, None)
            held.update(read_begun(state, held["step"]))
            mark_loaded(self._plans[parameter], state)
        for key in [key for key in self.state if not isinstance(key, torch.Tensor)]:
            del self.state[key]
        numbers = {number for saved in state_dict["param_groups"] for number in saved["params"]}
        self.state.update({key: value for key, value in state_dict["state"].items() if key not in numbers})

    def _fit_tensors(
        self, group: dict, position: int, state: Mapping, is_own: bool, saved_groups: list[Mapping]
    ) -> dict[str, Any]:
        """Return the saved tensors in the dtypes and layouts of this optimizer, and the user's own entries."""
        if not state:
            return {}
        with under(group, weight_update(state[UPDATE]) if UPDATE in state else group["weight_update"]):
            plan = self._plan(group, position, carry=False)
        count_steps(state, plan.name)
        fitted: dict[str, Any] = {}
        used = {"step", BEGUN, UPDATE, *plan.spec.rule.follows_from_step, *PAYLOAD_KEYS}
        for codec, rule_state, names in zip(plan.spec.codecs, plan.spec.rule.states, plan.spec.state_tensors):
            used |= {f"{rule_state.name}{suffix}" for suffix in STORAGE_SUFFIXES}
            fitted |= fit_state(plan, group, codec, rule_state, names, state)
        for name in plan.spec.factor_names:
            used.add(name)
            fitted[name] = check_shape(plan, name, state.get(name), plan.tensors[name], exact=False).float()
        for name in plan.spec.auxiliary_names:
            used.add(name)
            if name in state:
                fitted[name] = check_shape(plan, name, state[name], plan.tensors[name], exact=True)
            elif is_own and isinstance(state["step"], int):  # others' states under these groups count in tensors
                raise ValueError(
                    f"state of parameter {plan.name} lacks {name!r}: it was saved by another weight update"
                )
        foreign = [key for key in state if key not in used and state[key] is not None]
        unknown = [key for key in foreign if not str(key).startswith(SWITCHED)]
        refuse_newer_keys("the state of parameter", plan.name, unknown, saved_groups)
        others = [key for key in foreign if is_auxiliary(key) or key.startswith("base.")]
        if others:
            raise ValueError(
                f"state of parameter {plan.name} holds {listed(others)}, which {type(self).__name__} with "
                f"weight_update={plan.spec.update.name!r} does not keep: load it into the optimizer that saved it"
            )
        # The user's own, and states that an option of the group has switched off, which stay, as in torch.optim.
        device = local(plan.parameter).device
        for key in foreign:
            fitted[key] = state[key].to(device) if isinstance(state[key], torch.Tensor) else state[key]
        return fitted

    @keeping_subnormals()
    def float32_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state_dict with every parameter as its float32 weight, auxiliary tensors included.

        The names are those of ``model.state_dict()``: give the plain model inside torch.compile or
        DistributedDataParallel for plain names. `load_float32_state_dict` takes either.

        Args:
            model: whose parameters this optimizer steps, or a copy of it: where the elements of a copied parameter
                equal those of ours of the same name (but for what torch.compile and DistributedDataParallel put before
                it), they stand for the same weights. Other floating tensors are converted.

        Raises:
            ValueError: a model none of whose parameters are known here.
        """
        found, places = {}, self._positions()
        held = {name: (t, self._read_plan(t, places)) for name, t in model.state_dict(keep_vars=True).items()}
        named = {} if any(id(t) in places for t, _ in held.values()) else self._copied_plans(held)
        for name, (tensor, plan) in held.items():
            value = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
            known = plan or named.get(name)
            if known is not None:
                if plan is None:
                    auxiliary: Sequence[torch.Tensor]
                    payloads = [memory(value).contiguous()]
                    own = read_auxiliary_tensors(known)
                    auxiliary = fit_auxiliary_tensors(known, payloads[0], known.payloads[0], own)
                else:
                    payloads, auxiliary = [part.contiguous() for part in plan.payloads], read_auxiliary_tensors(plan)
                decoded = known.spec.update.read(known.spec.store, [*payloads, *auxiliary])
                decoded = decoded * tensor.scale if known.spec.scaled else decoded.clone()
                found[name] = placed_like(decoded, value)
            elif isinstance(value, (ScaledTensor, MCTensor)):
                found[name] = value.decode(torch.float32)
            elif isinstance(value, torch.Tensor) and value.is_floating_point() and not is_extra_state(name):
                found[name] = value.to(torch.float32, copy=True)
            else:
                found[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return found

    @keeping_subnormals()
    def load_float32_state_dict(self, model: torch.nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set the model from float32 weights, the bits that its parameters cannot hold going into auxiliary tensors.

        What torch.compile and DistributedDataParallel put before names counts for nothing, in the file and here.

        Raises:
            ValueError: missing or unexpected names, other shapes, or a model that is not stepped here; nothing is
                changed.
        """
        own = model.state_dict(keep_vars=True)
        names, own = dict(zip(plain_names(own), own)), dict(zip(plain_names(own), own.values()))
        state_dict = dict(zip(plain_names(state_dict), state_dict.values()))
        missing, foreign = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        if missing or foreign:
            raise ValueError(f"the state_dict {differences(missing, foreign)}: give one with the model's own names")
        extra = {names[name]: state_dict.pop(name) for name in tuple(state_dict) if is_extra_state(name)}
        wrong = [name for name, value in state_dict.items() if own[name].shape != getattr(value, "shape", None)]
        if wrong:
            raise ValueError(f"{listed(wrong)} are not of the model's shapes: give a state_dict of this model")
        places = self._positions()
        if not any(id(tensor) in places for tensor in own.values()):
            raise ValueError(
                f"the optimizer holds none of the parameters of this {type(model).__name__}, and nothing of their low "
                "bits: give the model that it steps; under release_gradients(offload='cpu'), which steps copies, load "
                "before that"
            )
        with torch.no_grad():
            for name, value in state_dict.items():
                if id(own[name]) not in places:
                    own[name].copy_(value)
                    continue
                plan = self._plan(*places[id(own[name])])
                value = local(value.detach()).float().contiguous()
                if plan.spec.scaled:
                    scale = choose_weight_scale(plan.spec.store.dtype, own[name].scale.item(), finite_amax(value))
                    own[name].scale.fill_(scale)
                    value = value / scale
                set_weight(plan, value)
            # Not by model.load_state_dict, whose hooks may ask for all that a model saves.
            for path, module in model.named_modules() if extra else ():
                name = f"{path}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip(".")
                if name in extra:
                    module.set_extra_state(extra[name])

    def _copied_plans(self, held: Mapping[str, tuple]) -> dict[str, ParameterPlan | None]:
        """Return the plans of the parameters that those of another model are copies of, by name."""
        found: dict[str, ParameterPlan | None] = {}
        named = [(name, group, k) for group in self.param_groups for k, name in enumerate(group.get("param_names", ()))]
        theirs = dict(zip(plain_names(held), held))
        for (name, group, position), plain in zip(named, plain_names(name for name, _, _ in named), strict=True):
            their_name = name if name in held else theirs.get(plain)
            if their_name is None:
                continue
            tensor, mine = held[their_name][0], group["params"][position]
            if isinstance(tensor, torch.nn.Parameter) and _could_be_a_copy(tensor, mine):
                found[their_name] = self._plan_to_read(group, position) if self.state.get(mine) else None
        if not found and any(isinstance(tensor, torch.nn.Parameter) for tensor, _ in held.values()):
            raise ValueError(
                "no parameter of this model is stepped by this optimizer: give the model that it was made for, or, to "
                "read a copy of that model, make the optimizer from model.named_parameters(), which tells them by name"
            )
        tied = {id(held[name][0]): plan for name, plan in found.items()}
        return {name: tied[id(tensor)] for name, (tensor, _) in held.items() if id(tensor) in tied}

    def _positions(self) -> dict[int, tuple[dict, int]]:
        """Return group and position of every parameter, by its id."""
        return {id(p): (group, k) for group in self.param_groups for k, p in enumerate(group["params"])}

    def _read_plan(self, tensor: object, places: Mapping[int, tuple[dict, int]]) -> ParameterPlan | None:
        """Return the plan of a parameter that has states, else None: the weight is then the parameter itself."""
        has_state = isinstance(tensor, MCTensor) or (isinstance(tensor, torch.Tensor) and self.state.get(tensor))
        return self._plan_to_read(*places[id(tensor)]) if has_state and id(tensor) in places else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle, without the caches."""
        self._follow_groups()
        state: dict[str, Any] = super().__getstate__()
        held = state["state"] = state["state"].copy()
        for group in self.param_groups:
            for position, parameter in enumerate(group["params"]):
                saved = self._auxiliary_tensors_to_save(group, position) if held.get(parameter) else {}
                if CHECKSUMS in saved:
                    held[parameter] = {**held[parameter], **saved, UPDATE: self._plans[parameter].spec.update}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from `__getstate__`."""
        super().__setstate__(state)
        self._start_caches()
        for number, group in enumerate(self.param_groups):
            refuse_other_stream(f"the pickled param group {number}", "that group before it is pickled", group)


def _could_be_a_copy(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = type(a) is type(b) and not isinstance(a, MCTensor) and a.dtype == b.dtype
    return same and memory(a).shape == memory(b).shape


def _reset_states(plan: ParameterPlan, group: Mapping) -> None:
    """Reset the states of a parameter to those before its first step."""
    factors = [plan.tensors[name] for name in plan.spec.factor_names]
    for tensor in (tensor for state in (*plan.states, factors) for tensor in state):
        tensor.zero_()
    set_initial(plan.spec, group, plan.tensors)
    plan.state["step"] = 0
    plan.state.pop(BEGUN, None)


def _saved_form(name: str, value: object, state: Mapping, parameter: torch.Tensor) -> object:
    """Return a state tensor as a DTensor if its parameter is one, so that distributed checkpoints can re-shard it."""
    if name == CHECKSUMS and isinstance(value, torch.Tensor):
        return place_checksums(value, parameter)
    if not is_dtensor(parameter) or not isinstance(value, torch.Tensor) or local(value) is not value:
        return value
    if value.shape == local(parameter).shape:
        return placed_like(value, parameter)
    slot = name.removesuffix("_scale").removesuffix("_packed")
    codes, packed = state.get(f"{slot}_codes"), state.get(f"{slot}_packed")
    if packed is not None:
        block = 2 if name.endswith("_packed") else find_packed_block(packed, value)
    elif codes is not None:
        block = find_block(codes, value)
    else:
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    whole = scale_shape(parameter.shape, block)
    stride = torch.empty(whole, dtype=value.dtype, device="meta").stride()
    return DTensor.from_local(value, mesh, placements, shape=whole, stride=stride, run_check=False)


def _plain_group(group: dict) -> dict:
    plain = {**group, VERSION: read_own_version()}
    update, states, fmt = group["weight_update"], group["state_dtype"], group["format"]
    plain["weight_update"] = update.to_dict() if isinstance(update, WeightUpdate) else update
    plain["state_dtype"] = _plain_state(states)
    plain["format"] = fmt.name if isinstance(fmt, Format) else fmt
    plain["param_dtype"] = None if group["param_dtype"] is None else str(group["param_dtype"]).removeprefix("torch.")
    return plain


def _plain_state(given: StateChoice) -> object:
    if isinstance(given, Mapping):
        return {name: _plain_state(value) for name, value in given.items()}
    if given is None:
        return None
    state = as_state(given, torch.float32)
    dtype = state.dtype if isinstance(state.dtype, str) else str(state.dtype).removeprefix("torch.")
    return {"dtype": dtype, "rounding": state.rounding, "block": state.block}


def is_extra_state(name: str) -> bool:
    """Return whether a name in a model's state_dict is that of a module's extra state."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
