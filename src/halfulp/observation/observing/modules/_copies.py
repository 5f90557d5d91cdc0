"""Copies of what a forward pass may change: its inputs, and the state that modules keep beside their parameters."""

from __future__ import annotations

import copy
import dataclasses
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What every module has and no forward pass changes, beside what is looked at by itself.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers", "_parameters", "_modules", "training", *HOOKS}
_SHARED = (nn.Module, nn.Parameter, torch.Size, type, types.FunctionType, types.ModuleType, types.MethodType)


class Copier:
    """Copies values of one moment; what is the same object in two places is the same copy in both.

    Attributes:
        modules: met in values; they are not copied.
        generators: copies of the random generators met, in order.
        hooks_left_out: whether a module's hooks that are not torch's own were left out.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self.hooks_left_out: bool = False
        self._made: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any, objects: bool) -> Any:
        """Return a copy: of tensors, generators, containers, data classes, and what these hold.

        Args:
            value: anything. Modules, parameters, and what else is not named here, are returned as they are.
            objects: whether other objects are copied too, attribute by attribute, as inputs are. What a module holds
                may be a trainer with all that belongs to it.
        """
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        made = self._copy(value, objects)
        self._made[id(value)] = (value, made)  # the value too, so that its id stays its own
        return made

    def state(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's `vars` with copies of its buffers and attributes, without its users' hooks."""
        return self.state_of(vars(module))

    def state_of(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the same of `vars` that were copied before."""
        made = {}
        for key, value in attributes.items():
            if key in _OF_EVERY_MODULE:
                made[key] = value
            elif key in HOOKS:
                made[key] = self._without_users_hooks(value)
            else:
                made[key] = self.copy(value, objects=False)
        return made

    def _without_users_hooks(self, hooks: Any) -> Any:
        kept = copy.copy(hooks)
        for key, hook in hooks.items():
            # Those of torch.nn.utils compute the module's weight, and belong to its forward pass.
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if not home.startswith("torch.nn.utils"):
                del kept[key]
                self.hooks_left_out = True
        return kept

    def _copy(self, value: Any, objects: bool) -> Any:
        if isinstance(value, nn.Module):
            self.modules.append(value)
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, GENERATORS):
            made = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
            self.generators.append(made)
            return made
        if isinstance(value, list | dict | deque | set | tuple):
            return self._copy_container(value, objects)
        if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace) or objects:
            return self._copy_object(value, objects)
        return value

    def _copy_container(self, value: Any, objects: bool) -> Any:
        if isinstance(value, tuple):
            parts = [self.copy(item, objects) for item in value]
            if all(a is b for a, b in zip(parts, value)):
                return value
            return type(value)(*parts) if hasattr(value, "_make") else type(value)(parts)
        made = copy.copy(value)
        self._made[id(value)] = (value, made)  # before its items, one of which may lead back to it
        if isinstance(value, dict):
            for key, item in value.items():
                made[key] = self.copy(item, objects)
        elif not isinstance(value, set):
            for position, item in enumerate(value):
                made[position] = self.copy(item, objects)
        return made

    def _copy_object(self, value: Any, objects: bool) -> Any:
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return value
        made = copy.copy(value)
        if made is value:  # such as an enum's member
            return value
        self._made[id(value)] = (value, made)
        for key, item in attributes.items():
            object.__setattr__(made, key, self.copy(item, objects))
        return made
