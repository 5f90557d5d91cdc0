"""tune: the cheapest recipe that stays with float32 on a task: candidates by their bytes, tried at matched seeds."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from .. import recipes
from .. import recipes as catalog
from .._messages import a_kind
from .._qualified_names import make_name_pattern
from ..observation import Finding
from ..observation._finding import SEVERITIES
from ..recipes import Recipe
from ..recipes._plan import assign
from ._defaults import PASSING_VERDICTS, REFERENCE, TWIN
from .evidence._evidence import Evidence
from .evidence._row import Row, choose_verdict, compute_interval
from .evidence._table import format_number, format_percent
from .running._plan import Trial, plan_trials
from .running._training import Listener, TrainingRun, open_training_run
from .running._trial import OBSERVED_KEY
from .tasks import Task

# The training that is observed: bfloat16 parameters, every update rounded to nearest.
OBSERVED_RECIPE = "bf16"
# Rounding to nearest is taken to do where the movement that took place differs from the wanted one by no more.
MOST_LOST_MOVEMENT = 0.02

UpdateByParameter = dict[str, str]
ObservedParameters = Mapping[str, Mapping[str, Any]]


def group_parameters(observed: ObservedParameters) -> dict[str, list[str]]:
    """Return the names of bfloat16 parameters by their pattern: those that differ in numbers alone are of one kind.

    >>> group_parameters({"a.0.w": {"dtype": "bfloat16"}, "a.1.w": {"dtype": "bfloat16"}, "b": {"dtype": "float32"}})
    {'a.*.w': ['a.0.w', 'a.1.w']}
    """
    found: dict[str, list[str]] = {}
    for name, one in observed.items():
        if one["dtype"] == "bfloat16":
            found.setdefault(make_name_pattern(name), []).append(name)
    return found


def choose_weight_updates(observed: ObservedParameters) -> UpdateByParameter:
    """Return for each bfloat16 parameter the weight update of fewest bytes that an observed training allows.

    The observed training rounds to nearest. Where nearly all of the wanted movement took place, that will do; else
    rounding at random may, of the same bytes.

    >>> one = {"dtype": "bfloat16", "realised": 1.0}
    >>> choose_weight_updates({"a": one, "b": one | {"realised": 0.4}})
    {'a': 'nearest', 'b': 'stochastic'}
    """
    return {
        name: "nearest" if measure_lost_movement(observed, names) <= MOST_LOST_MOVEMENT else "stochastic"
        for names in group_parameters(observed).values()
        for name in names
    }


def measure_lost_movement(observed: ObservedParameters, names: Sequence[str]) -> float:
    """Return by how much the movement of any of some parameters differs from the wanted one, as a share of that."""
    return max(float(abs(1 - (observed[name]["realised"] or 0.0))) for name in names)


def set_weight_updates(recipe: Recipe, model: nn.Module, updates: UpdateByParameter) -> Recipe:
    """Return a recipe of narrow parameters with a weight update for each, said in as few globs as say it right."""
    names = list(dict.fromkeys(updates.values()))
    usual = max(names, key=list(updates.values()).count)
    others = {name: update for name, update in updates.items() if update != usual}
    if not others:
        return recipe.replace(weight_update=usual)
    by_pattern = dict.fromkeys((make_name_pattern(name), update) for name, update in others.items())
    for pairs in ((*by_pattern, ("*", usual)), (*others.items(), ("*", usual))):
        mixed = recipe.replace(weight_update=pairs)
        given = assign(mixed, model)
        if all(given[name] == update for name, update in updates.items()):
            return mixed
    raise AssertionError("names of parameters are globs that match themselves")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recipe of the search, its bytes per parameter and its outcome.

    Attributes:
        recipe: the recipe.
        bytes_per_parameter: weight, what lies beside it, optimizer states and gradient.
        outcome: "holds", "worse", "unclear", "diverged", or "not trained".
        why: in words.
        gap: its mean loss above float32's; None where nothing was trained to the end.
    """

    recipe: Recipe
    bytes_per_parameter: float
    outcome: str = "not trained"
    why: str = ""
    gap: float | None = None


def count_bytes(task: Task, model: nn.Module, recipe: Recipe) -> float:
    """Return the bytes per parameter of a recipe as the optimizer that goes with it counts them.

    A recipe that does not go with the model or the optimizer is a ValueError.
    """
    converted = recipes.convert(copy.deepcopy(model), recipe)
    return float(recipes.optimizer(converted, task.rule, **task.hyper).bytes_per_parameter())


