"""The identity that keys a parameter's random bits: its qualified name where names were given, else its position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

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


def plain_names(names: Iterable[str]) -> list[str]:
    """Return the parameter names of the plain model inside a compiled, wrapped or DDP model.

    Compiled and checkpointed modules may stand anywhere; DistributedDataParallel's "module." stands before all.

    >>> plain_names(["module._orig_mod.0.weight", "module._orig_mod.1._orig_mod.bias"])
    ['0.weight', '1.bias']
    """
    plain = list(names)
    for wrapper in _WRAPPERS:
        plain = [name.replace(f".{wrapper}", ".").removeprefix(wrapper) for name in plain]
    if plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def assign_identities(group: dict, earlier: list[dict]) -> None:
    """Give every parameter of a group its identity, unless it came with them."""
    if "identities" in group and len(group["identities"]) == len(group["params"]):
        return
    names, start = group.get("param_names"), sum(len(other["params"]) for other in earlier)
    count = len(group["params"])
    group["identities"] = [name_identity(n) for n in plain_names(names)] if names else list(range(start, start + count))


def note_identities(group: dict, known: TensorMap[Identity]) -> None:
    """Record name and number of every parameter of a group."""
    names = group.get("param_names") or [None] * len(group["params"])
    for parameter, name, number in zip(group["params"], names, group["identities"], strict=True):
        known[parameter] = name, number


def follow_parameters(group: dict, groups: list[dict], known: TensorMap[Identity]) -> None:
    """Update a group's names and identities after its list of parameters was edited.

    A parameter that stands in another's place takes over its name and identity; one that was added without a name
    gets the next free number.

    Raises:
        ValueError: a parameter without a name was added to a group of named ones.
    """
    parameters, numbers, names = group["params"], group["identities"], group.get("param_names")
    held: list[tuple[str | None, int | None]] = [known.get(parameter) or (None, None) for parameter in parameters]
    if [number for _, number in held] == numbers:
        return
    taken = {number for _, number in held}
    free = 1 + max((number for other in groups for number in other["identities"]), default=-1)
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
