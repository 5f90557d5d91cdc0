"""Which parameter each of an optimizer's states belongs to: by its name, or by order and shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...kernels import address, plain
from ...optim.parameters._random_identity import plain_names
from ._stored import Checkpoint, OptimizerStates, Stored

COUNTERS = ("running_mean", "running_var", "num_batches_tracked", "n_averaged")
_COMPANIONS = (".component_1", ".component_2", ".component_3", ".component_scale", ".payload_scale")


@dataclass(slots=True)
class NamedState:
    """States of one parameter.

    Attributes:
        tensors: Stored or Tensor, by name of the state.
        values: plain values, by name of the state.
        options: of its group.
    """

    tensors: dict[str, Any]
    values: dict[str, Any]
    options: dict[str, Any]


def named_states(checkpoint: Checkpoint, unseen: list[str]) -> dict[str, NamedState]:
    """Return the states of every parameter of a checkpoint; sentences on those that have no name go to `unseen`."""
    found: dict[str, NamedState] = {}
    for optimizer in checkpoint.optimizers:
        members = [(key, group) for group in optimizer.groups for key in group.get("params") or ()]
        names = _given_names(optimizer, members)
        if names is None:
            names = _by_order(checkpoint, optimizer, members) if checkpoint.ordered else None
        if names is None:
            names = _by_shape(checkpoint, optimizer, members)
            lost = len(members) - len(names)
            if lost:
                unseen.append(
                    f"{lost} of {len(members)} optimizer states of the checkpoint have no names and no order: they "
                    "were not compared; make the optimizer from model.named_parameters(), which saves names"
                )
        groups = dict(members)
        for key, name in names.items():
            found[name] = _named_state(optimizer.state.get(key) or {}, groups[key])
    return found


def _named_state(state: dict[str, Any], group: dict[str, Any]) -> NamedState:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor | Stored)}
    values = {key: value for key, value in state.items() if key not in tensors}
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "identities")}
    return NamedState(tensors, values, options)


def _given_names(optimizer: OptimizerStates, members: list[tuple[Any, dict]]) -> dict[Any, str] | None:
    if members and all(isinstance(key, str) for key, _ in members):
        keys = [key for key, _ in members]
        return dict(zip(keys, plain_names(keys), strict=True))
    listed = [group.get("param_names") for group in optimizer.groups]
    if not members or not all(
        isinstance(names, list | tuple) and len(names) == len(group.get("params") or ())
        for names, group in zip(listed, optimizer.groups, strict=True)
    ):
        return None
    names = [name for group in listed for name in group or ()]
    return dict(zip((key for key, _ in members), plain_names(names), strict=True))


def _by_order(
    checkpoint: Checkpoint, optimizer: OptimizerStates, members: list[tuple[Any, dict]]
) -> dict[Any, str] | None:
    """Return names in the order of the model, where numbers and shapes of all parameters agree with it."""
    candidates = list(_parameters(checkpoint))
    if len(candidates) != len(members):
        return None
    waiting = [list(group.get("params") or ()) for group in optimizer.groups]
    found = {}
    for name, stored in candidates:
        fitting = [
            number for number, keys in enumerate(waiting) if keys and _fits(optimizer.state.get(keys[0]), stored.shape)
        ]
        if len(fitting) > 1:
            # The usual split: matrices decay, vectors do not.
            decays = len(stored.shape) >= 2
            fitting = [n for n in fitting if bool(optimizer.groups[n].get("weight_decay")) == decays]
        if len(fitting) != 1:
            return None
        found[waiting[fitting[0]].pop(0)] = name
    return found


def _by_shape(checkpoint: Checkpoint, optimizer: OptimizerStates, members: list[tuple[Any, dict]]) -> dict[Any, str]:
    """Return the names of parameters whose shape no other one has."""
    names: dict[tuple, list[str]] = {}
    keys: dict[tuple, list[Any]] = {}
    for name, stored in _parameters(checkpoint):
        names.setdefault(stored.shape, []).append(name)
    for key, _ in members:
        shape = _shape(optimizer.state.get(key))
        if shape is not None:
            keys.setdefault(shape, []).append(key)
    return {found[0]: names[shape][0] for shape, found in keys.items() if len(found) == len(names.get(shape, ())) == 1}


def _parameters(checkpoint: Checkpoint) -> Iterable[tuple[str, Stored]]:
    """Yield what may be a parameter, one of several names for the same memory."""
    seen = set()
    for name, stored in checkpoint.tensors.items():
        last = name.rpartition(".")[2]
        if last in COUNTERS or name.endswith(_COMPANIONS) or name.startswith("ema."):
            continue
        if not (stored.dtype.is_floating_point or stored.dtype.is_complex):
            continue
        if checkpoint.ordered and stored.mapped and stored.numel:
            place = address(plain(stored.read(None))), stored.shape
            if place in seen:
                continue
            seen.add(place)
        yield name, stored


def _shape(state: dict[str, Any] | None) -> tuple[int, ...] | None:
    """Return the shape of the parameter that a state belongs to: that of its largest tensor."""
    shapes = [tuple(value.shape) for value in (state or {}).values() if isinstance(value, Tensor | Stored)]
    return max(shapes, key=lambda shape: (len(shape), shape), default=None)


def _fits(state: dict[str, Any] | None, shape: tuple[int, ...]) -> bool:
    return not state or _shape(state) == shape
