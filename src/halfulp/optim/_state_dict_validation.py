"""Validation of a state_dict before anything of it is used, and its states in the dtypes of the optimizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping

import torch

from .._messages import name_differences
from ..mctensor import MCTensor
from ..rounding._random_bits import STREAM_VERSION
from ..scaled import ScaledTensor
from ._group_options import check_group_options, read_own_version
from .parameters._local_tensors import local
from .parameters._parameter_plan import ParameterPlan
from .parameters._random_identity import identities_of, plain_names
from .parameters._state_tensors import (
    ABSENT_STATE,
    check_codec_version,
    decode_saved_state,
    find_saved_tensor,
    set_initial_values,
)
from .rules._update_rule import StateSlot
from .states._int8_blocks import scale_shape
from .states._state import Codec
from .weight_updates._weight_update import find_weight_update

# Options that torch.optim's groups got later than others, and what older files that lack them mean.
_LATER_OPTIONS = {
    **dict.fromkeys(("maximize", "nesterov", "amsgrad", "decoupled_weight_decay"), False),
    **dict.fromkeys(("capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused")),
}
# Options by which the file of another rule is known.
_RULE_OPTIONS = {"lr", "betas", "eps", "momentum", "dampening", "weight_decay", "alpha", "centered", "rho", "etas"}
_RULE_OPTIONS |= {"lr_decay", "momentum_decay", "initial_accumulator_value", "step_sizes", "max_iter", "history_size"}
_RULE_OPTIONS |= {"lambd"}
_HALFULP_OPTIONS = {"weight_update", "state_dtype", "param_dtype", "format", "seed", "report_interval", "identities"}
# In a saved group: the version of this library that saved it.
VERSION_KEY = "halfulp"
_NOT_LOADED = ("params", "state_dtype", "param_dtype", "format", "report_interval", "random_stream", VERSION_KEY)


def check_saved_groups(
    groups: list[dict], state_dict: object, check_numbers: Callable[[dict], None], defaults: Mapping
) -> list[dict]:
    """Return the options that each group takes from a state_dict; raise ValueError if it does not fit these groups.

    `check_numbers` is the optimizer's own check of a group's hyper-parameters.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no optimizer state_dict: it needs the keys 'state' and 'param_groups'")
    saved = state_dict["param_groups"]
    grouped = isinstance(saved, list) and all(isinstance(group, Mapping) for group in saved)
    if not grouped or not all(isinstance(group.get("params"), list) for group in saved):
        raise ValueError("this is no optimizer state_dict: 'param_groups' must be a list of groups with 'params'")
    sizes, own = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != own:
        raise ValueError(f"the state_dict has groups of {sizes} parameters, this optimizer groups of {own}")
    numbers = [number for group in saved for number in group["params"]]
    states = state_dict["state"]
    if not isinstance(states, Mapping) or any(isinstance(key, int) for key in states.keys() - set(numbers)):
        raise ValueError("this is no optimizer state_dict: 'state' must hold states of parameters in 'param_groups'")
    _refuse_newer_version(saved)
    for mine, theirs in zip(groups, saved):
        _check_group(mine, theirs, defaults)
    return [_read_loaded_options(number, *pair, check_numbers) for number, pair in enumerate(zip(groups, saved))]


def refuse_confusing_keys(state: Mapping) -> None:
    """Raise ValueError for entries of the user's own whose keys a file could not tell from parameters' numbers."""
    for key in state:
        if isinstance(key, int):
            raise ValueError(
                f"optimizer.state[{key!r}] is an entry of your own, but a state_dict numbers the states of its "
                f"parameters: a file could not tell them apart; use another key, such as 'my_{key}'"
            )


def is_halfulp_file(groups: list[dict], saved: list[Mapping]) -> bool:
    """Return whether an optimizer of this library saved some groups, for an optimizer with groups of its own.

    Without names the file holds identities. A trainer that saves by name leaves the names themselves out of groups.
    """
    named = any("param_names" in group for group in groups)
    return all(
        "identities" in group or ("weight_update" in group and (named or "param_names" in group)) for group in saved
    )


def _is_keyed_by_name(saved: Mapping) -> bool:
    """Return whether a saved group's parameters are names, which torch.distributed.checkpoint puts into our order.

    What else the group says of its parameters, one by one, may be that of other parameters.
    """
    return bool(saved["params"]) and all(isinstance(key, str) for key in saved["params"])


def _refuse_newer_version(saved: list[Mapping]) -> None:
    """Raise ValueError for a file of a later minor version, which may hold what this one does not know."""
    own = read_own_version()
    for version in (str(group[VERSION_KEY]) for group in saved if VERSION_KEY in group):
        if _split_version(own) < _split_version(version):
            raise ValueError(
                f"halfulp {version} saved the state_dict, and this is {own}: load it with that (pip install "
                f"'halfulp>={version}'), or take the weights alone over, by float32_state_dict there and "
                "load_float32_state_dict here"
            )


