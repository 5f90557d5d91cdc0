"""Saving and loading: every tensor in its own dtype, float32 weights in and out, and torch.optim's states."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_SUFFIX
from torch.utils._pytree import tree_map_only

from .._messages import quote, write_differing_names
from ..kernels import keeping_subnormals
from ..mctensor import MCTensor
from ..rounding._random_bits import STREAM_VERSION
from ..scaled import ScaledTensor
from ._float32 import read_float32_weights
from ._group_options import check_group_options, get_halfulp_version
from .parameters._local_tensors import get_local, is_dtensor, wrap_like_dtensor
from .parameters._narrow_groups import read_parameter_name, walk_group_parameters
from .parameters._narrowing import refuse_values_beyond
from .parameters._outside_writes import (
    CHECKSUMS_KEY,
    PAYLOAD_IDENTITY_KEYS,
    make_checksum_entries,
    read_valid_auxiliary_tensors,
    record_loaded_auxiliary_tensors,
    set_weight,
    wrap_checksums_like_parameter,
)
from .parameters._parameter_plan import ParameterPlan
from .parameters._random_identity import list_stream_ids, strip_wrapper_prefixes
from .parameters._state_tensors import (
    STATE_NAME_SUFFIXES,
    STEPS_BEFORE_STATES_KEY,
    check_codec_version,
    is_auxiliary_tensor_name,
    set_initial_state_values,
)
from .rules._update_rule import StateSlot
from .states._codec import compute_finite_amax
from .states._int8_blocks import CODEC_VERSION
from .states._state import Codec
from .step._batch import PlanCache
from .step._scales import fit_weight_scale
from .weight_updates._weight_update import WeightUpdate, find_weight_update

# Options that torch.optim's groups got later than others, and what older files that lack them mean.
_DEFAULTS_OF_LATER_TORCH_OPTIONS = {
    **dict.fromkeys(("maximize", "nesterov", "amsgrad", "decoupled_weight_decay"), False),
    **dict.fromkeys(("capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused")),
}
# Options by which the file of another rule is known.
_TORCH_HYPERPARAMETER_NAMES = {
    *("lr", "betas", "eps", "momentum", "dampening", "weight_decay", "alpha", "centered", "rho", "etas", "lr_decay"),
    *("momentum_decay", "initial_accumulator_value", "step_sizes", "max_iter", "history_size", "lambd"),
}
# What a group of this library holds beside a rule's hyper-parameters.
HALFULP_OPTION_NAMES = {
    *("weight_update", "state_dtype", "param_dtype", "format"),
    *("seed", "report_interval", "identities"),
}
# In a saved group: the version of this library that saved it.
VERSION_GROUP_KEY = "halfulp"
_UNLOADED_GROUP_KEYS = {
    *("params", "state_dtype", "param_dtype", "format"),
    *("report_interval", "random_stream", VERSION_GROUP_KEY),
}


class CheckpointMixin(torch.optim.Optimizer):
    """state_dict, load_state_dict and their float32 counterparts, for Optimizer, which has the rest."""

    _plans: PlanCache
    # The message where a copy would step in another way.
    _copy_refusal_message = ""

    if TYPE_CHECKING:

        def _get_valid_plan(self, group: dict[str, Any], position: int) -> ParameterPlan: ...
        def _update_edited_groups(self) -> None: ...
        def _invalidate_plans(self) -> None: ...
        def _create_caches(self) -> None: ...
        def _check_hyperparameters(self, group: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain data as torch.optim does: loads with weights_only, every state in its own dtype.

        Raises:
            ValueError: an entry of `state` under a number, or of a parameter that is in no group.
        """
        self._update_edited_groups()
        members = {id(parameter) for _, _, parameter in walk_group_parameters(self)}
        for key in self.state:
            if isinstance(key, int):
                raise ValueError(
                    f"optimizer.state[{key!r}] is an entry of your own, but a state_dict numbers the states of its "
                    f"parameters: a file could not tell them apart; use another key, such as 'my_{key}'"
                )
            if isinstance(key, torch.Tensor) and id(key) not in members:
                raise ValueError(
                    f"optimizer.state has the states of a parameter of shape {tuple(key.shape)}, which is in no group "
                    "any more: put it back into one, or delete its entry"
                )
        return super().state_dict()

    def _complete_state_dict(self, saved: dict[str, Any]) -> None:
        """Put into a state_dict of torch.optim's what it lacks, before the hooks of others."""
        for group, position, parameter, number in walk_saved_parameters(self.param_groups, saved["param_groups"]):
            if number not in saved["state"]:
                continue
            state = dict(saved["state"][number])
            if self.state.get(parameter):
                state |= self._read_auxiliary_tensors_to_save(group, position)
            # A reader that knows no codes finds a number where it wants a tensor, and stops.
            versions = {name.removesuffix("_codes"): CODEC_VERSION for name in state if name.endswith("_codes")}
            if is_dtensor(parameter):
                state = _convert_states_to_dtensors(state, parameter, self._plans.get(parameter))
            saved["state"][number] = versions | state
        for group in saved["param_groups"]:
            group[VERSION_GROUP_KEY] = get_halfulp_version()
            if isinstance(group["weight_update"], WeightUpdate):
                group["weight_update"] = group["weight_update"].to_dict()
            convert_numpy_numbers(group)
            # In words, as they are not loaded; torch.distributed.checkpoint wants in a file whatever a group has.
            for name in ("state_dtype", "param_dtype", "format"):
                group[name] = None if group[name] is None else str(getattr(group[name], "name", group[name]))

    def _read_auxiliary_tensors_to_save(self, group: dict, position: int) -> dict[str, object]:
        """Return auxiliary tensors, valid also after writes from outside, and what identifies their payload."""
        try:
            plan = self._get_valid_plan(group, position)
        except (ValueError, TypeError, NotImplementedError):  # its dtype has changed since; a step says why
            return {}
        if plan.payload_version is None:
            return {}
        return {
            **dict(zip(plan.spec.auxiliary_names, read_valid_auxiliary_tensors(plan))),
            **make_checksum_entries(plan),
        }

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
        self._load_state_dict_without_hooks(state_dict)
        for after in tuple(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _load_state_dict_without_hooks(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict, between pre and post hooks."""
        self._update_edited_groups()
        options = self._read_saved_options(state_dict)
        given = []
        for group, position, _, number in walk_saved_parameters(self.param_groups, state_dict["param_groups"]):
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
        self._invalidate_plans()
        is_own = is_saved_by_halfulp(before, state_dict["param_groups"])
        try:
            trial = [(*one, self._convert_saved_tensors(*one, is_own)) for one in given]
            for number, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"])):
                plans = (self._plans.get(parameter) for parameter in group["params"])
                if any(plan is not None and plan.spec.draws_random_bits for plan in plans):
                    refuse_other_random_stream_version(f"param group {number}", "the groups of the state_dict", saved)
        except Exception:
            for group, old in zip(self.param_groups, before):
                group.clear()
                group.update(old)
            for parameter in self.state.keys() - known:
                del self.state[parameter]
            self._invalidate_plans()
            raise
        for group, position, state, tensors in trial:
            parameter = group["params"][position]
            plan = self._plans.get(parameter)
            if plan is None or (not state and is_own):
                self.state.pop(parameter, None)
                self._plans.pop(parameter)
                continue
            held = plan.state
            if not state:  # of a file of torch.optim's, which has no auxiliary tensors: they stay
                for tensor in plan.stored_tensors[len(plan.spec.auxiliary_names) :]:
                    tensor.zero_()
                set_initial_state_values(plan.spec, group, plan.tensors)
                held["step"] = 0
                held.pop(STEPS_BEFORE_STATES_KEY, None)
                continue
            for name, value in tensors.items():
                if name in plan.spec.tensor_names:
                    get_local(held[name]).copy_(get_local(value))
                else:
                    held[name] = copy.deepcopy(value)
            held["step"] = _read_saved_step(state, "")
            held.pop(STEPS_BEFORE_STATES_KEY, None)
            if isinstance(begun := state.get(STEPS_BEFORE_STATES_KEY), int) and 0 < begun <= held["step"]:
                held[STEPS_BEFORE_STATES_KEY] = begun
            record_loaded_auxiliary_tensors(plan, state)
        for key in [key for key in self.state if not isinstance(key, torch.Tensor)]:
            del self.state[key]
        numbers = {number for saved in state_dict["param_groups"] for number in saved["params"]}
        self.state.update({key: value for key, value in state_dict["state"].items() if key not in numbers})

    def _read_saved_options(self, state_dict: Mapping[str, Any]) -> list[dict]:
        """Return the options that each group takes from a state_dict; raise ValueError if it does not fit."""
        check_is_state_dict(state_dict)
        saved, states = state_dict["param_groups"], state_dict["state"]
        sizes, own = ([len(group["params"]) for group in groups] for groups in (saved, self.param_groups))
        if sizes != own:
            raise ValueError(f"the state_dict has groups of {sizes} parameters, this optimizer groups of {own}")
        numbers = {number for group in saved for number in group["params"]}
        if not isinstance(states, Mapping) or any(isinstance(key, int) for key in states.keys() - numbers):
            raise ValueError(
                "this is no optimizer state_dict: 'state' must hold states of parameters in 'param_groups'"
            )
        own_version = get_halfulp_version()
        for version in (str(group[VERSION_GROUP_KEY]) for group in saved if VERSION_GROUP_KEY in group):
            ours, theirs = ([int(number) for number in re.findall(r"\d+", one)[:2]] for one in (own_version, version))
            if ours < theirs:  # a later minor version may write what this one does not know
                raise ValueError(
                    f"halfulp {version} saved the state_dict, and this is {own_version}: load it with that (pip "
                    f"install 'halfulp>={version}'), or take the weights alone over, by float32_state_dict there and "
                    "load_float32_state_dict here"
                )
        pairs = [*zip(self.param_groups, saved)]
        for mine, theirs in pairs:
            _check_saved_group(mine, theirs, self.defaults)
        return [self._read_saved_group_options(number, *pair) for number, pair in enumerate(pairs)]

    def _read_saved_group_options(self, number: int, mine: dict, theirs: Mapping) -> dict:
        """Return a group's options after loading, checked as those of a new group are."""
        taken = {key: value for key, value in _DEFAULTS_OF_LATER_TORCH_OPTIONS.items() if key in mine}
        taken |= {key: copy.deepcopy(value) for key, value in theirs.items() if key not in _UNLOADED_GROUP_KEYS}
        if "param_names" in taken:
            names: Any = theirs["params"] if _is_keyed_by_name(theirs) else taken["param_names"]
            taken["param_names"] = mine.get("param_names") or list(names)
        if mine.get("param_names") or "param_names" in taken:
            taken.pop("identities", None)
        trial = {**mine, **taken}
        try:
            check_group_options(trial)
            self._check_hyperparameters(trial)
            identities = list_stream_ids(trial)
            is_keyed = all(isinstance(one, int) and 0 <= one < 2**63 for one in identities)
            if len(identities) != len(mine["params"]) or not is_keyed:
                raise ValueError(
                    "identities, which key random bits, must be one whole number per parameter: a file that is split "
                    "or regrouped needs names, optimizers made from model.named_parameters()"
                )
        except (TypeError, ValueError) as error:
            raise ValueError(f"param group {number} of the state_dict: {error}") from error
        return {key: trial[key] for key in taken}

    def _convert_saved_tensors(self, group: dict, position: int, state: Mapping, is_own: bool) -> dict[str, Any]:
        """Return the saved tensors in the dtypes and layouts of this optimizer, and the user's own entries."""
        if not state:
            return {}
        plan = self._get_valid_plan(group, position)
        _read_saved_step(state, plan.name)
        fitted: dict[str, Any] = {}
        used = {"step", STEPS_BEFORE_STATES_KEY, *plan.spec.rule.follows_from_step, *PAYLOAD_IDENTITY_KEYS}
        for codec, rule_state, names in zip(plan.spec.codecs, plan.spec.rule.states, plan.spec.state_tensor_names):
            used |= {f"{rule_state.name}{suffix}" for suffix in STATE_NAME_SUFFIXES}
            fitted |= _convert_saved_rule_state(plan, group, codec, rule_state, names, state)
        for name in plan.spec.factor_names:
            used.add(name)
            fitted[name] = _check_saved_shape(plan, name, state.get(name), plan.tensors[name], exact=False).float()
        for name in plan.spec.auxiliary_names:
            used.add(name)
            if name in state:
                fitted[name] = _check_saved_shape(plan, name, state[name], plan.tensors[name], exact=True)
            elif is_own and isinstance(state["step"], int):  # others' states under these groups count in tensors
                raise ValueError(
                    f"state of parameter {plan.name} lacks {name!r}: it was saved by another weight update"
                )
        foreign = [key for key in state if key not in used and state[key] is not None]
        others = [key for key in foreign if is_auxiliary_tensor_name(key) or key.startswith("base.")]
        if others:
            raise ValueError(
                f"state of parameter {plan.name} holds {quote(others)}, which {type(self).__name__} with "
                f"weight_update={plan.spec.update.name!r} does not keep: load it into the optimizer that saved it"
            )
        # The user's own, and states that an option of the group has switched off, which stay, as in torch.optim.
        device = get_local(plan.parameter).device
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
        places = {id(parameter): (group, k) for group, k, parameter in walk_group_parameters(self)}
        held = model.state_dict(keep_vars=True)
        if not any(id(t) in places for t in held.values()) and any(isinstance(t, Parameter) for t in held.values()):
            raise ValueError(
                "no parameter of this model is stepped by this optimizer: give the model that it was made for, no copy"
            )
        found: dict[str, Any] = {}
        for name, tensor in held.items():
            found[name] = value = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
            place = places.get(id(tensor))
            if place is not None and (isinstance(tensor, MCTensor) or self.state.get(tensor)):
                plan = self._get_valid_plan(*place)
                decoded = read_float32_weights([plan])[0]
                found[name] = wrap_like_dtensor(decoded * tensor.scale if plan.spec.scaled else decoded, value)
            elif isinstance(value, (ScaledTensor, MCTensor)):
                found[name] = value.decode(torch.float32)
            else:
                found[name] = copy_as_float32(name, value)
        return found

    @keeping_subnormals()
    def load_float32_state_dict(self, model: torch.nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set the model from float32 weights, the bits that its parameters cannot hold going into auxiliary tensors.

        What torch.compile and DistributedDataParallel put before names counts for nothing, in the file and here.

        Raises:
            ValueError: missing or unexpected names, other shapes, values that a narrow parameter would show as
                infinite, or a model that is not stepped here; nothing is changed.
        """
        own = model.state_dict(keep_vars=True)
        names, own = dict(zip(strip_wrapper_prefixes(own), own)), dict(zip(strip_wrapper_prefixes(own), own.values()))
        state_dict = dict(zip(strip_wrapper_prefixes(state_dict), state_dict.values()))
        missing, foreign = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        if missing or foreign:
            raise ValueError(
                f"the state_dict {write_differing_names(missing, foreign)}: give one with the model's names"
            )
        extra = {names[name]: state_dict.pop(name) for name in tuple(state_dict) if name.endswith(EXTRA_STATE_SUFFIX)}
        shapes = {name: (own[name].shape, get_local(own[name]).shape) for name in state_dict}
        wrong = [
            name
            for name, value in state_dict.items()
            if not isinstance(value, torch.Tensor) or shapes[name] != (value.shape, get_local(value).shape)
        ]
        if wrong:
            raise ValueError(
                f"{quote(wrong)} are no tensors of the model's shapes: give a state_dict of this model, for sharded "
                "parameters with values that torch.distributed.tensor.distribute_tensor has sharded as they are"
            )
        places = {id(parameter): (group, k) for group, k, parameter in walk_group_parameters(self)}
        if not any(id(tensor) in places for tensor in own.values()):
            raise ValueError(
                f"the optimizer holds none of the parameters of this {type(model).__name__}, and nothing of their low "
                "bits: give the model that it steps"
            )
        for name, value in state_dict.items():
            if id(own[name]) in places and not isinstance(own[name], MCTensor | ScaledTensor):
                refuse_values_beyond(value, own[name].dtype, name, "give the model parameters of a wider dtype")
        with torch.no_grad():
            for name, value in state_dict.items():
                if id(own[name]) not in places:
                    own[name].copy_(value)
                    continue
                plan = self._get_valid_plan(*places[id(own[name])])
                value = get_local(value.detach()).float().contiguous()
                if plan.spec.scaled:
                    given = (np.float64(number) for number in (own[name].scale.item(), compute_finite_amax(value), 0.0))
                    scale, _ = fit_weight_scale(plan.spec.store.dtype, *given)
                    own[name].scale.fill_(scale.item())
                    value = value / scale.item()
                set_weight(plan, value)
            # Not by model.load_state_dict, whose hooks may ask for all that a model saves.
            for path, module in model.named_modules() if extra else ():
                name = f"{path}.{EXTRA_STATE_SUFFIX}".lstrip(".")
                if name in extra:
                    module.set_extra_state(extra[name])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle, without the caches and hooks."""
        if self._copy_refusal_message:
            raise NotImplementedError(self._copy_refusal_message)
        self._update_edited_groups()
        state: dict[str, Any] = super().__getstate__()
        held = state["state"] = state["state"].copy()
        for group, position, parameter in walk_group_parameters(self):
            saved = self._read_auxiliary_tensors_to_save(group, position) if held.get(parameter) else {}
            if CHECKSUMS_KEY in saved:
                held[parameter] = {**held[parameter], **saved}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from `__getstate__`."""
        super().__setstate__(state)
        self._create_caches()
        self._invalidate_plans()
        complete_state_dict: Any = type(self)._complete_state_dict
        self.register_state_dict_post_hook(complete_state_dict)
        for number, group in enumerate(self.param_groups):
            refuse_other_random_stream_version(
                f"the pickled param group {number}", "that group before it is pickled", group
            )


def convert_numpy_numbers(group: dict[str, Any]) -> None:
    """Make NumPy's numbers in a saved group, as schedules may write them, Python's, which weights_only loads."""
    kind: Any = np.generic  # an abstract class
    group.update(tree_map_only(kind, lambda number: number.item(), dict(group)))


def copy_as_float32(name: str, value: Any) -> Any:
    """Return a copy of a plain tensor of a module's state dict, in float32 if it is a floating one; others as given."""
    if not isinstance(value, torch.Tensor):
        return value
    is_weight = value.is_floating_point() and not name.endswith(EXTRA_STATE_SUFFIX)
    return value.detach().to(torch.float32 if is_weight else value.dtype, copy=True)


def walk_saved_parameters(
    groups: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], int, torch.Tensor, Any]]:
    """Yield group, position, parameter and its number in a file."""
    for group, packed in zip(groups, saved):
        for position, (parameter, number) in enumerate(zip(group["params"], packed["params"])):
            yield group, position, parameter, number


def _convert_states_to_dtensors(state: Mapping, parameter: Any, plan: ParameterPlan | None) -> dict[str, Any]:
    """Return state tensors as DTensors if their parameter is one, so that distributed checkpoints can re-shard them."""
    from torch.distributed.tensor import DTensor

    shapes: dict[str, Any] = {}
    if plan is not None:
        shapes = dict.fromkeys(plan.spec.factor_names)  # the same on every rank
        for codec, slot in zip(plan.spec.codecs, plan.spec.rule.states):
            shapes |= {key: shape for key, (shape, _) in codec.describe_tensors(slot.name, parameter.shape).items()}
    placed = dict(state)
    for name, value in state.items():
        if name == CHECKSUMS_KEY:
            placed[name] = wrap_checksums_like_parameter(value, parameter)
        elif isinstance(value, torch.Tensor) and get_local(value) is value:
            shape = shapes.get(name, parameter.shape if value.shape == get_local(parameter).shape else None)
            if shape is not None:
                mesh, placements = parameter.device_mesh, parameter.placements
                stride = torch.empty(shape, dtype=value.dtype, device="meta").stride()
                placed[name] = DTensor.from_local(value, mesh, placements, shape=shape, stride=stride, run_check=False)
    return placed


def check_is_state_dict(state_dict: object) -> None:
    """Raise ValueError for what is no state_dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no optimizer state_dict: it needs the keys 'state' and 'param_groups'")
    groups = state_dict["param_groups"] if isinstance(state_dict["param_groups"], list) else [None]
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        raise ValueError("this is no optimizer state_dict: 'param_groups' must be a list of groups with 'params'")


def is_saved_by_halfulp(groups: list[dict], saved: list[Mapping]) -> bool:
    """Return whether an optimizer of this library saved some groups, which hold identities or are saved by name."""
    named = any("param_names" in group for group in groups)
    return all(
        "identities" in group or ("weight_update" in group and (named or "param_names" in group)) for group in saved
    )


def _is_keyed_by_name(saved: Mapping) -> bool:
    """Return whether a saved group's parameters are names: what else it lists of them may have another order."""
    return bool(saved["params"]) and all(isinstance(key, str) for key in saved["params"])


def refuse_other_random_stream_version(what: str, place: str, saved: Mapping) -> None:
    """Raise ValueError for what was saved with random bits of another version of the stream."""
    version = saved.get("random_stream", 1)
    if "weight_update" in saved and version != STREAM_VERSION:
        raise ValueError(
            f"{what} was saved under version {version!r} of the stream of random bits, known is "
            f"{STREAM_VERSION}: its stochastic rounding would go on with other bits than the saved run's. To accept "
            f"that, put 'random_stream': {STREAM_VERSION} into {place}; to go on with the same bits, "
            "use the halfulp that saved it"
        )


def _read_saved_step(state: Mapping, name: str) -> int:
    """Return the saved step number; torch's SGD saves none, but a momentum buffer implies a step."""
    given = state.get("step", int(isinstance(state.get("momentum_buffer"), torch.Tensor)))
    if given == {}:  # what torch makes of an entry that a flat state lacks
        raise ValueError(
            f"the state holds nothing of parameter {name}: it is of another model, or of other parts of it"
        )
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"state of parameter {name}: step={given!r} is not a whole number")
    return int(value)


