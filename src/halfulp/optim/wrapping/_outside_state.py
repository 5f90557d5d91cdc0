"""State of a wrapped optimizer outside its groups and its per-parameter states: saved with them, or refused."""

from __future__ import annotations

import random
import types
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels import in_float64
from ._float32_copies import mapped

_TORCHS = {"state", "param_groups", "defaults", "step"}
_TORCHS |= {"_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name", "_opt_called", "_step_count"}
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DEEPEST = 5


def outside_state(optimizer: torch.optim.Optimizer, marks: Mapping[str, object]) -> dict[str, Any]:
    """Return the state beside parameter states and groups: attributes, and entries that the class itself saves.

    Args:
        optimizer: the wrapped one.
        marks: `marks_of` it, when it was new.

    Raises:
        NotImplementedError: an attribute that is no plain data has changed: a file cannot hold it.
    """
    now = marks_of(optimizer)
    for name in now.keys() | marks.keys():
        if now.get(name) != marks.get(name):
            raise NotImplementedError(
                f"{type(optimizer).__name__} changes what its attribute {name!r} of class "
                f"{type(getattr(optimizer, name, None)).__name__} holds, which a state_dict cannot save: keep it in "
                "optimizer.state, in its param groups, or as numbers, strings, tensors and lists of them"
            )
    found: dict[str, Any] = {}
    attributes = {name: mapped(value, torch.Tensor.clone) for name, value in _attributes(optimizer) if _is_plain(value)}
    if attributes:
        found["attributes"] = attributes
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        own = optimizer.state_dict()
        found["saved"] = {name: value for name, value in own.items() if name not in ("state", "param_groups")}
    return found


def checked_outside_state(optimizer: torch.optim.Optimizer, saved: Any) -> dict[str, Any]:
    """Return the state saved by `outside_state` if this optimizer can take it; raise ValueError if not."""
    if not isinstance(saved, Mapping) or not all(isinstance(entry, Mapping) for entry in saved.values()):
        raise ValueError("'base' of the state_dict must hold what the wrapped optimizer keeps beside its states")
    kept = {name for name, value in _attributes(optimizer) if not _is_plain(value)}
    wrong = sorted(kept & saved.get("attributes", {}).keys())
    if wrong:
        raise ValueError(f"the state_dict holds {wrong} of another {type(optimizer).__name__}, whose are plain data")
    return dict(saved)


def restore_outside_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what `outside_state` has saved; states and groups are restored already, and stay."""
    for name, value in saved.get("attributes", {}).items():
        setattr(optimizer, name, mapped(value, torch.Tensor.clone))
    if "saved" in saved:
        states, groups = dict(optimizer.state), list(optimizer.param_groups)
        packed = torch.optim.Optimizer.state_dict(optimizer)
        optimizer.load_state_dict({**packed, **saved["saved"]})
        for group, loaded in zip(groups, optimizer.param_groups):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(states)


def marks_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return marks of all attributes that are no plain data; equal marks mean equal content."""
    return {name: _mark(value, _DEEPEST) for name, value in _attributes(optimizer) if not _is_plain(value)}


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


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, _ATOMS) and _is_plain(entry) for key, entry in value.items())
    return type(value) is torch.Tensor or type(value) in _ATOMS


def _mark(value: Any, deep: int) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), repr(in_float64(value.detach()).sum().item()), value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, types.MethodType):
        return _mark(value.__func__, deep)
    if not deep or isinstance(value, (*_ATOMS, type, types.ModuleType)):
        return repr(value) if isinstance(value, _ATOMS) else type(value).__name__
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return tuple(_mark(held, deep - 1) for held in (*cells, value.__defaults__, value.__kwdefaults__))
    if isinstance(value, Mapping):
        return tuple((repr(key), _mark(entry, deep - 1)) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_mark(entry, deep - 1) for entry in value)
    return type(value).__name__, _mark(getattr(value, "__dict__", None), deep - 1)
