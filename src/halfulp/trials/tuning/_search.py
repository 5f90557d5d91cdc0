"""The search: trainings of one candidate after the other, the cheapest first, until one stays with float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from ... import recipes
from ...recipes import Recipe
from ...recipes._plan import assign
from .._defaults import KEPT, REFERENCE, TWIN
from ..evidence._row import Row
from ..evidence._statistics import interval, verdict
from ..running._plan import Trial
from ..running._training import Training
from ..running._trial import READINGS
from ..tasks import Task
from ._candidates import (
    PROBES,
    Candidate,
    Costs,
    Updates,
    estimate_harm,
    group_by_pattern,
    keeps_less,
    order_candidates,
    price_recipes,
    set_updates,
)

# A first seed that lies so many times the tolerance above float32 needs no further seeds.
_CLEARLY = 3.0
# A mix of two recipes is tried where it can save this share of the bytes.
_WORTH = 0.01


class Search:
    """The candidates of a search and the trainings that decide it.

    Args:
        task: what is trained.
        seeds: matched in all trainings, three or more.
        steps: of a training.
        tolerance: as `tune` takes it.
        most: how many candidates are trained.
        training: where trials are trained.
    """

    def __init__(
        self, task: Task, seeds: Sequence[int], steps: int, tolerance: float | None, most: int, training: Training
    ) -> None:
        self.task, self.seeds, self.steps, self.tolerance = task, seeds, steps, tolerance
        self._left, self._training = most, training
        self.costs = Costs(task, task.model(task.load(), seeds[0]))
        self.candidates: list[Candidate] = []
        self.observed: dict[str, dict[str, Any]] = {}

    # what is trained ------------------------------------------------------------------------------------------

    def begin(self, dtypes: Sequence[str]) -> None:
        """Train float32 and its twin from every seed, and one narrow training per dtype that is observed.

        Raises:
            ValueError: float32 itself does not learn, or seeds scatter by more than the tolerance.
        """
        controls = [self._make_trial(recipes.get(name), seed) for seed in self.seeds for name in (REFERENCE, TWIN)]
        probes = [self._make_trial(recipes.get(PROBES[dtype]), self.seeds[0], observed=True) for dtype in dtypes]
        self._training.train([*controls, *probes])
        for dtype, trial in zip(dtypes, probes):
            self.observed[dtype] = self._training.results[trial.key][READINGS]
        reference = self._read_row(REFERENCE)
        if reference.loss is None:
            raise ValueError(
                f"task {self.task.name!r} diverges in float32 from {reference.diverged} of {len(self.seeds)} seeds: "
                "there is nothing to stay with; lower its learning rate"
            )
        if self.tolerance is not None:
            self._check_tolerance(reference.loss)

    def run(self, given: Sequence[Recipe] | None, dtypes: Sequence[str]) -> Recipe:
        """Return the cheapest recipe that holds; float32's own where none does."""
        if given is None:
            candidates, out = order_candidates(self.costs, self.observed, dtypes)
            self.candidates += out
        else:
            candidates = price_recipes(self.costs, given)
        failed = [one for one in map(self._judge_probe, dtypes) if one is not None]
        probed = {one.recipe.name: one for one in failed}
        self.candidates += [one for one in failed if one.recipe not in [other.recipe for other in candidates]]
        found = None
        for candidate in candidates:
            if found is None:
                done = probed.get(candidate.recipe.name) or self._try_candidate(candidate, failed)
                self.candidates.append(done)
                found = done if done.outcome == "holds" else None
                failed += [done] if done.outcome in ("worse", "diverged") else []
            else:
                self.candidates.append(dataclasses.replace(candidate, why=f"{found.recipe.name} holds at fewer bytes"))
        if found is not None and given is None:
            found = self._mix_updates(found, failed)
        float32 = recipes.get(REFERENCE)
        self.candidates.append(Candidate(float32, self.costs.count_bytes(float32), "holds", "the reference", 0.0))
        self.candidates.sort(key=attrgetter("bytes_per_parameter"))
        return float32 if found is None else found.recipe

    def _make_trial(self, recipe: Recipe, seed: int, observed: bool = False) -> Trial:
        return Trial(self.task, recipe, seed, self.steps, observed)

    # what becomes of a candidate ------------------------------------------------------------------------------

    def _try_candidate(self, candidate: Candidate, failed: Sequence[Candidate]) -> Candidate:
        """Train a candidate, unless that is known to be in vain, and say what became of it."""
        for other in failed:
            if keeps_less(candidate.recipe, other.recipe, self.costs.model):
                return dataclasses.replace(candidate, why=f"keeps no more of anything than {other.recipe.name}")
        if self._left == 0:
            return dataclasses.replace(candidate, why="the number of candidates to train was reached (most=)")
        self._left -= 1
        first = self._make_trial(candidate.recipe, self.seeds[0])
        self._training.train([first])
        clear = self._reject_early(candidate)
        if clear is not None:
            return clear
        self._training.train([first, *(self._make_trial(candidate.recipe, seed) for seed in self.seeds[1:])])
        row = self._read_row(candidate.recipe.name)
        if row.diverged:
            why = f"its loss is not finite from {row.diverged} of {row.seeds} seeds"
            return dataclasses.replace(candidate, outcome="diverged", why=why)
        outcome, why = self._judge_row(row)
        return dataclasses.replace(candidate, outcome=outcome, why=why, gap=row.gap)

    def _judge_probe(self, dtype: str) -> Candidate | None:
        """Return the observed training as a candidate, where its one seed shows that it cannot hold."""
        probe = recipes.get(PROBES[dtype])
        return self._reject_early(Candidate(probe, self.costs.count_bytes(probe)))

    def _reject_early(self, candidate: Candidate) -> Candidate | None:
        """Return the outcome of a candidate that fails on its first seed already, else None."""
        row = self._read_row(candidate.recipe.name)
        if row.diverged:
            return dataclasses.replace(candidate, outcome="diverged", why="its loss is not finite")
        assert row.gap is not None
        if row.gap <= _CLEARLY * self._compute_tolerance(row):
            return None
        why = f"its first seed is {row.gap / self._compute_tolerance(row):.0f} times the tolerance above float32"
        return dataclasses.replace(candidate, outcome="worse", why=why, gap=row.gap)

    def _judge_row(self, row: Row) -> tuple[str, str]:
        """Return the outcome of a candidate that was trained from all seeds, and why.

        It is that of a comparison of this candidate alone with float32, without the correction for several recipes:
        what becomes of one must not depend on how many were tried before it.
        """
        assert row.gap is not None
        assert row.interval is not None
        if self.tolerance is None:
            alone = verdict(row.gap, row.interval, row.tolerance)
            outcome = "holds" if alone in KEPT else str(alone)
        elif row.gap + row.interval <= self._compute_tolerance(row):
            outcome = "holds"
        else:
            outcome = "worse" if row.gap - row.interval > self._compute_tolerance(row) else "unclear"
        why = "" if outcome != "unclear" else f"seeds scatter by {row.interval:.4f}: more of them (seeds=) would tell"
        return outcome, why

    def _compute_tolerance(self, row: Row) -> float:
        """Return how far the loss may be above float32's."""
        if self.tolerance is None:
            return row.tolerance
        loss = self._read_row(REFERENCE).loss
        assert loss is not None
        return self.tolerance * abs(loss)

    def _check_tolerance(self, loss: float) -> None:
        """Refuse a tolerance that not even a second float32 could be told to be within."""
        twins = self._training.evidence().gaps(self.task.name, TWIN)
        least = interval([0.0] * len(self.seeds), twins, loss)
        assert least is not None
        assert self.tolerance is not None
        if least > self.tolerance * abs(loss):
            raise ValueError(
                f"tolerance={self.tolerance:g} is below {least / abs(loss):.2g}, what {len(self.seeds)} seeds of "
                f"task {self.task.name!r} can tell at all, as a start that differs by 1e-7 shows: give more seeds, "
                "longer trainings (steps=) or a larger tolerance"
            )

    def _read_row(self, recipe: str) -> Row:
        return self._training.evidence().row(self.task.name, recipe)

    # recipes for kinds of layers ------------------------------------------------------------------------------

    def _mix_updates(self, found: Candidate, failed: Sequence[Candidate]) -> Candidate:
        """Give the more expensive update to as few kinds of layers as needed, the worst first, by bisection."""
        below = [one for one in failed if _differ_in_updates(one.recipe, found.recipe)]
        below = [one for one in below if _is_cheaper(one, found)]
        if not below:
            return found
        cheaper = max(below, key=attrgetter("bytes_per_parameter"))
        observed = self.observed[str(found.recipe.param_dtype)]["parameters"]
        dear, cheap = self._read_updates(found.recipe, observed), self._read_updates(cheaper.recipe, observed)
        kinds = {
            kind: names for kind, names in group_by_pattern(observed).items() if any(dear[n] != cheap[n] for n in names)
        }
        order = sorted(
            kinds, key=lambda kind: estimate_harm(observed, kinds[kind], cheap[kinds[kind][0]]), reverse=True
        )
        fails, holds, mixed_from = 0, len(order), found.recipe
        while holds - fails > 1 and self._left:
            middle = (fails + holds) // 2
            names = [name for kind in order[:middle] for name in kinds[kind]]
            updates = cheap | {name: dear[name] for name in names}
            candidate = self._make_mix(mixed_from, updates, order[:middle])
            if not _is_cheaper(candidate, found):
                fails = middle
                continue
            done = self._try_candidate(candidate, ())
            self.candidates.append(done)
            if done.outcome == "holds":
                found, holds = done, middle
            else:
                fails = middle
        return found

    def _read_updates(self, recipe: Recipe, observed: Mapping[str, Any]) -> Updates:
        narrow = [name for names in group_by_pattern(observed).values() for name in names]
        given = assign(recipe, self.costs.model)
        return {name: str(given[name]) for name in narrow}

    def _make_mix(self, recipe: Recipe, updates: Updates, kinds: Sequence[str]) -> Candidate:
        mixed = set_updates(recipe, self.costs.model, updates).replace(
            name=f"{recipe.name}-on-{len(kinds)}",
            description=f"{recipe.description}, but on {', '.join(kinds)} alone",
        )
        return Candidate(mixed, self.costs.count_bytes(mixed))


def _differ_in_updates(one: Recipe, other: Recipe) -> bool:
    alike = {"name": one.name, "description": "", "weight_update": None}
    return one.replace(**alike) == other.replace(**alike)


def _is_cheaper(one: Candidate, other: Candidate) -> bool:
    return one.bytes_per_parameter < (1 - _WORTH) * other.bytes_per_parameter
