"""What a nested dict of a training run holds: the model's tensors, averages of them, optimizer states, a contract."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._messages import a_kind, listed
from ...mctensor import MCTensor
from ...optim.parameters._random_identity import plain_names
from ...scaled import ScaledTensor
from ._stored import Checkpoint, OptimizerStates, Stored, of_tensor

CONTRACT = "precision_contract"
_MODEL = re.compile(
    r"^(model|net|network|module|weights|params|model_?state|(model_?)?state_?dict|model_state_dict)$", re.I
)
_AVERAGE = re.compile(r"(^|_)(ema|swa|avg|average|averaged|shadow)(_|$)", re.I)
# What runs keep beside their weights: tensors here are a generator's state, a best score, a counter.
_BESIDE = re.compile(
    r"rng|random|callback|loop|schedul|scaler|metric|loss|history|sampler|hyper|config|args|step|epoch", re.I
)
_DEEPEST = 64
_Leaves = dict[tuple[Any, ...], Stored]


def checkpoint_of(content: object, path: str, mapped: bool = True) -> Checkpoint:
    """Return the parts of what a file holds.

    Args:
        content: nested mappings and lists of tensors, or `Stored`, and plain data.
        path: for messages.
        mapped: whether the tensors are pages of the file.

    Raises:
        ValueError: it holds no model's tensors.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {a_kind(content)}: give a checkpoint with a model's state_dict")
    leaves: _Leaves = {}
    found = Checkpoint(path, {})
    for where, leaf in _walk(content, ()):
        if isinstance(leaf, OptimizerStates):
            found.optimizers.append(leaf)
        elif isinstance(leaf, _Unreadable):
            found.unseen.append(f"{'.'.join(map(str, where)) or 'the file'} was not compared: {leaf.reason}")
        elif where[-1] == CONTRACT and isinstance(leaf, Mapping):
            found.contract = dict(leaf)
        elif isinstance(leaf, Stored):
            leaves[where] = leaf
        elif isinstance(leaf, Tensor):
            leaves |= {(*where[:-1], f"{where[-1]}{suffix}"): part for suffix, part in _entries(leaf, mapped)}
    found.tensors = _named(leaves, found.unseen)
    if not found.tensors:
        rest = "only an optimizer's states" if found.optimizers else f"no tensors, only {listed(content)}"
        raise ValueError(f"{path} holds {rest if content else 'nothing'}: give a checkpoint with a model's state_dict")
    return found


def optimizers_of(content: object) -> list[OptimizerStates]:
    """Return the states of all optimizers in nested data."""
    return [leaf for _, leaf in _walk(content, ()) if isinstance(leaf, OptimizerStates)]


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A part of a checkpoint that cannot be compared, and why."""

    reason: str


def _walk(content: Any, where: tuple) -> Iterator[tuple[tuple, Any]]:
    if len(where) > _DEEPEST:
        raise ValueError(
            f"a checkpoint is nested more than {_DEEPEST} levels deep, or holds itself: give the model's state_dict"
        )
    if isinstance(content, Mapping) and "param_groups" in content:
        yield where, _optimizer(content)
    elif isinstance(content, Mapping):
        for key, value in content.items():
            if key == CONTRACT:
                yield (*where, key), value
            else:
                yield from _walk(value, (*where, key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _walk(value, (*where, number))
    elif isinstance(content, Tensor) and (content.layout != torch.strided or content.is_meta):
        kind = "on the meta device, without numbers" if content.is_meta else f"a tensor of layout {content.layout}"
        yield where, _Unreadable(f"it is {kind}")
    elif where:
        yield where, content


def _optimizer(content: Mapping[Any, Any]) -> OptimizerStates | _Unreadable:
    state, groups = content.get("state") or {}, content["param_groups"]
    groups = list(groups.values()) if isinstance(groups, Mapping) else groups
    whole = isinstance(state, Mapping) and isinstance(groups, list | tuple)
    if not whole or not all(
        isinstance(group, Mapping) and isinstance(group.get("params") or (), list | tuple) for group in groups
    ):
        return _Unreadable("its param_groups and state are not those of a torch optimizer")
    kept = {key: dict(value) for key, value in state.items() if isinstance(value, Mapping)}
    return OptimizerStates(kept, [dict(group) for group in groups])


def _entries(tensor: Tensor, mapped: bool) -> Iterator[tuple[str, Stored]]:
    """Yield a tensor as a state_dict names its parts."""
    if isinstance(tensor, MCTensor):
        for number, part in enumerate(tensor.components):
            yield f".component_{number}" if number else "", of_tensor(part, mapped)
    elif isinstance(tensor, ScaledTensor):
        yield "", of_tensor(tensor.decode(), False)
        yield ".payload_scale", of_tensor(tensor.scale, mapped)
    else:
        yield "", of_tensor(getattr(tensor, "_local_tensor", tensor), mapped)


def _named(leaves: _Leaves, unseen: list[str]) -> dict[str, Stored]:
    """Return the model's tensors by name, those of averages under "ema."."""
    while leaves and len({where[0] for where in leaves}) == 1 and all(len(where) > 1 for where in leaves):
        leaves = {where[1:]: leaf for where, leaf in leaves.items()}
    groups: dict[Any, _Leaves] = {}
    for where, leaf in leaves.items():
        groups.setdefault(where[0] if len(where) > 1 else None, {})[where] = leaf
    models = [key for key in groups if isinstance(key, str) and _MODEL.match(key)]
    if not models:
        models = [key for key in groups if key is None or not _is_beside(key)]
        # Loose tensors beside a model's dict are a loss or a counter.
        models = [key for key in models if key is not None or len(models) == 1]
    found: dict[str, Stored] = {}
    for key in models:
        prefix = f"{key}." if len(models) > 1 else ""
        found |= _merged(groups[key], prefix, 1 if key is not None else 0)
    for key in [key for key in groups if key not in models]:
        if isinstance(key, str) and _AVERAGE.search(key):
            found |= _merged(groups[key], "ema.", 1)
        elif key is not None and not _is_beside(key):
            unseen.append(f"tensors under {key!r} were not compared: they are not the model's")
    return found


def _is_beside(key: object) -> bool:
    return isinstance(key, int) or bool(_BESIDE.search(str(key)))


def _merged(leaves: _Leaves, prefix: str, skip: int) -> dict[str, Stored]:
    names = [".".join(map(str, where[skip:])) for where in leaves]
    return {prefix + name: leaf for name, leaf in zip(plain_names(names), leaves.values(), strict=True)}
