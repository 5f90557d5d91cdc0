"""What modules put into a state_dict beside parameters and buffers (`get_extra_state`): objects of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ..parameters._random_identity import plain_names


def is_extra_state(name: str) -> bool:
    """Return whether a name in a model's state_dict is that of a module's extra state.

    >>> is_extra_state("0.attention._extra_state"), is_extra_state("0.weight")
    (True, False)
    """
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def set_extra_states(model: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules their extra states, under plain names."""
    modules = dict(model.named_modules())
    names = [f"{name}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip(".") for name in modules]
    for plain, module in zip(plain_names(names), modules.values()):
        if plain in values:
            module.set_extra_state(values[plain])
