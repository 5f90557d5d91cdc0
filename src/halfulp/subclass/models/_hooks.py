"""Removal of a library's own forward hooks from modules, whoever else's stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def remove_hooks(modules: Iterable[nn.Module], is_ours: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and forward pre-hooks of modules that a predicate picks, with what torch notes of them.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print, always_call=True)
    >>> remove_hooks(layer.modules(), lambda hook: hook is print)
    >>> layer._forward_hooks, layer._forward_hooks_always_called
    (OrderedDict(), OrderedDict())
    """
    for module in modules:
        tables: list[tuple[dict[int, Any], ...]] = [
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ]
        for hooks, *notes in tables:
            for key in [key for key, hook in hooks.items() if is_ours(hook)]:
                for table in (hooks, *notes):
                    table.pop(key, None)
