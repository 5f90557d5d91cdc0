"""The parameters of a step in their batches, which the next step takes over while nothing they depend on changes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from ..parameters._parameter_plan import ParameterPlan
from ..parameters._state_tensors import BEGUN
from ..rules._update_rule import UpdateRule
from ._batch import Batch, Table

# Of one group: its rule, plan options, report interval and number of parameters.
Setting = tuple[UpdateRule, Any, int, int]


@dataclass(frozen=True, eq=False, slots=True)
class Seats:
    """The parameters of one batch.

    Attributes:
        table: of their plans.
        places: theirs among the parameters of all groups.
        runs: the number of a group and the rows of its parameters, (group, first, last).
    """

    table: Table
    places: list[int]
    runs: list[tuple[int, int, int]]


@dataclass(frozen=True, eq=False, slots=True)
class Roster:
    """The parameters that step together, batch by batch.

    Attributes:
        settings: of the groups.
        plans: of all parameters in the groups' order; None for one that has not stepped.
        resting: the places of those without a gradient.
        seats: of the batches.
        keys, entries: of the optimizer's state, in its order, the keys by their ids.
    """

    settings: list[Setting]
    plans: list[ParameterPlan | None]
    resting: list[int]
    seats: list[Seats]
    keys: list[int]
    entries: list[Any]

    @classmethod
    def of(
        cls,
        settings: list[Setting],
        plans: list[ParameterPlan | None],
        resting: list[int],
        places: Sequence[list[int]],
        state: Mapping[Any, Any],
        before: Roster | None,
    ) -> Roster:
        """Return a roster.

        Args:
            settings, plans, resting: see there.
            places: of the parameters of each batch.
            state: the optimizer's.
            before: the roster of the step before, whose tables stay where their plans do.
        """
        group_of = [number for number, setting in enumerate(settings) for _ in range(setting[-1])]
        tables = {} if before is None else {table.plans[0]: table for table in before.tables}
        seats = []
        for chosen in places:
            own = [plan for plan in map(plans.__getitem__, chosen) if plan is not None]
            table = tables.get(own[0])
            groups = [group_of[place] for place in chosen]
            cuts = [0, *(k for k in range(1, len(groups)) if groups[k] != groups[k - 1]), len(groups)]
            runs = [(groups[first], first, last) for first, last in itertools.pairwise(cuts)]
            seats.append(Seats(Table.of(own) if table is None or table.plans != own else table, chosen, runs))
        return cls(settings, plans, resting, seats, [*map(id, state)], [*state.values()])

    @property
    def tables(self) -> list[Table]:
        """The tables of the batches."""
        return [seats.table for seats in self.seats]

    def _of(self, seats: Seats, values: list[Any]) -> list[Any]:
        """Return the values of a batch's parameters, given those of all."""
        return values if len(seats.places) == len(self.plans) else [values[place] for place in seats.places]

    def stands(
        self,
        settings: list[Setting],
        plans: list[ParameterPlan | None],
        resting: list[int],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
        state: Mapping[Any, Any],
    ) -> bool:
        """Return whether a step has the same parameters with gradients, under plans that are all valid."""
        if not (
            settings == self.settings
            and plans == self.plans
            and resting == self.resting
            and [*map(id, state)] == self.keys
            and all(map(is_, state.values(), self.entries))
        ):
            return False
        return all(s.table.stands(self._of(s, parameters), self._of(s, gradients)) for s in self.seats)

    def batches(
        self,
        groups: list[dict[str, Any]],
        parameters: list[torch.Tensor],
        gradients: list[Any],
        scales: dict[int, torch.Tensor],
    ) -> list[Batch] | None:
        """Return the batches of a step; None if some of a batch's parameters are metered in this step and others not.

        Auxiliary tensors are reset where their parameters were written from outside.

        Args:
            groups: of the optimizer.
            parameters, gradients: of all groups, in order.
            scales: of scaled gradients, by place.
        """
        found = []
        for seats in self.seats:
            table, constants = seats.table, []
            counted: list[tuple[Mapping[str, Any], int]] = []
            steps: list[int] = [entry["step"] + 1 for entry in table.entries]
            metered = set()
            for number, first, last in seats.runs:
                rule, _, interval, _ = self.settings[number]
                own = steps[first:last]
                entries = table.entries[first:last]
                ages = own
                if True in [BEGUN in entry for entry in entries]:
                    ages = [step - entry.get(BEGUN, 0) for step, entry in zip(own, entries)]
                made = {age: tuple(rule.values(groups[number], age)) for age in {*ages}}
                constants += [*made.values()] * len(ages) if len(made) == 1 else [made[age] for age in ages]
                if rule.is_late:
                    counted += [(groups[number], age) for age in ages]
                metered |= {bool(interval) and step % interval == 0 for step in {*own}}
            if len(metered) > 1:
                return None
            spec = table.plans[0].spec
            found.append(
                Batch(
                    spec.metered_twin if metered.pop() else spec,
                    table,
                    self._of(seats, parameters),
                    self._of(seats, gradients),
                    [scales.get(place, 1.0) for place in seats.places] if scales else [1.0] * len(steps),
                    steps,
                    constants,
                    counted,
                )
            )
        for batch in found:
            batch.drop_stale()
        return found
