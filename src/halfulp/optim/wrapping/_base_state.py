"""The state of a wrapped optimizer in the state_dict of the one around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint._state_dict_validation import is_own_file
from ..parameters._narrow_groups import name_of
from ._float32_copies import mapped

BASE = "base."


def placed(value: Any, device: torch.device | None) -> Any:
    """A copy of a state on a device, or where it is."""
    return mapped(value, lambda tensor: tensor.clone() if device is None else tensor.to(device, copy=True))


def split_base_states(state_dict: Mapping[str, Any], groups: list[dict]) -> tuple[dict, dict]:
    """Return a state_dict without the wrapped optimizer's states, and those by number, for one with some groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no optimizer state_dict: it needs the keys 'state' and 'param_groups'")
    states, wrapped = state_dict["state"], is_own_file(groups, state_dict["param_groups"])
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
    others = {key: value for key, value in states.items() if key not in numbers}
    theirs = {key: str(key).startswith(BASE) or not wrapped for key in others}
    own = {key: value for key, value in others.items() if not theirs[key]}
    inner = {
        key.removeprefix(BASE) if isinstance(key, str) else key: value for key, value in others.items() if theirs[key]
    }
    for number in numbers & states.keys():
        state = states[number]
        if wrapped:
            own[number] = {k: v for k, v in state.items() if not k.startswith(BASE)}
            inner[number] = {k.removeprefix(BASE): v for k, v in state.items() if k.startswith(BASE)}
        else:
            own[number] = {"step": torch.as_tensor(float(state.get("step", 0)), dtype=torch.float32, device="cpu")}
            inner[number] = mapped(state, lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t)
    return {**state_dict, "state": own}, inner


def check_base_state(
    state: Mapping | None,
    own: Mapping | None,
    base: torch.optim.Optimizer,
    shadow: torch.Tensor,
    group: dict,
    position: int,
) -> None:
    """Refuse saved states of a wrapped optimizer that do not fit what it holds.

    Args:
        state: that it saved of a parameter.
        own: that the optimizer around it saved beside.
        base: the wrapped optimizer, and shadow: the tensor that it steps for the parameter.
        group, position: of the parameter.

    Raises:
        ValueError: other shapes, or none where the parameter has made steps.
    """
    held = base.state.get(shadow, {})
    for name, value in (state or {}).items():
        known = held.get(name)
        if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.shape != known.shape:
            raise ValueError(
                f"state {name!r} of parameter {name_of(group, position)} has shape {tuple(value.shape)}, "
                f"{tuple(known.shape)} is needed"
            )
    if not state and held and own and own.get("step"):
        raise ValueError(
            f"the file holds no states of {type(base).__name__} for parameter {name_of(group, position)}, which it has "
            "stepped: torch's flatten_optimizer_state_dict leaves out what a wrapped optimizer keeps; save without it"
        )
