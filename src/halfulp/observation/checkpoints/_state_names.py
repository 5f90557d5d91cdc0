"""Which parameter each of an optimizer's states belongs to: by its name, by the order of the model, or by its shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._messages import listed
from ..._qualified_names import pattern_of
from ...kernels import address, plain
from ...optim.parameters._random_identity import plain_names
from ._model_order import Decays, decay_rules, order_by_config
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
            names = _by_order(checkpoint, optimizer, members)
        if names is None:
            names = _by_shape(checkpoint, optimizer)
            lost = len(members) - len(names)
            if lost:
                known = (
                    ", or install the transformers that saved it, which has the model's order"
                    if checkpoint.config
                    else ""
                )
                unseen.append(
                    f"{lost} of {len(members)} optimizer states of the checkpoint have no names and no order: they "
                    f"were not compared; make the optimizer from model.named_parameters(), which saves names{known}"
                )
        names = _as_weights(names, checkpoint.tensors)
        strange = [name for name in names.values() if name not in checkpoint.tensors]
        if strange:
            unseen.append(
                f"the optimizer's states of {listed(strange)} were not compared: no tensor of the checkpoint has such "
                "a name; save weights and states under the same names"
            )
        groups = dict(members)
        for key, name in names.items():
            found[name] = _named_state(optimizer.state.get(key) or {}, groups[key])
    return found


def _as_weights(names: dict[Any, str], tensors: Collection[str]) -> dict[Any, str]:
    """Return names as the weights have them, where one prefix alone, of a wrapper or of a module, sets both apart."""
    strange = next((name for name in names.values() if name not in tensors), None)
    if strange is None:
        return names
    found = []
    for prefix, other in dict.fromkeys(_other_prefixes(strange, tensors)):
        changed = {key: other + name.removeprefix(prefix) for key, name in names.items()}
        if all(name.startswith(prefix) for name in names.values()) and all(x in tensors for x in changed.values()):
            found.append(changed)
    return found[0] if len(found) == 1 else names


def _other_prefixes(name: str, tensors: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a name's beginning and what stands in its place, for every tensor whose name ends in the same parts."""
    own = name.split(".")
    for tensor in tensors:
        parts = tensor.split(".")
        same = 0
        while same < min(len(own), len(parts)) and own[-1 - same] == parts[-1 - same]:
            same += 1
        if same:
            yield _prefix(own[:-same]), _prefix(parts[:-same])


def _prefix(parts: list[str]) -> str:
    return "".join(f"{part}." for part in parts)


def _named_state(state: dict[str, Any], group: dict[str, Any]) -> NamedState:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor | Stored)}
    values = {key: value for key, value in state.items() if key not in tensors}
    left_out = ("params", "param_names", "identities", "random_stream")
    options = {key: value for key, value in group.items() if key not in left_out}
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
    candidates = dict(_parameters(checkpoint))
    if len(candidates) != len(members):
        return None
    if checkpoint.ordered:
        found = _by_groups(candidates, optimizer, decay_rules(candidates))
        return found if found is not None else _as_they_fit(candidates, optimizer)
    known = None if checkpoint.config is None else order_by_config(checkpoint.config, candidates)
    if known is None or len(known[0]) != len(candidates):
        return None
    ordered = {name: candidates[name] for name in known[0]}
    return _by_groups(ordered, optimizer, [known[1], *decay_rules(ordered)])


def _by_groups(
    ordered: Mapping[str, Stored], optimizer: OptimizerStates, rules: Sequence[Decays]
) -> dict[Any, str] | None:
    """Return names where one way alone to give them to one group, or to one that decays and one that does not, fits."""
    found: list[dict[Any, str]] = []
    for parts in _partitions(ordered, len(optimizer.groups), rules):
        made: dict[Any, str] | None = {}
        for group, names in zip(optimizer.groups, parts, strict=True):
            keys = list(group.get("params") or ())
            fits = len(keys) == len(names) and all(
                _fits(optimizer.state.get(key), ordered[name].shape) for key, name in zip(keys, names)
            )
            made = made | dict(zip(keys, names)) if fits and made is not None else None
        if made is not None and made not in found:
            found.append(made)
    return found[0] if len(found) == 1 else None


def _partitions(ordered: Mapping[str, Stored], groups: int, rules: Sequence[Decays]) -> Iterator[list[list[str]]]:
    """Yield the names of each group: those that decay come first, or second, in as many groups as there are."""
    if groups == 1:
        yield [list(ordered)]
    for decays in rules if groups == 2 else ():
        parts = [[name for name in ordered if decays(name, ordered[name]) == wanted] for wanted in (True, False)]
        yield parts
        yield parts[::-1]


def _as_they_fit(ordered: Mapping[str, Stored], optimizer: OptimizerStates) -> dict[Any, str] | None:
    """Return names in order, each given to the only group whose next state fits."""
    waiting = [list(group.get("params") or ()) for group in optimizer.groups]
    found = {}
    for name, stored in ordered.items():
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


def _by_shape(checkpoint: Checkpoint, optimizer: OptimizerStates) -> dict[Any, str]:
    """Return the names of parameters whose shape only they have in their group, they and the same of other layers.

    Layers of a list are in the order of their numbers, whatever the order of what is inside one.
    """
    tensors = dict(_parameters(checkpoint))
    shapes = [[_shape(optimizer.state.get(key)) for key in group.get("params") or ()] for group in optimizer.groups]
    possible: list[list[list[str]]] = []
    for parts in _partitions(tensors, len(shapes), decay_rules(tensors)):
        agree = all(Counter(own) == Counter(tensors[n].shape for n in names) for own, names in zip(shapes, parts))
        if agree and parts not in possible:
            possible.append(parts)
    found: dict[Any, str] = {}
    for number, group in enumerate(optimizer.groups):
        elsewhere = {shape for k, own in enumerate(shapes) if k != number for shape in own}
        for shape in dict.fromkeys(shapes[number]):
            if shape is None or (len(possible) != 1 and shape in elsewhere):
                continue
            names = possible[0][number] if len(possible) == 1 else list(tensors)
            fitting = [name for name in names if tensors[name].shape == shape]
            keys = [key for key, own in zip(group["params"], shapes[number]) if own == shape]
            if len(keys) == len(fitting) and len(set(map(pattern_of, fitting))) == 1:
                found |= dict(zip(keys, sorted(fitting, key=_by_numbers)))
    return found


def _by_numbers(name: str) -> list[tuple[bool, int, str]]:
    """Return what sorts names by the numbers of their layers."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


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