def list_candidates(task: Task, model: nn.Module, observed: ObservedParameters) -> list[Candidate]:
    """Return the recipes that an observed training leaves open, by their bytes."""
    probe, updates = recipes.get(OBSERVED_RECIPE), choose_weight_updates(observed)
    if not updates:
        return []
    cheapest = set_weight_updates(probe, model, updates)
    if len(names := list(dict.fromkeys(updates.values()))) > 1:
        cheapest = cheapest.replace(description=f"{' and '.join(names)}, as observed")
    rungs = [(cheapest, "8bit"), (cheapest, None), (cheapest, "float32")]
    for update in ("split8", "kahan", "split"):
        rungs += [(probe.replace(weight_update=update), state) for state in ("8bit", None, "float32")]
    found = []
    for recipe, state in rungs:
        named = _name_recipe(recipe.replace(state_dtype=state))
        try:
            found.append(Candidate(named, count_bytes(task, model, named)))
        except ValueError:
            continue  # an optimizer of one's own may have no states of 8 bits
    known = recipes.names()
    by_cost: dict[tuple[float, object], Candidate] = {}
    for candidate in sorted(found, key=lambda one: (one.bytes_per_parameter, one.recipe.name not in known)):
        # Where an optimizer has no states, their dtype makes no difference.
        by_cost.setdefault((candidate.bytes_per_parameter, candidate.recipe.weight_update), candidate)
    return list(by_cost.values())


def _name_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe under the catalogue's name for it, or under one that says what it is."""
    update = recipe.weight_update if isinstance(recipe.weight_update, str) else "mix"
    state = {None: "", "8bit": "-state8", "float32": "-state32"}[recipe.state_dtype]
    for name in recipes.names():
        known = recipes.get(name)
        if known.replace(name="x", description="") == recipe.replace(name="x", description=""):
            return known
    name = f"bf16-{update}{state}"
    name += "-state16" if name in recipes.names() else ""  # the catalogue's name for other states
    words = recipe.description if update == "mix" else f"bfloat16, {update} updates"
    states = {"8bit": ", 8-bit states", "float32": ", float32 states"}.get(recipe.state_dtype or "", "")
    return recipe.replace(name=name, description=words + states)


# A first seed that lies so many times the tolerance above float32 needs no further seeds.
_CLEAR_GAP_FACTOR = 3.0
# A mix of two recipes is tried where it can save this share of the bytes.
_LEAST_SAVING = 0.01


