"""Tensors in nested arguments and results: lists, tuples, dicts, data classes and their kin."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_NO_TENSORS = (int, float, bool, str, type(None), torch.dtype, slice)


def differentiable_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments that require gradients."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from differentiable_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from differentiable_in(item)
    elif type(value) not in _NO_TENSORS and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from differentiable_in(getattr(value, field.name, None))


def memoized(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function cached per tensor, so that a tensor given twice stays one tensor."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def changed(x: Tensor) -> Tensor:
        if id(x) not in made:
            made[id(x)] = x, change(x)
        return made[id(x)][1]

    return changed


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], differentiable: bool = True) -> Any:
    """Apply a function to every tensor that requires gradients in a structure, which is kept if none changes."""
    if type(value) in _NO_TENSORS:
        return value
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad or not differentiable else value
    if isinstance(value, dict):
        found = {key: map_tensors(item, change, differentiable) for key, item in value.items()}
        return value if all(found[key] is item for key, item in value.items()) else _like_dict(value, found)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change, differentiable) for item in reversed(value)][::-1]
        if all(a is b for a, b in zip(items, value)):
            return value
        return _like_sequence(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _like_dataclass(value, change, differentiable)
    return value


def _like_dict(value: dict, found: dict) -> dict:
    """A dict of the same class; a subclass, such as the outputs of transformers, is changed in a copy."""
    if type(value) is dict:
        return found
    changed = copy.copy(value)
    for key, item in found.items():
        changed[key] = item
    return changed


def _like_sequence(value: list | tuple, items: list) -> list | tuple:
    """A list or tuple of the same class, named and structured ones too."""
    if hasattr(value, "_make"):
        return value._make(items)
    return type(value)(items)


def _like_dataclass(value: Any, change: Callable[[Tensor], Tensor], differentiable: bool) -> Any:
    found = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    changed = {name: map_tensors(item, change, differentiable) for name, item in found.items()}
    if all(changed[name] is found[name] for name in found):
        return value
    made = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(made, name, item)
    return made
