"""The optimizer inside a trainer's wrapper (accelerate, Fabric, Lightning), and what it has to report."""

from __future__ import annotations

from typing import Any

import torch

from .._messages import a_kind
from ._lost_updates import LostUpdateReport
from ._optimizer import Optimizer


def inner_optimizer(given: Any) -> Any:
    """Return the innermost optimizer of nested wrappers; any other object unchanged.

    A wrapper has no param groups of its own. Lightning and Fabric give theirs a subclass of the optimizer's class, and
    accelerate one of torch's. An optimizer that steps by another one inside (Lookahead) has groups, and does more than
    that one.
    """
    while not isinstance(given, type):
        is_wrapper = not isinstance(given, torch.optim.Optimizer) or "param_groups" not in vars(given)
        inner = getattr(given, "optimizer", None) if is_wrapper else None
        if inner is None or inner is given:
            break
        given = inner
    return given


def find_own_optimizer(given: Any, what: str, remedy: str) -> Optimizer:
    """Return an optimizer of hu.optim, out of the wrappers that a trainer has put round it."""
    inner = inner_optimizer(given)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{what} takes an optimizer of hu.optim, got {a_kind(inner)}: {remedy}")
    return inner


def report(optimizer: Any) -> LostUpdateReport:
    """Return the lost updates of an optimizer, as its own `report()`, also where a trainer has prepared it.

    Args:
        optimizer: of hu.optim, or a wrapper with an attribute `optimizer`: accelerate's, Fabric's, Lightning's.

    Raises:
        TypeError: an optimizer of another library, whose updates are not metered.

    >>> import halfulp as hu
    >>> print(report(hu.optim.SGD([torch.nn.Parameter(torch.ones(2).bfloat16())], lr=0.1)))
    lost updates: none metered yet (one step in `report_interval` is)
    """
    return find_own_optimizer(optimizer, "report", "hu.observe shows the updates of any optimizer").report()
