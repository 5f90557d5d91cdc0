"""Saving and loading: every tensor in its own dtype, float32 weights in and out, and torch.optim's states."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_SUFFIX

from .._messages import listed, name_differences
from ..formats import Format
from ..kernels import keeping_subnormals
from ..mctensor import MCTensor
from ..scaled import ScaledTensor
from ._group_options import read_own_version
from ._state_dict_validation import (
    VERSION_KEY,
    check_saved_groups,
    check_saved_shape,
    fit_saved_state,
    is_halfulp_file,
    read_saved_step,
    refuse_confusing_keys,
    refuse_other_random_stream,
)
from ._storage import Store
from .parameters._local_tensors import is_dtensor, local, place_like
from .parameters._narrow_groups import read_parameter_name, walk_model_parameters
from .parameters._outside_writes import (
    CHECKSUMS_KEY,
    PAYLOAD_KEYS,
    describe_payload,
    place_checksums,
    read_auxiliary_tensors,
    record_loaded_payload,
    set_weight,
)
from .parameters._parameter_plan import ParameterPlan
from .parameters._random_identity import plain_names
from .parameters._state_tensors import (
    BEGUN,
    STORAGE_SUFFIXES,
    find_block_length,
    find_packed_block_length,
    is_auxiliary_name,
    list_codec_versions,
    set_initial_values,
)
from .parameters._step_spec import StepSpec
from .states._codec import finite_amax
from .states._int8_blocks import scale_shape
from .states._state import StateChoice, make_state
from .step._batch import PlanCache
from .step._scales import choose_weight_scale
from .weight_updates._weight_update import WeightUpdate


class CheckpointMixin(torch.optim.Optimizer):
    """state_dict, load_state_dict and their float32 counterparts, for Optimizer, which has the rest."""

    _plans: PlanCache

    if TYPE_CHECKING:

        def _find_valid_plan(self, group: dict[str, Any], position: int) -> ParameterPlan: ...
        def _follow_group_edits(self) -> None: ...
        def _clear_plans(self) -> None: ...
        def _create_caches(self) -> None: ...
        def _check_hyperparameters(self, group: dict[str, Any]) -> None: ...
        def _choose_step_spec(
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
        self._follow_group_edits()
        places = list(walk_model_parameters(self))
        refuse_confusing_keys(self.state)
        beside = [self._auxiliary_tensors_to_save(group, k) if self.state.get(p) else {} for group, k, p in places]
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            saved = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for number, state in saved["state"].items():
            if not isinstance(number, int) or not 0 <= number < len(places):  # the user's, or a hook's
                continue
            parameter, state = places[number][2], {**state, **beside[number]}
            plan = self._plans.get(parameter)
            whole = () if plan is None else plan.spec.factor_names  # the same on every rank
            placed = {
                name: value if name in whole else _place_like_parameter(name, value, state, parameter)
                for name, value in state.items()
            }
            saved["state"][number] = list_codec_versions(state) | placed
        saved["param_groups"] = [_make_group_plain(group) for group in saved["param_groups"]]
        return saved

    def _auxiliary_tensors_to_save(self, group: dict, position: int) -> dict[str, object]:
        """Return auxiliary tensors, valid also after writes from outside, and what identifies their payload."""
        try:
            plan = self._find_valid_plan(group, position)
        except (ValueError, TypeError, NotImplementedError):  # its dtype has changed since; a step says why
            return {}
        if plan.payload_version is None:
            return {}
        return {**dict(zip(plan.spec.auxiliary_names, read_auxiliary_tensors(plan))), **describe_payload(plan)}

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
        """Refuse a file of another version of the stream of random bits for groups that draw some."""
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups)):
            plans = (self._plans.get(parameter) for parameter in group["params"])
            if any(plan is not None and plan.spec.draws for plan in plans):
                refuse_other_random_stream(f"param group {number}", "the groups of the state_dict", saved)

    def _load_between_hooks(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict, between pre and post hooks."""
        self._follow_group_edits()
        options = check_saved_groups(self.param_groups, state_dict, self._check_hyperparameters, self.defaults)
        given = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for position, number in enumerate(saved["params"]):
                state = state_dict["state"].get(number, {})
                if not isinstance(state, Mapping):
                    raise ValueError(
                        f"the state of parameter {read_parameter_name(group, position)} is {type(state).__name__}, not "
                        "a dict: the file is damaged"
                    )
                given.append((group, position, state))
        known = {parameter for parameter, state in self.state.items() if state}
        before = [dict(group) for group in self.param_groups]
        for group, chosen in zip(self.param_groups, options):
            group.update(chosen)
        self._clear_plans()
        is_own = is_halfulp_file(before, state_dict["param_groups"])
        try:
            trial = [(*one, self._fit_saved_tensors(*one, is_own)) for one in given]
            self._check_random_bits(state_dict["param_groups"])
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
            for name, value in tensors.items():
                if name in spec.tensors:
                    local(held[name]).copy_(local(value))
                else:
                    held[name] = copy.deepcopy(value)
            held["step"] = read_saved_step(state, "")
            held.pop(BEGUN, None)
            if isinstance(begun := state.get(BEGUN), int) and 0 < begun <= held["step"]:
                held[BEGUN] = begun
            record_loaded_payload(self._plans[parameter], state)
        for key in [key for key in self.state if not isinstance(key, torch.Tensor)]:
            del self.state[key]
        numbers = {number for saved in state_dict["param_groups"] for number in saved["params"]}
        self.state.update({key: value for key, value in state_dict["state"].items() if key not in numbers})

    def _fit_saved_tensors(self, group: dict, position: int, state: Mapping, is_own: bool) -> dict[str, Any]:
        """Return the saved tensors in the dtypes and layouts of this optimizer, and the user's own entries."""
        if not state:
            return {}
        plan = self._find_valid_plan(group, position)
        read_saved_step(state, plan.name)
        fitted: dict[str, Any] = {}
        used = {"step", BEGUN, *plan.spec.rule.follows_from_step, *PAYLOAD_KEYS}
        for codec, rule_state, names in zip(plan.spec.codecs, plan.spec.rule.states, plan.spec.state_tensors):
            used |= {f"{rule_state.name}{suffix}" for suffix in STORAGE_SUFFIXES}
            fitted |= fit_saved_state(plan, group, codec, rule_state, names, state)
        for name in plan.spec.factor_names:
            used.add(name)
            fitted[name] = check_saved_shape(plan, name, state.get(name), plan.tensors[name], exact=False).float()
        for name in plan.spec.auxiliary_names:
            used.add(name)
            if name in state:
                fitted[name] = check_saved_shape(plan, name, state[name], plan.tensors[name], exact=True)
            elif is_own and isinstance(state["step"], int):  # others' states under these groups count in tensors
                raise ValueError(
                    f"state of parameter {plan.name} lacks {name!r}: it was saved by another weight update"
                )
        foreign = [key for key in state if key not in used and state[key] is not None]
        others = [key for key in foreign if is_auxiliary_name(key) or key.startswith("base.")]
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
            model: whose parameters this optimizer steps; other floating tensors are converted.

        Raises:
            ValueError: a model none of whose parameters are known here.
        """
        places = {id(parameter): (group, k) for group, k, parameter in walk_model_parameters(self)}
        held = model.state_dict(keep_vars=True)
        if not any(id(t) in places for t in held.values()) and any(isinstance(t, Parameter) for t in held.values()):
            raise ValueError(
                "no parameter of this model is stepped by this optimizer: give the model that it was made for, no copy"
            )
        found: dict[str, Any] = {}
        for name, tensor in held.items():
            value = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
            place = places.get(id(tensor))
            if place is not None and (isinstance(tensor, MCTensor) or self.state.get(tensor)):
                plan = self._find_valid_plan(*place)
                parts = [*(part.contiguous() for part in plan.payloads), *read_auxiliary_tensors(plan)]
                decoded = plan.spec.update.read(plan.spec.store, parts)
                decoded = decoded * tensor.scale if plan.spec.scaled else decoded.clone()
                found[name] = place_like(decoded, value)
            elif isinstance(value, (ScaledTensor, MCTensor)):
                found[name] = value.decode(torch.float32)
            elif isinstance(value, torch.Tensor):
                is_weight = value.is_floating_point() and not name.endswith(EXTRA_STATE_SUFFIX)
                found[name] = value.to(torch.float32 if is_weight else value.dtype, copy=True)
            else:
                found[name] = value
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
            raise ValueError(f"the state_dict {name_differences(missing, foreign)}: give one with the model's names")
        extra = {names[name]: state_dict.pop(name) for name in tuple(state_dict) if name.endswith(EXTRA_STATE_SUFFIX)}
        wrong = [name for name, value in state_dict.items() if own[name].shape != getattr(value, "shape", None)]
        if wrong:
            raise ValueError(f"{listed(wrong)} are not of the model's shapes: give a state_dict of this model")
        places = {id(parameter): (group, k) for group, k, parameter in walk_model_parameters(self)}
        if not any(id(tensor) in places for tensor in own.values()):
            raise ValueError(
                f"the optimizer holds none of the parameters of this {type(model).__name__}, and nothing of their low "
                "bits: give the model that it steps"
            )
        with torch.no_grad():
            for name, value in state_dict.items():
                if id(own[name]) not in places:
                    own[name].copy_(value)
                    continue
                plan = self._find_valid_plan(*places[id(own[name])])
                value = local(value.detach()).float().contiguous()
                if plan.spec.scaled:
                    scale = choose_weight_scale(plan.spec.store.dtype, own[name].scale.item(), finite_amax(value))
                    own[name].scale.fill_(scale)
                    value = value / scale
                set_weight(plan, value)
            # Not by model.load_state_dict, whose hooks may ask for all that a model saves.
            for path, module in model.named_modules() if extra else ():
                name = f"{path}.{EXTRA_STATE_SUFFIX}".lstrip(".")
                if name in extra:
                    module.set_extra_state(extra[name])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle, without the caches."""
        self._follow_group_edits()
        state: dict[str, Any] = super().__getstate__()
        held = state["state"] = state["state"].copy()
        for group, position, parameter in walk_model_parameters(self):
            saved = self._auxiliary_tensors_to_save(group, position) if held.get(parameter) else {}
            if CHECKSUMS_KEY in saved:
                held[parameter] = {**held[parameter], **saved}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from `__getstate__`."""
        super().__setstate__(state)
        self._create_caches()
        for number, group in enumerate(self.param_groups):
            refuse_other_random_stream(f"the pickled param group {number}", "that group before it is pickled", group)


def _reset_states(plan: ParameterPlan, group: Mapping) -> None:
    """Reset the states of a parameter to those before its first step."""
    factors = [plan.tensors[name] for name in plan.spec.factor_names]
    for tensor in (tensor for state in (*plan.states, factors) for tensor in state):
        tensor.zero_()
    set_initial_values(plan.spec, group, plan.tensors)
    plan.state["step"] = 0
    plan.state.pop(BEGUN, None)


def _place_like_parameter(name: str, value: object, state: Mapping, parameter: torch.Tensor) -> object:
    """Return a state tensor as a DTensor if its parameter is one, so that distributed checkpoints can re-shard it."""
    if name == CHECKSUMS_KEY and isinstance(value, torch.Tensor):
        return place_checksums(value, parameter)
    if not is_dtensor(parameter) or not isinstance(value, torch.Tensor) or local(value) is not value:
        return value
    if value.shape == local(parameter).shape:
        return place_like(value, parameter)
    slot = name.removesuffix("_scale").removesuffix("_packed")
    codes, packed = state.get(f"{slot}_codes"), state.get(f"{slot}_packed")
    if packed is not None:
        block = 2 if name.endswith("_packed") else find_packed_block_length(packed, value)
    elif codes is not None:
        block = find_block_length(codes, value)
    else:
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    whole = scale_shape(parameter.shape, block)
    stride = torch.empty(whole, dtype=value.dtype, device="meta").stride()
    return DTensor.from_local(value, mesh, placements, shape=whole, stride=stride, run_check=False)


def _make_group_plain(group: dict) -> dict:
    plain = {**group, VERSION_KEY: read_own_version()}
    update, states, fmt = group["weight_update"], group["state_dtype"], group["format"]
    plain["weight_update"] = update.to_dict() if isinstance(update, WeightUpdate) else update
    plain["state_dtype"] = _make_state_choice_plain(states)
    plain["format"] = fmt.name if isinstance(fmt, Format) else fmt
    plain["param_dtype"] = None if group["param_dtype"] is None else str(group["param_dtype"]).removeprefix("torch.")
    return plain


def _make_state_choice_plain(given: StateChoice) -> object:
    if isinstance(given, Mapping):
        return {name: _make_state_choice_plain(value) for name, value in given.items()}
    if given is None:
        return None
    state = make_state(given, torch.float32)
    dtype = state.dtype if isinstance(state.dtype, str) else str(state.dtype).removeprefix("torch.")
    return {"dtype": dtype, "rounding": state.rounding, "block": state.block}
