"""The identity that keys a parameter's random bits: its qualified name where names were given, else its position.

By position a run can be repeated, and compared with its twin in the same process. Two optimizers over unnamed
parameters of one training, such as those of a GAN, thereby round by the same bits. Keys that avoided those of living
optimizers would depend on what else happens to live in the process; so keys stay, and whoever shares them is told.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels import note_and_warn_once
from ...rounding._random_bits import STREAM_VERSION
from ._local_tensors import local, memory
from ._tensor_map import TensorMap

# A parameter's name, where names were given, and the number that keys its random bits.
Identity = tuple[str | None, int]


def name_identity(name: str) -> int:
    """Return 63 bits of a hash of a name.

    >>> name_identity("layers.0.weight") == name_identity("layers.0.weight")
    True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")


def plain_names(names: Iterable[str], parallel: bool = True) -> list[str]:
    """Return the parameter names of the plain model inside a compiled, wrapped or DDP model.

    Compiled and checkpointed modules may stand anywhere; DistributedDataParallel's "module." stands before all, and
    stays where `parallel` is False.

    >>> plain_names(["module._orig_mod.0.weight", "module._orig_mod.1._orig_mod.bias"])
    ['0.weight', '1.bias']
    """
    plain = list(names)
    for wrapper in _WRAPPERS:
        plain = [name.replace(f".{wrapper}", ".").removeprefix(wrapper) for name in plain]
    if parallel and plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def identities_of(group: Mapping[str, Any]) -> list[int]:
    """Return the numbers that key the random bits of a group's parameters: those of their names, unless it holds some.

    A group of named parameters holds none. Trainers that save what a group holds once per parameter (torch's
    flatten_optimizer_state_dict, torchtitan) can thus split and regroup parameters, each of which keeps its bits. An
    exception is a group that took over a run without names, whose bits go on.
    """
    held = group.get("identities")
    return [name_identity(name) for name in plain_names(group["param_names"])] if held is None else held


def has_identities(group: Mapping[str, Any]) -> bool:
    """Return whether a group has a number, or a name, for each of its parameters, as far as their counts tell."""
    return len(group.get("identities") or group.get("param_names", ())) == len(group["params"])


def assign_identities(group: dict, earlier: list[dict]) -> None:
    """Give every parameter of a group without names its identity, unless it came with them; note what keys draw."""
    group["random_stream"] = STREAM_VERSION
    if "identities" in group and len(group["identities"]) == len(group["params"]):
        return
    if group.get("param_names"):
        group.pop("identities", None)
        return
    start = sum(len(other["params"]) for other in earlier)
    group["identities"] = list(range(start, start + len(group["params"])))


class _Pass:
    """The backward pass in which optimizers last made their first steps, and the next free identity there."""

    number, free = -1, 0


def part_in_backward(groups: list[dict], states: Mapping[Any, Any]) -> bool:
    """Give unnamed parameters other identities than those of optimizers that began earlier in the same backward pass.

    An optimizer per parameter, stepped by hooks in backward, has one parameter at position 0: without names all of them
    would draw the same bits. Optimizers that begin in one pass are of one training; the order of hooks is that of every
    run of it, so that a run is still repeated by its seed.

    States that have made a step, as in a file, keep their identities.

    Returns:
        Whether the groups' identities were changed.
    """
    number = torch._C._current_graph_task_id()
    unnamed = [group for group in groups if not group.get("param_names")]
    if number < 0 or not unnamed or any(isinstance(held, dict) and held.get("step") for held in states.values()):
        return False
    first = _Pass.free if _Pass.number == number else 0
    _Pass.number, _Pass.free = number, first + 1 + max((i for g in unnamed for i in g["identities"]), default=-1)
    for group in unnamed if first else ():
        group["identities"] = [first + identity for identity in group["identities"]]
    return first > 0


def note_identities(group: dict, known: TensorMap[Identity]) -> None:
    """Record each parameter's name and number; a group keeps no numbers that follow from its names."""
    names = group.get("param_names") or [None] * len(group["params"])
    numbers = identities_of(group)
    if group.get("param_names") and "identities" in group:
        by_name = identities_of({"param_names": names})
        if numbers == by_name:
            del group["identities"]
    for parameter, name, number in zip(group["params"], names, numbers, strict=True):
        known[parameter] = name, number