def _split_version(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def refuse_other_random_stream(what: str, place: str, saved: Mapping) -> None:
    """Raise ValueError for what was saved with random bits of another version of the stream."""
    version = saved.get("random_stream", 1)
    if "weight_update" in saved and version != STREAM_VERSION:
        raise ValueError(
            f"{what} was saved under version {version!r} of the stream of random bits, known is "
            f"{STREAM_VERSION}: its stochastic rounding would go on with other bits than the saved run's. To accept "
            f"that, put 'random_stream': {STREAM_VERSION} into {place}; to go on with the same bits, "
            "use the halfulp that saved it"
        )


def read_saved_step(state: Mapping, name: str) -> int:
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


def _check_group(mine: dict, theirs: Mapping, defaults: Mapping) -> None:
    """Raise ValueError for a saved group of another rule, of other names, or under another weight update."""
    unknown = sorted(_RULE_OPTIONS & theirs.keys() - mine.keys())
    rules = (defaults.keys() | _RULE_OPTIONS) & mine.keys()
    lacking = sorted(rules - theirs.keys() - _HALFULP_OPTIONS - _LATER_OPTIONS.keys())
    if unknown or lacking:
        raise ValueError(f"the state_dict is another optimizer's: a group of it {name_differences(lacking, unknown)}")
    by_name = _is_keyed_by_name(theirs)
    names, other = mine.get("param_names"), theirs.get("params" if by_name else "param_names")
    if other is not None and (not isinstance(other, list | tuple) or len(other) != len(mine["params"])):
        raise ValueError(f"the state_dict has param_names={other!r}, which are not one name per parameter")
    both = list(zip(plain_names(names), plain_names(other), strict=True)) if names and other else []
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


def _read_loaded_options(number: int, mine: dict, theirs: Mapping, check_numbers: Callable[[dict], None]) -> dict:
    """Return a group's options after loading, checked as those of a new group are."""
    taken = {key: copy.deepcopy(value) for key, value in theirs.items() if key not in _NOT_LOADED}
    taken = {**{key: value for key, value in _LATER_OPTIONS.items() if key in mine}, **taken}
    if "param_names" in taken:
        taken["param_names"] = mine.get("param_names") or list(
            theirs["params"] if _is_keyed_by_name(theirs) else taken["param_names"]
        )
    names = mine.get("param_names") or taken.get("param_names")
    if names and ("identities" not in taken or _is_keyed_by_name(theirs)):
        taken["identities"] = identities_of({"param_names": names})
    trial = {**mine, **taken}
    try:
        check_group_options(trial)
        check_numbers(trial)
        identities = trial["identities"]
        if len(identities) != len(mine["params"]) or not all(isinstance(i, int) and 0 <= i < 2**63 for i in identities):
            raise ValueError(
                "identities, which key random bits, must be one whole number per parameter: a file that is split or "
                "regrouped needs names, optimizers made from model.named_parameters()"
            )
    except (TypeError, ValueError) as error:
        raise ValueError(f"param group {number} of the state_dict: {error}") from error
    return {key: trial[key] for key in taken}


def fit_saved_state(
    plan: ParameterPlan, group: Mapping, codec: Codec, rule_state: StateSlot, names: tuple[str, ...], state: Mapping
) -> dict[str, torch.Tensor]:
    """Return one state of the rule from saved tensors: bit for bit if the dtypes agree, else through float32."""
    given = find_saved_tensor(state, rule_state.name)
    if given is ABSENT_STATE:
        raise ValueError(
            f"state of parameter {plan.name} lacks {rule_state.name!r}: another optimizer saved it ({sorted(state)})"
        )
    if isinstance(given, int):
        raise ValueError(
            f"state {rule_state.name!r} of parameter {plan.name} was saved in 8-bit codes of version {given}, but "
            f"without the codes {rule_state.name + '_codes'!r}: torch.distributed.checkpoint leaves out what this "
            "optimizer does not keep; load the file into one with state_dtype='8bit', and the state_dict of that here"
        )
    if isinstance(given, (ScaledTensor, MCTensor)):
        state = {**state, rule_state.name: (given := given.decode(torch.float32))}
    if given is None and rule_state.name == "momentum_buffer":
        new = {name: torch.zeros_like(plan.tensors[name]) for name in names}
        set_initial_values(plan.spec, group, new)
        return new
    own, saved = [plan.tensors[name] for name in names], [local(state.get(name)) for name in names]
    layouts = [(one.dtype, one.shape) if isinstance(one, torch.Tensor) else None for one in saved]
    if layouts == [(mine.dtype, mine.shape) for mine in own]:
        check_codec_version(rule_state.name, state)
        return {name: state[name] for name in names}
    is_packed = f"{rule_state.name}_packed" in state
    shape = scale_shape(torch.Size(plan.shape), 2) if is_packed else plan.shape
    like = torch.empty(shape, dtype=torch.float32, device="meta")
    given = check_saved_shape(plan, rule_state.name, given, like, exact=False)
    value = decode_saved_state(local(given), state, rule_state)
    fresh = [torch.zeros_like(mine) for mine in own]
    codec.encode(fresh, value.to(fresh[0].device).contiguous(), None)
    return dict(zip(names, fresh))


def check_saved_shape(plan: ParameterPlan, name: str, given: object, own: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return a given state tensor; raise ValueError for another shape, or dtype where that counts."""
    if not isinstance(given, torch.Tensor) or local(given).shape != own.shape:
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"state {name!r} of parameter {plan.name} has shape {shape}, {tuple(own.shape)} is needed")
    if exact and local(given).dtype != own.dtype:
        raise ValueError(f"state {name!r} of parameter {plan.name} is {local(given).dtype}, {own.dtype} is needed")
    return given
