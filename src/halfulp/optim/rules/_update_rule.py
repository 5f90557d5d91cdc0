"""An update rule: the arithmetic of one optimizer, written once and run by torch, Numba and the reference alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StateSlot:
    """One state that a rule keeps per parameter element.

    Attributes:
        name: its key in the optimizer's state, torch.optim's where torch has it.
        degree: 1 where the state grows as the gradient does, 2 where it grows as its square.
    """

    name: str
    degree: int


@dataclass(frozen=True)
class UpdateRule:
    """The arithmetic of an optimizer on float32 values.

    Attributes:
        name: for messages and kernel names.
        update: `update(w, g, *states, *constants) -> (u, *states)`: the weight becomes w + u. Only + - * and the
            functions `sqrt`, `divide`, `maximum` and `sign_of`, which each engine binds to its own, and no literals,
            so that every engine gives the same bits.
        states: the states, in the order in which `update` takes and returns them.
        constants: the constants' names, in order.
        values: (group options, step) -> the constants as Python floats, made in float64.
        homogeneous: constants that, multiplied together with the gradient and the states by a common power of two
            (its square for degree 2), leave u as it is; None where the rule is not homogeneous.
        error_feedback: `error_feedback(lost, *states, *constants) -> first state`: adds a lost part of the weight to
            the first state so that later updates return it; None for a rule that takes a sign or keeps no such state.
        assigns: the gradient's place holds the new weight, and u is what it differs by.
        decays: the weight enters u by its decay alone. One that is infinite or NaN then has none and stays as it is,
            where inf - wd inf, or 0 inf without decay, would be NaN.
    """

    name: str
    update: Callable
    states: tuple[StateSlot, ...]
    constants: tuple[str, ...]
    values: Callable[[Mapping, int], tuple[float, ...]]
    homogeneous: tuple[str, ...] | None = None
    error_feedback: Callable | None = None
    assigns: bool = False
    decays: bool = True
