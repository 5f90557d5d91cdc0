"""The optimizer inside a trainer's wrapper."""

from __future__ import annotations

from typing import Any

import torch


def is_wrapper(given: Any) -> bool:
    """Return whether an object is a wrapper: no torch optimizer, or accelerate's."""
    return not isinstance(given, torch.optim.Optimizer) or hasattr(given, "accelerator_state")


def inner_optimizer(given: Any) -> Any:
    """Return the innermost optimizer of nested wrappers; any other object unchanged."""
    while is_wrapper(given):
        inner = getattr(given, "optimizer", None)
        if inner is None or inner is given:
            break
        given = inner
    return given