class RecipeSearch:
    """The candidates of a search and the trainings that decide it."""

    def __init__(
        self, task: Task, seeds: Sequence[int], steps: int, tolerance: float | None, most: int, training: TrainingRun
    ) -> None:
        self.task, self.seeds, self.steps, self.tolerance = task, seeds, steps, tolerance
        self._left, self._training = most, training
        self._allowed = 0.0  # how far a loss may be above float32's
        self.model = task.model(task.load(), seeds[0])
        self.candidates: list[Candidate] = []
        self.findings: list[Finding] = []
        self._observed: ObservedParameters = {}

    def train_controls(self) -> None:
        """Train float32 and its twin from every seed, and one bfloat16 training that is observed."""
        controls = [self._make_trial(recipes.get(name), seed) for seed in self.seeds for name in (REFERENCE, TWIN)]
        probe = self._make_trial(recipes.get(OBSERVED_RECIPE), self.seeds[0], observed=True)
        self._training.train_missing([*controls, probe])
        seen = self._training.results[probe.key][OBSERVED_KEY]
        self._observed = seen["parameters"]
        self.findings = [Finding(**{**one, "where": tuple(one["where"])}) for one in seen["findings"]]
        reference = self._read_evidence_row(REFERENCE)
        if reference.loss is None:
            raise ValueError(
                f"task {self.task.name!r} diverges in float32 from {reference.diverged} of {len(self.seeds)} seeds: "
                "there is nothing to stay with; lower its learning rate"
            )
        self._allowed = reference.tolerance
        if self.tolerance is not None:
            self._allowed = self.tolerance * abs(reference.loss)
            self._check_tolerance(reference.loss)

    def find_cheapest(self, given: Sequence[Recipe] | None) -> Recipe:
        """Return the cheapest recipe that holds; float32's own where none does."""
        if given is None:
            candidates = list_candidates(self.task, self.model, self._observed)
        else:
            candidates = sorted(map(self._make_candidate, given), key=attrgetter("bytes_per_parameter"))
        # The observed training's one seed may show that it cannot hold.
        probe = self._make_candidate(recipes.get(OBSERVED_RECIPE))
        rejected = self._judge_first_seed(probe)
        failed = [] if rejected is None else [rejected]
        self.candidates += [one for one in failed if one.recipe not in [other.recipe for other in candidates]]
        found = None
        for candidate in candidates:
            if found is not None:
                self.candidates.append(dataclasses.replace(candidate, why=f"{found.recipe.name} holds at fewer bytes"))
                continue
            known = rejected if candidate.recipe == probe.recipe else None
            done = known or self._try_candidate(candidate)
            self.candidates.append(done)
            found = done if done.outcome == "holds" else None
            failed += [done] if done.outcome in ("worse", "diverged") else []
        if found is not None and given is None:
            found = self._mix_updates(found, failed)
        float32 = self._make_candidate(recipes.get(REFERENCE))
        self.candidates.append(dataclasses.replace(float32, outcome="holds", why="the reference", gap=0.0))
        self.candidates.sort(key=attrgetter("bytes_per_parameter"))
        return float32.recipe if found is None else found.recipe

    def _make_candidate(self, recipe: Recipe) -> Candidate:
        return Candidate(recipe, count_bytes(self.task, self.model, recipe))

    def _make_trial(self, recipe: Recipe, seed: int, observed: bool = False) -> Trial:
        return Trial(self.task, recipe, seed, self.steps, observed)

    def _try_candidate(self, candidate: Candidate) -> Candidate:
        """Train a candidate, and say what became of it."""
        if self._left == 0:
            return dataclasses.replace(candidate, why="the number of candidates to train was reached (most=)")
        self._left -= 1
        first = self._make_trial(candidate.recipe, self.seeds[0])
        self._training.train_missing([first])
        clear = self._judge_first_seed(candidate)
        if clear is not None:
            return clear
        self._training.train_missing([first, *(self._make_trial(candidate.recipe, seed) for seed in self.seeds[1:])])
        row = self._read_evidence_row(candidate.recipe.name)
        if row.diverged:
            why = f"its loss is not finite from {row.diverged} of {row.seeds} seeds"
            return dataclasses.replace(candidate, outcome="diverged", why=why)
        outcome, why = self._judge_row(row)
        return dataclasses.replace(candidate, outcome=outcome, why=why, gap=row.gap)

    def _judge_first_seed(self, candidate: Candidate) -> Candidate | None:
        """Return the outcome of a candidate that fails on its first seed already, else None."""
        row = self._read_evidence_row(candidate.recipe.name)
        if row.diverged:
            return dataclasses.replace(candidate, outcome="diverged", why="its loss is not finite")
        assert row.gap is not None
        if row.gap <= _CLEAR_GAP_FACTOR * self._allowed:
            return None
        why = f"its first seed is {row.gap / self._allowed:.0f} times the tolerance above float32"
        return dataclasses.replace(candidate, outcome="worse", why=why, gap=row.gap)

    def _judge_row(self, row: Row) -> tuple[str, str]:
        """Return the outcome of a candidate that was trained from all seeds, and why.

        It is that of a comparison of this candidate alone with float32, without the correction for several recipes:
        what becomes of one must not depend on how many were tried before it.
        """
        assert row.gap is not None
        assert row.interval is not None
        if self.tolerance is None:
            alone = choose_verdict(row.gap, row.interval, self._allowed)
            outcome = "holds" if alone in PASSING_VERDICTS else str(alone)
        elif row.gap + row.interval <= self._allowed:
            outcome = "holds"
        else:
            outcome = "worse" if row.gap - row.interval > self._allowed else "unclear"
        why = "" if outcome != "unclear" else f"seeds scatter by {row.interval:.4f}: more of them (seeds=) would tell"
        return outcome, why

    def _check_tolerance(self, loss: float) -> None:
        """Refuse a tolerance that not even a second float32 could be told to be within."""
        twins = self._training.make_evidence().gaps(self.task.name, TWIN)
        least = compute_interval([0.0] * len(self.seeds), twins, loss)
        assert least is not None
        if least > self._allowed:
            raise ValueError(
                f"tolerance={self.tolerance:g} is below {least / abs(loss):.2g}, what {len(self.seeds)} seeds of "
                f"task {self.task.name!r} can tell at all, as a start that differs by 1e-7 shows: give more seeds, "
                "longer trainings (steps=) or a larger tolerance"
            )

    def _read_evidence_row(self, recipe: str) -> Row:
        return self._training.make_evidence().row(self.task.name, recipe)

    def _mix_updates(self, found: Candidate, failed: Sequence[Candidate]) -> Candidate:
        """Give the more expensive update to as few kinds of layers as needed, the worst first, by bisection."""
        below = [one for one in failed if _differ_in_updates(one.recipe, found.recipe) and _is_cheaper(one, found)]
        if not below:
            return found
        cheaper = max(below, key=attrgetter("bytes_per_parameter"))
        dear, cheap = assign(found.recipe, self.model), assign(cheaper.recipe, self.model)
        kinds = {
            kind: names
            for kind, names in group_parameters(self._observed).items()
            if any(dear[name] != cheap[name] for name in names)
        }
        order = sorted(kinds, key=lambda kind: measure_lost_movement(self._observed, kinds[kind]), reverse=True)
        fails, holds, mixed_from = 0, len(order), found.recipe
        while holds - fails > 1 and self._left:
            middle = (fails + holds) // 2
            dearer = [name for kind in order[:middle] for name in kinds[kind]]
            updates = {
                name: str((dear if name in dearer else cheap)[name])
                for names in group_parameters(self._observed).values()
                for name in names
            }
            candidate = self._make_mixed_candidate(mixed_from, updates, order[:middle])
            if not _is_cheaper(candidate, found):
                fails = middle
                continue
            done = self._try_candidate(candidate)
            self.candidates.append(done)
            if done.outcome == "holds":
                found, holds = done, middle
            else:
                fails = middle
        return found

    def _make_mixed_candidate(self, recipe: Recipe, updates: UpdateByParameter, kinds: Sequence[str]) -> Candidate:
        mixed = set_weight_updates(recipe, self.model, updates).replace(
            name=f"{recipe.name}-on-{len(kinds)}",
            description=f"{recipe.description}, but on {', '.join(kinds)} alone",
        )
        return self._make_candidate(mixed)


