"""Optimizers that cannot be wrapped, because they hold another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def refuse_inner_optimizers(base: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds another one.

    Float32 weights exist during a step of the wrapped optimizer alone. An optimizer inside of it has the narrow
    parameters themselves, or a copy of memory that is not filled yet.

    Raises:
        NotImplementedError: such an optimizer, with what to do.
    """
    name = type(base).__name__
    for place, inner in _inner_optimizers(base):
        raise NotImplementedError(
            f"{name} holds another optimizer, {type(inner).__name__} in {place!r}, whose parameters wrap cannot put "
            f"float32 weights behind: step float32 parameters by {name}, or wrap {type(inner).__name__} alone: "
            f"hu.optim.wrap({type(inner).__name__}, params, ...)"
        )


def _inner_optimizers(base: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(base).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if name not in ("param_groups", "state", "defaults"):
            yield from ((name, one) for one in held if isinstance(one, torch.optim.Optimizer) and one is not base)
