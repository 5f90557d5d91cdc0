"""The state of a wrapped optimizer in the state_dict of the one around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ._state_dict_validation import is_halfulp_file

BASE_PREFIX = "base."


def split_base_states(state_dict: Mapping[str, Any], groups: list[dict]) -> tuple[dict, dict]:
    """Split a state_dict into one without the wrapped optimizer's states, and these by number."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no optimizer state_dict: it needs the keys 'state' and 'param_groups'")
    states, wrapped = state_dict["state"], is_halfulp_file(groups, state_dict["param_groups"])
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
    others = {key: value for key, value in states.items() if key not in numbers}
    theirs = {key: str(key).startswith(BASE_PREFIX) or not wrapped for key in others}
    own = {key: value for key, value in others.items() if not theirs[key]}
    inner = {
        key.removeprefix(BASE_PREFIX) if isinstance(key, str) else key: value
        for key, value in others.items()
        if theirs[key]
    }
    for number in numbers & states.keys():
        state = states[number]
        if wrapped:
            own[number] = {k: v for k, v in state.items() if not k.startswith(BASE_PREFIX)}
            inner[number] = {k.removeprefix(BASE_PREFIX): v for k, v in state.items() if k.startswith(BASE_PREFIX)}
        else:
            own[number] = {"step": torch.as_tensor(float(state.get("step", 0)), dtype=torch.float32, device="cpu")}
            inner[number] = tree_map_only(
                torch.Tensor, lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, state
            )
    return {**state_dict, "state": own}, inner


def read_own_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries that an optimizer's class saves beside states and groups, by a `state_dict` of its own."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    return {name: value for name, value in optimizer.state_dict().items() if name not in ("state", "param_groups")}


def restore_own_entries(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what `read_own_entries` has saved; states and groups are restored already, and stay."""
    if not saved:
        return
    states, groups = dict(optimizer.state), list(optimizer.param_groups)
    optimizer.load_state_dict({**torch.optim.Optimizer.state_dict(optimizer), **saved})
    for group, loaded in zip(groups, optimizer.param_groups):
        group.update({name: value for name, value in loaded.items() if name != "params"})
    optimizer.param_groups[:] = groups
    optimizer.state.clear()
    optimizer.state.update(states)