def _check_saved_group(mine: dict, theirs: Mapping, defaults: Mapping) -> None:
    """Raise ValueError for a saved group of another rule, of other names, or under another weight update."""
    unknown = sorted(_TORCH_HYPERPARAMETER_NAMES & theirs.keys() - mine.keys())
    rules = (defaults.keys() | _TORCH_HYPERPARAMETER_NAMES) & mine.keys()
    lacking = sorted(rules - theirs.keys() - HALFULP_OPTION_NAMES - _DEFAULTS_OF_LATER_TORCH_OPTIONS.keys())
    if unknown or lacking:
        raise ValueError(
            f"the state_dict is another optimizer's: a group of it {write_differing_names(lacking, unknown)}"
        )
    by_name = _is_keyed_by_name(theirs)
    names, other = mine.get("param_names"), theirs.get("params" if by_name else "param_names")
    if other is not None and (not isinstance(other, list | tuple) or len(other) != len(mine["params"])):
        raise ValueError(f"the state_dict has param_names={other!r}, which are not one name per parameter")
    both = (
        list(zip(strip_wrapper_prefixes(names), strip_wrapper_prefixes(other), strict=True)) if names and other else []
    )
    if by_name:  # one may be the other behind the path of a part of the model
        both = [(a, b) for a, b in both if not a.endswith(f".{b}") and not b.endswith(f".{a}")]
    differing = [f"{b} for {a}" for a, b in both if a != b]
    if differing:
        raise ValueError(
            f"the state_dict names other parameters, or these in another order, such as {', '.join(differing[:3])}: "
            "give the parameters in the order of the optimizer that saved it"
        )
    if "weight_update" not in theirs:
        return
    saved, own = (one and find_weight_update(one) for one in (theirs["weight_update"], mine["weight_update"]))
    if saved != own:
        raise ValueError(
            f"the state_dict was saved with weight_update={saved!r}, this optimizer has {own!r}: make it with the "
            "same, or carry the weights over with float32_state_dict and load_float32_state_dict"
        )


