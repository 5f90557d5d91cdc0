"""The identity that keys a parameter's random bits: its qualified name where names were given, else its position.

By position a run can be repeated, and compared with its twin in the same process. Two optimizers over unnamed
parameters of one training, such as those of a GAN, thereby round by the same bits, unless the second has another seed:
keys that avoided those of living optimizers would depend on what else happens to live in the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...rounding._random_bits import STREAM_VERSION

# A parameter's name, where names were given, and the number that keys its random bits.
NamedStreamId = tuple[str | None, int]
NamedStreamIdByParameter = dict[torch.Tensor, NamedStreamId]


def hash_parameter_name(name: str) -> int:
    """Return 63 bits of a hash of a name.

    >>> hash_parameter_name("layers.0.weight") == hash_parameter_name("layers.0.weight")
    True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


_WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")


def strip_wrapper_prefixes(names: Iterable[str], strips_data_parallel: bool = True) -> list[str]:
    """Return the parameter names of the plain model inside a compiled, wrapped or DDP model.

    Compiled and checkpointed modules may stand anywhere; DistributedDataParallel's "module." stands before all, and
    stays where `strips_data_parallel` is False.

    >>> strip_wrapper_prefixes(["module._orig_mod.0.weight", "module._orig_mod.1._orig_mod.bias"])
    ['0.weight', '1.bias']
    """
    plain = list(names)
    for wrapper in _WRAPPER_PREFIXES:
        plain = [name.replace(f".{wrapper}", ".").removeprefix(wrapper) for name in plain]
    if strips_data_parallel and plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def list_stream_ids(group: Mapping[str, Any]) -> list[int]:
    """Return the numbers that key the random bits of a group's parameters: those of their names, where it has names.

    A group of named parameters holds none. Trainers that save what a group holds once per parameter (torch's
    flatten_optimizer_state_dict, torchtitan) can thus split and regroup parameters, each of which keeps its bits.
    """
    names = group.get("param_names")
    return (
        group["identities"] if names is None else [hash_parameter_name(name) for name in strip_wrapper_prefixes(names)]
    )


def assign_stream_ids(group: dict, earlier: list[dict], known: NamedStreamIdByParameter) -> None:
    """Give every parameter of a group without names its identity, unless it came with them; note the stream's version.

    Numbers of parameters that have left all groups stay theirs.
    """
    group["random_stream"] = STREAM_VERSION
    if group.get("param_names") is not None:
        group.pop("identities", None)
    elif "identities" not in group or len(group["identities"]) != len(group["params"]):
        count = sum(len(other["params"]) for other in earlier)
        start = max(count, 1 + max((number for name, number in known.values() if name is None), default=-1))
        group["identities"] = list(range(start, start + len(group["params"])))


def record_stream_ids(group: dict, known: NamedStreamIdByParameter) -> None:
    """Record each parameter's name and number; a group keeps no numbers that follow from its names."""
    if group.get("param_names") is not None:
        group.pop("identities", None)
    names, numbers = group.get("param_names") or [None] * len(group["params"]), list_stream_ids(group)
    for parameter, name, number in zip(group["params"], names, numbers, strict=True):
        known[parameter] = name, number


def update_stream_ids_of_edited_group(group: dict, known: NamedStreamIdByParameter) -> None:
    """Update a group's names and identities after its list of parameters was edited.

    A parameter that stands in another's place takes over its name and identity; one that was added without a name
    gets the next free number.
    """
    parameters, numbers, names = group["params"], list_stream_ids(group), group.get("param_names")
    held: list[tuple[str | None, int | None]] = [known.get(parameter) or (None, None) for parameter in parameters]
    if [number for _, number in held] == numbers:
        return
    taken = {number for _, number in held}
    free = 1 + max((number for _, number in known.values()), default=-1)
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
    if names:
        group["param_names"] = [name for name, _ in held]
    else:
        group["identities"] = [number for _, number in held]
    record_stream_ids(group, known)
