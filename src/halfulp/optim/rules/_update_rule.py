"""An update rule: the arithmetic of one optimizer, written once, run by torch and recorded for kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...kernels._threads import cached_attribute

# A number, or a function of a param group's options that gives it.
NumberOrFunction = float | Callable[[Mapping[str, Any]], float]
# What every format of states holds.
_LARGEST_INITIAL_VALUE = 2.0**127


@dataclass(frozen=True)
class StateSlot:
    """One state that a rule keeps per parameter element.

    Attributes:
        name: its key in the optimizer's state, torch.optim's where torch has it.
        degree: 1 where the state grows as the gradient does, 2 where it grows as its square.
        initial: its value before the first step, rounded to nearest where it is stored.
        maximum_of: the state whose largest value so far it is; None for other states. It keeps what noise adds to that
            state for good, so that both need a storage with little (`refuse_coarse_states`).

    >>> StateSlot("sum", 2, initial=lambda group: group["initial_accumulator_value"]).initial_value(
    ...     {"initial_accumulator_value": 0.1}
    ... )
    0.1
    """

    name: str
    degree: int
    initial: NumberOrFunction = 0.0
    maximum_of: str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.degree not in (1, 2):
            raise ValueError(f"state {self.name!r} of degree {self.degree!r}: give a name, and 1 or 2")

    def initial_value(self, group: Mapping[str, Any]) -> float:
        """Return the value before the first step under a group's options.

        Raises:
            TypeError: it is no number.
            ValueError: it is beyond 2^127, which not all formats of states hold, or a second moment's is negative.
        """
        given: Any = self.initial(group) if callable(self.initial) else self.initial
        try:
            if isinstance(given, bool | str):
                raise TypeError
            value = float(given)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"state {self.name!r} begins with {given!r}: give a number") from None
        if not abs(value) <= _LARGEST_INITIAL_VALUE or (self.degree == 2 and value < 0):
            sign = " that is not negative" if self.degree == 2 else ""
            raise ValueError(f"state {self.name!r} begins with {value}: give a number up to 2^127{sign}")
        return value


# The factor of a gradient by which a group descends, or climbs under `maximize`.
GRADIENT_SIGN_BY_MAXIMIZE = {False: 1.0, True: -1.0}


@dataclass(frozen=True)
class Reduction:
    """A sum over elements that a step needs before it changes any.

    The sum is of numbers rounded so that float64 adds them exactly, in whatever order and on however many ranks: it has
    the same bits on every engine, under every sharding. Of n elements it is off by at most n^3 2^-104 of the largest,
    and by its own rounding.

    Attributes:
        of: `of(w, g, *states, *constants) -> value`, a device function as a rule's `update`, of those constants that
            `values` gives; of all these it takes as many as it has arguments.
        squares: whether the values' squares are added up, as for a norm.
        over_all: whether it is over all parameters of the optimizer that step; else over each tensor by itself.
    """

    of: Callable[..., Any]
    squares: bool = False
    over_all: bool = False


@dataclass(frozen=True)
class UpdateRule:
    """The arithmetic of an optimizer on float32 values.

    Attributes:
        name: for messages and kernel names.
        update: `update(w, g, *states, *constants) -> (u, *states)`: the weight becomes w + u. Only + - * and the
            functions `sqrt`, `divide`, `maximum` and `sign_of`, which each engine binds to its own, and no literals,
            so that every engine gives the same bits. It is recorded once: what it finds outside of its arguments, as
            in a closure, is what stood there then. The names of its last arguments are those of the constants.
        states: the states, in the order in which `update` takes and returns them.
        values: (group options, step) -> the constants as Python floats, made in float64; without those that
            `late_values` gives.
        homogeneous: constants that, multiplied together with the gradient and the states by a common power of two
            (its square for degree 2), leave u as it is; None where the rule is not homogeneous.
        error_feedback: `error_feedback(lost, *states, *constants) -> first state`: adds a lost part of the weight to
            the first state so that later updates return it; None for a rule that takes a sign or keeps no such state.
        assigns: the gradient's place holds the new weight, and u is what it differs by.
        decays: the weight enters u by its decay alone. One that is infinite or NaN then has none and stays as it is,
            where inf - wd inf, or 0 inf without decay, would be NaN.
        betas: how many numbers the option `betas` holds; None where there is none, or any count will do.
        prepare: (tensors of one parameter, group options, step) -> a float32 tensor of its shape, and the last of the
            constants: torch operations on whole tensors before the update, which takes the tensor behind the gradient,
            `update(w, g, prepared, *states, *constants)`; None for a rule that needs none. Of a DTensor every rank
            computes the whole, so that shards have the bits that it has.
        factors: (shape) -> names and shapes of float32 tensors that `prepare` reads and writes, begun with zeros.
        reductions: sums that are needed before the update; at most two.
        late_values: (group options, step, the sums in order) -> the last of the constants; only beside `reductions`.
        follows_from_step: what torch.optim keeps beside the states and `values` finds from the step.
    """

    name: str
    update: Callable[..., Any]
    states: tuple[StateSlot, ...]
    values: Callable[[Mapping[str, Any], int], tuple[float, ...]]
    homogeneous: tuple[str, ...] | None = None
    error_feedback: Callable[..., Any] | None = None
    assigns: bool = False
    decays: bool = True
    betas: int | None = None
    prepare: Callable[[Any, Mapping[str, Any], int], tuple[Any, tuple[float, ...]]] | None = None
    factors: Callable[[tuple[int, ...]], Mapping[str, tuple[int, ...]]] | None = None
    reductions: tuple[Reduction, ...] = ()
    late_values: Callable[[Mapping[str, Any], int, tuple[float, ...]], tuple[float, ...]] | None = None
    follows_from_step: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.values):
            raise TypeError(f"rule {self.name!r}: values is a function of a group's options and the step, no names")
        for field, kind in (("states", StateSlot), ("reductions", Reduction)):
            given = getattr(self, field)
            if not isinstance(given, tuple) or not all(isinstance(one, kind) for one in given):
                raise TypeError(f"rule {self.name!r}: {field} is a tuple of {kind.__name__}s, got {given!r}")
        if len(self.reductions) > 2:
            raise ValueError(f"rule {self.name!r} has {len(self.reductions)} reductions: at most two fit into a step")
        if self.late_values is not None and not self.reductions:
            raise ValueError(
                f"rule {self.name!r} has late_values, which take sums, but no reductions: give it reductions, or its "
                "last constants by values or prepare"
            )
        kept = [state.name for state in self.states]
        for state in self.states:
            if state.maximum_of is not None and (state.maximum_of == state.name or state.maximum_of not in kept):
                raise ValueError(
                    f"rule {self.name!r} has the state {state.name!r}, the maximum of {state.maximum_of!r}: give the "
                    f"name of another of its states, which are {', '.join(map(repr, kept))}"
                )

    @cached_attribute
    def constants(self) -> tuple[str, ...]:
        """The constants' names: the update's arguments behind weight, gradient, what is prepared, and states."""
        first = 2 + (self.prepare is not None) + len(self.states)
        return tuple(inspect.signature(self.update).parameters)[first:]

    def refuse_constant_count(self, given: tuple[float, ...]) -> NoReturn:
        """Raise ValueError: there is not a number for each of the constants."""
        raise ValueError(
            f"the values of rule {self.name!r} are {given}, but its update takes {self.constants}: give a number for "
            "each of these"
        )

    @cached_attribute
    def has_data_dependent_constants(self) -> bool:
        """Whether some of its constants are known only after a look at the tensors."""
        return self.late_values is not None or self.prepare is not None