def follow_parameters(group: dict, groups: list[dict], known: TensorMap[Identity]) -> None:
    """Update a group's names and identities after its list of parameters was edited.

    A parameter that stands in another's place takes over its name and identity; one that was added without a name
    gets the next free number.
    """
    parameters, numbers, names = group["params"], identities_of(group), group.get("param_names")
    held: list[tuple[str | None, int | None]] = [known.get(parameter) or (None, None) for parameter in parameters]
    if [number for _, number in held] == numbers:
        return
    taken = {number for _, number in held}
    free = 1 + max((number for other in groups for number in identities_of(other)), default=-1)
    for position, (_, number) in enumerate(held):
        if number is not None:
            continue
        if len(numbers) == len(parameters) and numbers[position] not in taken:
            held[position] = names[position] if names else None, numbers[position]
        elif names:
            raise ValueError(
                f"parameter {position} of shape {tuple(parameters[position].shape)} was put into a param group of "
                "named parameters without a name: use add_param_group({'params': [(name, parameter)]})"
            )
        else:
            held[position], free = (None, free), free + 1
    group["identities"] = [number for _, number in held]
    if names:
        group["param_names"] = [name for name, _ in held]
    note_identities(group, known)


Key = tuple[int, int]  # seed, identity
_COMPARED = 4  # parameters by which twins are known
_MEETINGS = 2  # one alone may be two runs, one after the other


class _Record:
    """First elements of an optimizer's parameters before its first step, and whom it has met.

    `meetings` counts, by optimizer, how often it stepped right before this one and draws from the same keys; 0 from
    when on one is known to be a twin, or was told of.
    """

    def __init__(self, drawn: dict[Key, torch.Tensor]) -> None:
        self.corners = {key: _corner(drawn[key]) for key in sorted(drawn)[:_COMPARED]}
        self.meetings: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


class _Last:
    """The optimizer that stepped last, of those with records."""

    optimizer: weakref.ref | None = None


_records: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Record] = weakref.WeakKeyDictionary()


def warn_of_shared_keys(optimizer: Any) -> None:
    """Warn, before a step, of an optimizer that steps in turn with this one and draws the same bits, unless a twin.

    Twins are runs that are compared: their parameters are alike in shape and, now or before their first steps, in
    value.
    """
    last = None if _Last.optimizer is None else _Last.optimizer()
    if last is optimizer:
        return
    record = _records.get(optimizer)
    if record is None:
        drawn = _drawing_parameters(optimizer)
        if not drawn:
            return
        _records[optimizer] = _Record(drawn)
    elif last is not None and record.meetings.get(last, 1):
        _meet(optimizer, record, last)
    _Last.optimizer = weakref.ref(optimizer)


def _meet(optimizer: Any, record: _Record, last: Any) -> None:
    """Judge whether two optimizers, of which one steps right after the other, share random bits."""
    mine, theirs, other = _drawing_parameters(optimizer), _drawing_parameters(last), _records[last]
    shared = [key for key in sorted(mine.keys() & theirs.keys()) if not _is_same_memory(mine[key], theirs[key])]
    count = record.meetings.get(last, 0) + other.meetings.get(optimizer, 0) + 1
    record.meetings[last] = count
    is_twin = not shared or (
        all(mine[key].shape == theirs[key].shape for key in shared)
        and any(
            pairs and all(torch.equal(a, b.to(a.device)) for a, b in pairs)
            for pairs in (
                [
                    (record.corners[key], other.corners[key])
                    for key in shared
                    if key in record.corners and key in other.corners
                ],
                [(_corner(mine[key]), _corner(theirs[key])) for key in shared[:_COMPARED]],
            )
        )
    )
    if is_twin or count >= _MEETINGS:
        record.meetings[last] = other.meetings[optimizer] = 0
    if not is_twin and count >= _MEETINGS:
        note_and_warn_once(
            "random bits",
            f"two optimizers ({type(last).__name__}, {type(optimizer).__name__}) of unnamed parameters step in turn "
            f"under seed={shared[0][0]}, and parameters at equal positions are rounded by the same random bits: make "
            "them from model.named_parameters() with other names, or give one of them another seed=; between runs that "
            "are only compared with each other that is no harm",
        )


def _drawing_parameters(optimizer: Any) -> dict[Key, torch.Tensor]:
    """Return an optimizer's unnamed parameters that draw random bits, by the key of these bits."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in () if group.get("param_names") else group["params"]:
            plan = optimizer._plans.get(parameter)
            if plan is not None and plan.spec.draws:
                found[plan.seed, plan.identity] = parameter
    return found


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return memory(one).data_ptr() == memory(other).data_ptr()


def _corner(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter's first elements on its own device, for which nothing waits."""
    part = memory(parameter).detach()
    return local(part)[(slice(0, 4),) * part.dim()].to(torch.float32, copy=True)
