"""Whole states of torch.distributed.checkpoint.state_dict: gathered from shards, or sent from the first process.

With ``broadcast_from_rank0`` torch sends each entry, and a process keeps those that bear the name of one of its
parameters or states: the auxiliary tensors beside these would be dropped, and a state that is no plain tensor would
meet a plain one in a collective. So plain tensors are sent alone, every process expects the names of its own auxiliary
tensors, and states are put together again. Low bits of 16-bit integers, which neither gloo nor NCCL takes, travel as
32-bit ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch_import import after_import
from ._state_dict import known_layout, state_dict_layout

# What DistributedDataParallel and torch.compile put before names.
_PREFIXES = ("module", "_orig_mod")
_UNSENT = (torch.int16, torch.uint16)
_watching: list[bool] = []


def watch() -> None:
    """Wrap torch's functions, now or as soon as torch imports them."""
    if not _watching:
        _watching.append(True)
        after_import("torch.distributed.checkpoint.state_dict", _complete)


def _complete(module: ModuleType) -> None:
    for name, completed in (
        ("_gather_state_dict", _gathering),
        ("_distribute_state_dict", _distributing),
        ("_broadcast_state_dict", _sending),
        ("_unflatten_optim_state_dict", _unflattening),
    ):
        setattr(module, name, completed(getattr(module, name)))


# Gathering, and cutting into shards -------------------------------------------------------------------------------


def _gathering(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def gather(state_dict: dict[str, Any], *given: Any, **options: Any) -> dict[str, Any]:
        return _restore_dtypes(plain(_to_sendable(state_dict), *given, **options), state_dict)

    return gather


def _distributing(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def distribute(full: Mapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any) -> None:
        before = dict(local)
        plain(_to_sendable(full), local, *given, **options)
        _restore_dtypes(local, before)

    return distribute


def _to_sendable(value: Any) -> Any:
    """Return a state with tensors of dtypes that processes cannot send as int32."""
    if isinstance(value, Mapping):
        parts = {name: _to_sendable(part) for name, part in value.items()}
        return parts if any(parts[name] is not part for name, part in value.items()) else value
    return value.to(torch.int32) if isinstance(value, Tensor) and value.dtype in _UNSENT else value


def _restore_dtypes(found: Any, before: Any) -> Any:
    """Return a gathered state with tensors in the dtypes that they had before."""
    if isinstance(before, Mapping) and isinstance(found, MutableMapping):
        for name in before.keys() & found.keys():
            found[name] = _restore_dtypes(found[name], before[name])
    elif isinstance(before, Tensor) and before.dtype in _UNSENT:
        return found.to(before.dtype) if isinstance(found, Tensor) and found.dtype == torch.int32 else found
    return found


# Flat states ------------------------------------------------------------------------------------------------------


def _unflattening(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def unflatten(optim: Any, state_dict: Mapping[str, Any], *given: Any, **options: Any) -> Any:
        try:
            return plain(optim, state_dict, *given, **options)
        except KeyError as error:
            explain, (key, *_) = getattr(optim, "explain_missing_entry", None), (*error.args, None)
            if explain is None or not str(key).startswith(("state.", "param_groups.")):
                raise
            raise ValueError(explain(key, state_dict)) from error

    return unflatten


# Sending ----------------------------------------------------------------------------------------------------------


def _sending(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def send(full: MutableMapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any) -> None:
        before = dict(local)
        own = {name: value for name, value in local.items() if state_dict_layout(value) is not None}
        _put_prefixes(full, own)
        expected = {name: _auxiliary_entries(name, value, local) for name, value in own.items()}
        for beside in expected.values():
            local.update(beside)
        plain(_to_sendable(_to_plain_entries(full, own)), local, *given, **options)
        for name, beside in expected.items():
            # What is as it was has not been sent: the first process's entry is a plain tensor.
            unsent = [entry for entry, part in beside.items() if local.get(entry) is part]
            for entry in unsent:
                del local[entry]
            if name in local and not isinstance(own[name], nn.Parameter):  # which modules put together
                local[name] = _from_plain_entries(local, name, beside, own[name])
        _restore_dtypes(local, before)

    return send


def _put_prefixes(full: MutableMapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Put auxiliary entries behind the prefixes of wrappers, where torch has put their parameters."""
    for name, value in own.items():
        suffix = known_layout(value).suffix
        for short in _without_prefixes(name):
            alone = [entry for entry in full if entry.startswith(short) and suffix.sub("", entry) == short]
            for entry in alone if short not in full else ():
                full[name + entry.removeprefix(short)] = full.pop(entry)


def _without_prefixes(name: str) -> Iterator[str]:
    """Yield a name without some of its parts that may be a wrapper's prefix."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part in _PREFIXES]
    for count in range(1, len(places) + 1):
        for left_out in itertools.combinations(places, count):
            yield ".".join(part for i, part in enumerate(parts) if i not in left_out)


def _auxiliary_entries(name: str, value: Tensor, local: Mapping[str, Any]) -> dict[str, Tensor]:
    entries = known_layout(value).entries(name, value.detach())
    return {entry: part for entry, part in entries.items() if entry not in local}


def _to_plain_entries(full: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a state of plain tensors only: one entry for each auxiliary tensor, values where this process has none."""
    parted: dict[str, Any] = {}
    for name, value in full.items():
        layout = state_dict_layout(value)
        if layout is None:
            parted[name] = value
        elif name in own:
            parted |= layout.entries(name, value.detach())
        else:
            parted[name] = value.detach().decode()
    return parted


def _from_plain_entries(
    local: MutableMapping[str, Any], name: str, beside: Mapping[str, Tensor], like: Tensor
) -> Tensor:
    """Return a tensor like the one that stood here, made of the entries that were sent."""
    entries = {name: local[name], **{entry: local.pop(entry) for entry in beside if entry in local}}
    return known_layout(like).fitting({entry: part.to(like.device) for entry, part in entries.items()}, name, like)
