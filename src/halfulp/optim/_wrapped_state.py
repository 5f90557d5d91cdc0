"""The state of a wrapped optimizer in the state_dict of the one around it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ._state_dict_validation import is_own_file
from .parameters._narrow_groups import name_of

BASE = "base."
# Attributes of every optimizer.
_TORCHS = {"state", "param_groups", "defaults", "step"}
_TORCHS |= {"_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name", "_opt_called", "_step_count"}
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def copy_to_device(value: Any, device: torch.device | None) -> Any:
    """Return a copy of a state on a device, or where it is."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if device is None else tensor.to(device, copy=True)

    return tree_map_only(torch.Tensor, copied, value)


def split_base_states(state_dict: Mapping[str, Any], groups: list[dict]) -> tuple[dict, dict]:
    """Split a state_dict into one without the wrapped optimizer's states, and these by number."""
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
            inner[number] = tree_map_only(
                torch.Tensor, lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, state
            )
    return {**state_dict, "state": own}, inner


def check_base_state(
    state: Mapping | None,
    own: Mapping | None,
    base: torch.optim.Optimizer,
    shadow: torch.Tensor,
    group: dict,
    position: int,
) -> None:
    """Raise ValueError for saved states of a wrapped optimizer that do not fit what it holds."""
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


def read_outside_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state beside parameter states and groups: attributes, and entries that the class itself saves."""
    for name, value in _attributes(optimizer):
        if not _is_plain(value) and not _is_code(value):
            raise NotImplementedError(
                f"{type(optimizer).__name__} keeps an attribute {name!r} of class {type(value).__name__}, which a "
                "state_dict cannot save: keep what changes in optimizer.state, in its param groups, or as numbers, "
                "strings, tensors and lists of them"
            )
    found: dict[str, Any] = {}
    attributes = {name: copy_to_device(value, None) for name, value in _attributes(optimizer) if _is_plain(value)}
    if attributes:
        found["attributes"] = attributes
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        own = optimizer.state_dict()
        found["saved"] = {name: value for name, value in own.items() if name not in ("state", "param_groups")}
    return found


def check_outside_state(optimizer: torch.optim.Optimizer, saved: Any) -> dict[str, Any]:
    """Return the state saved by `read_outside_state` if this optimizer can take it; raise ValueError if not."""
    if not isinstance(saved, Mapping) or not all(isinstance(entry, Mapping) for entry in saved.values()):
        raise ValueError("'base' of the state_dict must hold what the wrapped optimizer keeps beside its states")
    kept = {name for name, value in _attributes(optimizer) if not _is_plain(value)}
    wrong = sorted(kept & saved.get("attributes", {}).keys())
    if wrong:
        raise ValueError(f"the state_dict holds {wrong} of another {type(optimizer).__name__}, whose are plain data")
    return dict(saved)


def restore_outside_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what `read_outside_state` has saved; states and groups are restored already, and stay."""
    for name, value in saved.get("attributes", {}).items():
        setattr(optimizer, name, copy_to_device(value, None))
    if "saved" in saved:
        states, groups = dict(optimizer.state), list(optimizer.param_groups)
        packed = torch.optim.Optimizer.state_dict(optimizer)
        optimizer.load_state_dict({**packed, **saved["saved"]})
        for group, loaded in zip(groups, optimizer.param_groups):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(states)


def _attributes(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Return the attributes that a class adds to torch's, without lists of the parameters themselves."""
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for name, value in vars(optimizer).items():
        parts = value if isinstance(value, list | tuple) else [value]
        derived = any(id(part) in members for part in parts)
        if name not in _TORCHS and not name.endswith("_hooks") and not derived:
            found.append((name, value))
    return found


def _is_code(value: Any) -> bool:
    """Return whether a value is a class, a module or a function that closes over nothing."""
    function = getattr(value, "__func__", value)
    is_open = isinstance(function, types.FunctionType) and not function.__closure__
    return is_open or isinstance(function, type | types.ModuleType | types.BuiltinFunctionType)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, _ATOMS) and _is_plain(entry) for key, entry in value.items())
    return type(value) is torch.Tensor or type(value) in _ATOMS