def _convert_saved_rule_state(
    plan: ParameterPlan, group: Mapping, codec: Codec, rule_state: StateSlot, names: tuple[str, ...], state: Mapping
) -> dict[str, torch.Tensor]:
    """Return one state of the rule from saved tensors: bit for bit if the dtypes agree, else through float32."""
    held = [key for form in ("_codes", "_packed", "") if (key := f"{rule_state.name}{form}") in state]
    given = state[held[0]] if held else None
    if not held:
        raise ValueError(
            f"state of parameter {plan.name} lacks {rule_state.name!r}: another optimizer saved it ({sorted(state)})"
        )
    if isinstance(given, (ScaledTensor, MCTensor)):
        state = {**state, rule_state.name: (given := given.decode(torch.float32))}
    if given is None and rule_state.name == "momentum_buffer":
        new = {name: torch.zeros_like(plan.tensors[name]) for name in names}
        set_initial_state_values(plan.spec, group, new)
        return new
    own, saved = [plan.tensors[name] for name in names], [get_local(state.get(name)) for name in names]
    layouts = [(one.dtype, one.shape) if isinstance(one, torch.Tensor) else None for one in saved]
    if layouts == [(mine.dtype, mine.shape) for mine in own]:
        check_codec_version(rule_state.name, state)
        return {name: state[name] for name in names}
    stored = [key for suffix in STATE_NAME_SUFFIXES[1:] if (key := f"{rule_state.name}{suffix}") in state]
    if stored or not isinstance(given, torch.Tensor) or not given.is_floating_point():
        raise ValueError(
            f"state {rule_state.name!r} of parameter {plan.name} was saved as {quote(stored or held)}, and this "
            f"optimizer keeps {quote(list(names))}: give it the state_dtype of the optimizer that saved the file: "
            "states are converted from plain tensors alone, and torch.distributed.checkpoint reads no others"
        )
    like = torch.empty(plan.shape, dtype=torch.float32, device="meta")
    value = get_local(_check_saved_shape(plan, rule_state.name, given, like, exact=False)).float()
    fresh = [torch.zeros_like(mine) for mine in own]
    codec.encode(fresh, value.to(fresh[0].device).contiguous(), None)
    return dict(zip(names, fresh))


def _check_saved_shape(plan: ParameterPlan, name: str, given: object, own: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return a given state tensor; raise ValueError for another shape, or dtype where that counts."""
    if not isinstance(given, torch.Tensor) or get_local(given).shape != own.shape:
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"state {name!r} of parameter {plan.name} has shape {shape}, {tuple(own.shape)} is needed")
    if exact and get_local(given).dtype != own.dtype:
        raise ValueError(f"state {name!r} of parameter {plan.name} is {get_local(given).dtype}, {own.dtype} is needed")
    return given