def _differ_in_updates(one: Recipe, other: Recipe) -> bool:
    alike = {"name": one.name, "description": "", "weight_update": None}
    return one.replace(**alike) == other.replace(**alike)


def _is_cheaper(one: Candidate, other: Candidate) -> bool:
    return one.bytes_per_parameter < (1 - _LEAST_SAVING) * other.bytes_per_parameter


_MOST_PRINTED_FINDINGS = 5


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`; ``print`` shows it.

    Attributes:
        recipe: the recipe of fewest bytes that stays with float32 within the tolerance; float32's own where none does.
        evidence: all trials, as `halfulp.compare` gives them: ``tuned.evidence.to_html(path)`` writes their page.
        candidates: what was considered, by bytes, and what became of each.
        findings: what `hu.observe` found in the observed trainings, the worst first.
        tolerance: the share of float32's loss by which a recipe may be above it; None is what `compare` calls no
            difference.
    """

    recipe: Recipe
    evidence: Evidence
    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]
    tolerance: float | None

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes per parameter of the recipe: weight, what lies beside it, optimizer states and gradient."""
        return next(one.bytes_per_parameter for one in self.candidates if one.recipe == self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return {
            "recipe": self.recipe.to_dict(),
            "bytes_per_parameter": self.bytes_per_parameter,
            "tolerance": self.tolerance,
            "candidates": [{**vars(one), "recipe": one.recipe.to_dict()} for one in self.candidates],
            "findings": [finding.to_dict() for finding in self.findings],
            "evidence": self.evidence.to_dict(),
        }

    def headline(self) -> str:
        """Return in one sentence which recipe it is and what it costs."""
        task = self.evidence.tasks()[0]
        within = f"within {format_percent(self.tolerance)} of float32" if self.tolerance else "no difference to float32"
        if self.recipe.name == REFERENCE:
            return f"{task}: no candidate is {within}; float32 remains."
        reference = self.evidence.row(task, REFERENCE)
        return (
            f"{task}: {self.recipe.name}, {within}, at {format_number(self.bytes_per_parameter, 1)} bytes per "
            f"parameter instead of {format_number(reference.bytes_per_parameter, 1)}."
        )

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("recipe", "bytes/param", "gap to fp32", "outcome", "why")]
        for one in self.candidates:
            size, gap = format_number(one.bytes_per_parameter, 2), format_number(one.gap, 4, sign=True)
            rows.append((one.recipe.name, size, gap, one.outcome, one.why))
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        shown = [f"  {finding.severity}: {finding}" for finding in self.findings[:_MOST_PRINTED_FINDINGS]]
        more = len(self.findings) - len(shown)
        shown += [f"  and {more} more in .findings"] if more else []
        observed = ["", "Observed where every update is rounded to nearest:", *shown] if shown else []
        return "\n".join([self.headline(), self.recipe.explain(), "", *table, *observed])


def tune(
    task: str | Task,
    tolerance: float | None = None,
    *,
    recipes: Sequence[str | Recipe] | None = None,
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    data: str | None = None,
    most: int = 12,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listen: Listener | None = None,
) -> Tuned:
    """Find the recipe of fewest bytes per parameter that stays with float32 on a task, per layer where that pays.

    1. float32 and a twin whose start differs by 1e-7 are trained from every seed, and a training with bfloat16
       parameters, each update rounded to nearest, from the first one under `hu.observe`.
    2. What that saw says of each layer whether nearest rounding will do or may be stochastic; recipes with a residual
       come after that. They are ordered by bytes.
    3. They are trained, the cheapest first: from one seed, and from the others unless that is far off, until one holds.
    4. Where the update of that recipe costs more than that of one that did not hold, it is given to as few kinds of
       layers as it takes, those that fare worst first, by bisection.

    Args:
        task: a task's name, a Task, or a training step of your own: `halfulp.trials.tasks.Step`.
        tolerance: by which share of float32's loss a recipe's may be above it, 0.01 for one per cent: gap and half of
            its 95% interval over seeds together. None: what `halfulp.compare` calls no difference or better where it
            compares that recipe alone.
        recipes: candidates of your own, tried by their bytes as they are; None takes those of step 2.
        seeds: how many (0, 1, ...), or which; three or more.
        steps: of every training; None is the task's own.
        data: the folder for tasks that read files.
        most: how many candidates are trained.
        out, workers, resume, overwrite, listen: as `halfulp.compare` takes them.

    Returns:
        A Tuned: ``recipe``, ``evidence``, ``candidates`` with what became of each, ``findings`` of the observed
        training. Print it.

    Raises:
        ValueError: an unknown name, fewer than three seeds, a tolerance outside of 0 to 1 or below what the seeds can
            tell, a task with a training loop of its own, or one that diverges in float32.
        TrialError: a trial crashed or its worker was killed.

    >>> import torch, halfulp as hu
    >>> x, y = torch.randn(128, 8), torch.randn(128, 1)
    >>> def step(model, number):
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> task = hu.trials.tasks.Step(step, torch.nn.Linear(8, 1), steps=40, rule="SGD", lr=0.05)
    >>> tuned = hu.tune(task)
    >>> tuned.recipe.param_dtype, tuned.bytes_per_parameter < 8
    ('bfloat16', True)
    """
    _check_arguments(task, tolerance, most)
    given = None if recipes is None else [catalog.get(one) for one in recipes]
    given = given if given is None else [one for one in given if one.name not in (REFERENCE, TWIN)]
    if given is not None and not given:
        raise ValueError("recipes= holds no candidate beside float32: give names or Recipes, or leave it out")
    for one in given or ():
        if one.name == OBSERVED_RECIPE and one != catalog.get(one.name):
            raise ValueError(
                f"the name {one.name!r} belongs to the training that is observed: give your recipe another"
            )
    first = plan_trials(task, [REFERENCE, TWIN, *(given or ())], seeds, steps, data)
    kind, length = first[0].task, first[0].steps
    numbers = list(dict.fromkeys(trial.seed for trial in first))
    if len(numbers) < 3:
        raise ValueError(f"a verdict needs three seeds, got {len(numbers)}: give seeds=3 or more")
    if hasattr(kind, "trial"):
        raise ValueError(
            f"task {kind.name!r} has a training loop of its own, which cannot be observed: compare recipes on it by "
            "halfulp.compare, or tune another task"
        )
    controls = [trial for trial in first if trial.recipe.name in (REFERENCE, TWIN)]
    with open_training_run(out, controls, workers, listen, resume, overwrite) as run:
        search = RecipeSearch(kind, numbers, length, tolerance, most, run)
        search.train_controls()
        chosen = search.find_cheapest(given)
    findings = sorted(search.findings, key=lambda finding: -SEVERITIES.index(finding.severity))
    return Tuned(chosen, run.make_evidence(), tuple(search.candidates), tuple(findings), tolerance)


def _check_arguments(task: object, tolerance: float | None, most: int) -> None:
    if not isinstance(task, str | Task):
        raise TypeError(f"tune takes a task's name, a Task or a halfulp.trials.tasks.Step, got {a_kind(task)}")
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 < tolerance < 1):
        raise ValueError(f"tolerance is a share of float32's loss between 0 and 1, or None; got {tolerance!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"most is how many candidates are trained, 1 or more; got {most!r}")
