"""What a state_dict must be before anything of it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from ._options import check_group
from ._weight_update import weight_update

_TORCH_ONLY = {"foreach", "capturable", "fused", "differentiable", "decoupled_weight_decay", "maximize", "amsgrad"}
_ADDED = {"initial_lr", "last_lr", "param_names"}
_OURS = {"weight_update", "state_dtype", "param_dtype", "format", "seed", "report_interval", "identities"}
_KEPT = ("params", "state_dtype", "param_dtype", "format", "report_interval")


def checked_groups(groups: list[dict], state_dict: object, check_numbers: Callable[[dict], None]) -> list[dict]:
    """The options that each group takes from a state_dict, if it can belong to these groups.

    Args:
        groups: of the optimizer that loads.
        state_dict: what was given to it.
        check_numbers: the optimizer's own check of a group's hyper-parameters.

    Raises:
        ValueError: it cannot, with the reason.
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
    if not isinstance(state_dict["state"], Mapping) or not state_dict["state"].keys() <= set(numbers):
        raise ValueError("this is no optimizer state_dict: 'state' must hold states of parameters in 'param_groups'")
    for mine, theirs in zip(groups, saved):
        _check_names(mine, theirs)
        _check_updates(mine, theirs)
    return [_options(number, *pair, check_numbers) for number, pair in enumerate(zip(groups, saved))]


def checked_state(state_dict: Mapping, number: object) -> Mapping:
    """The saved state of one parameter, empty where there is none.

    Raises:
        ValueError: it is no mapping.
    """
    state = state_dict["state"].get(number, {})
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of parameter {number} is {type(state).__name__}, not a dict: the file is damaged")
    return state


def whole_step(state: Mapping, name: str) -> int:
    """The saved step number.

    Raises:
        ValueError: it is no whole number.
    """
    given = state.get("step", 0)
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"state of parameter {name}: step={given!r} is not a whole number")
    return int(value)


def _check_names(mine: dict, theirs: Mapping) -> None:
    unknown = sorted(theirs.keys() - mine.keys() - _TORCH_ONLY - _ADDED)
    lacking = sorted(mine.keys() - theirs.keys() - _OURS - _ADDED - {"decoupled_weight_decay"})
    if unknown or lacking:
        raise ValueError(f"the state_dict is another optimizer's: its groups have {unknown} and lack {lacking}")
    names, other = mine.get("param_names"), theirs.get("param_names")
    if names and other and list(names) != list(other):
        differing = [f"{a} / {b}" for a, b in zip(names, other) if a != b]
        raise ValueError(f"the state_dict names other parameters, in order: {differing[:3]}")


def _check_updates(mine: dict, theirs: Mapping) -> None:
    if "weight_update" not in theirs:
        return
    saved, own = (None if g["weight_update"] is None else weight_update(g["weight_update"]) for g in (theirs, mine))
    if saved != own:
        raise ValueError(
            f"the state_dict was saved with weight_update={saved!r}, this optimizer has {own!r}: make it with the "
            "same, or carry the weights over with float32_state_dict and load_float32_state_dict"
        )


def _options(number: int, mine: dict, theirs: Mapping, check_numbers: Callable[[dict], None]) -> dict:
    """A group's options as they will be, checked as those of a new group are."""
    taken = {key: copy.deepcopy(value) for key, value in theirs.items() if key in mine and key not in _KEPT}
    trial = {**mine, **taken}
    try:
        check_group(trial)
        check_numbers(trial)
        identities = trial["identities"]
        if len(identities) != len(mine["params"]) or not all(isinstance(i, int) and 0 <= i < 2**63 for i in identities):
            raise ValueError("identities must be one whole number per parameter")
    except (TypeError, ValueError) as error:
        raise ValueError(f"param group {number} of the state_dict: {error}") from error
    return {key: trial[key] for key in taken}
