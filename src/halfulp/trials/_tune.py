"""tune: the cheapest recipe that stays with float32 on a task: candidates by their bytes, tried at matched seeds."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from .. import recipes
from .. import recipes as catalog
from .._messages import align_columns, name_type
from ..recipes import Recipe
from ._defaults import PASSING_VERDICTS, REFERENCE_RECIPE, TWIN_RECIPE
from .evidence._evidence import Evidence
from .evidence._row import choose_verdict
from .evidence._table import format_number, format_percent
from .running._plan import Trial, plan_trials
from .running._training import Listener, TrainingRun, open_training_run
from .tasks import Task


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


def count_bytes_per_parameter(task: Task, model: nn.Module, recipe: Recipe) -> float:
    """Return the bytes per parameter of a recipe as the optimizer that goes with it counts them.

    A recipe that does not go with the model or the optimizer is a ValueError.
    """
    converted = recipes.convert(copy.deepcopy(model), recipe)
    return float(recipes.optimizer(converted, task.rule, **task.hyper).bytes_per_parameter())


def list_candidates(task: Task, model: nn.Module) -> list[Candidate]:
    """Return the bfloat16 recipes with every weight update and storage of states, by their bytes."""
    by_cost: dict[tuple[float, str], Candidate] = {}
    for name in ("bf16", "bf16-stochastic", "bf16-split8", "bf16-kahan", "bf16-split"):
        base = catalog.get(name)
        for state in dict.fromkeys([base.state_dtype, *_NAME_SUFFIX_BY_STATE_DTYPE]):
            recipe, words = base, f"{name} with states in {state or 'bfloat16'}"
            if state != base.state_dtype:
                recipe = base.replace(
                    state_dtype=state, name=f"{name}{_NAME_SUFFIX_BY_STATE_DTYPE[state]}", description=words
                )
            try:
                found = Candidate(recipe, count_bytes_per_parameter(task, model, recipe))
            except ValueError:
                continue  # an optimizer of one's own may have no states of 8 bits
            # Where an optimizer has no states, their dtype makes no difference.
            by_cost.setdefault((found.bytes_per_parameter, name), found)
    return sorted(by_cost.values(), key=attrgetter("bytes_per_parameter"))


_NAME_SUFFIX_BY_STATE_DTYPE: dict[str | None, str] = {None: "-state16", "8bit": "-state8", "float32": "-state32"}
# A first seed that lies so many times the tolerance above float32 needs no further seeds.
_CLEAR_GAP_FACTOR = 3.0


def _train_and_judge_candidate(
    candidate: Candidate, task: Task, seeds: Sequence[int], steps: int, tolerance: float | None, run: TrainingRun
) -> Candidate:
    """Train a candidate, from one seed first; return it with its outcome.

    That is the outcome of a comparison of this candidate alone with float32, without the correction for several
    recipes: it must not depend on how many were tried before.
    """
    for part in (seeds[:1], seeds):
        run.train_trials_without_result([Trial(task, candidate.recipe, seed, steps) for seed in part])
        evidence = run.make_evidence()
        row, reference = (evidence.row(task.name, name) for name in (candidate.recipe.name, REFERENCE_RECIPE))
        if row.diverged or row.gap is None:
            why = f"its loss is not finite from {row.diverged} of {row.seeds} seeds"
            return dataclasses.replace(candidate, outcome="diverged", why=why)
        allowed = row.tolerance if tolerance is None else tolerance * abs(reference.loss or 0.0)
        if row.interval is None and row.gap > _CLEAR_GAP_FACTOR * allowed:
            why = f"its first seed is {row.gap / allowed:.0f} times the tolerance above float32"
            return dataclasses.replace(candidate, outcome="worse", why=why, gap=row.gap)
    assert row.gap is not None
    assert row.interval is not None
    if tolerance is None:
        alone = choose_verdict(row.gap, row.interval, allowed)
        outcome = "holds" if alone in PASSING_VERDICTS else str(alone)
    elif row.gap + row.interval <= allowed:
        outcome = "holds"
    else:
        outcome = "worse" if row.gap - row.interval > allowed else "unclear"
    why = "" if outcome != "unclear" else f"seeds scatter by {row.interval:.4f}: more of them (seeds=) would tell"
    return dataclasses.replace(candidate, outcome=outcome, why=why, gap=row.gap)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`; ``print`` shows it.

    Attributes:
        recipe: the recipe of fewest bytes that stays with float32 within the tolerance; float32's own where none does.
        evidence: all trials, as `halfulp.compare` gives them: ``tuned.evidence.to_html(path)`` writes their page.
        candidates: what was considered, by bytes, and what became of each.
        tolerance: the share of float32's loss by which a recipe may be above it; None is what `compare` calls no
            difference.
    """

    recipe: Recipe
    evidence: Evidence
    candidates: tuple[Candidate, ...]
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
            "evidence": self.evidence.to_dict(),
        }

    def headline(self) -> str:
        """Return in one sentence which recipe it is and what it costs."""
        task = self.evidence.tasks()[0]
        within = f"within {format_percent(self.tolerance)} of float32" if self.tolerance else "no difference to float32"
        if self.recipe.name == REFERENCE_RECIPE:
            return f"{task}: no candidate is {within}; float32 remains."
        reference = self.evidence.row(task, REFERENCE_RECIPE)
        return (
            f"{task}: {self.recipe.name}, {within}, at {format_number(self.bytes_per_parameter, 1)} bytes per "
            f"parameter instead of {format_number(reference.bytes_per_parameter, 1)}."
        )

    def __str__(self) -> str:
        rows = [("recipe", "bytes/param", "gap to fp32", "outcome", "why")]
        for one in self.candidates:
            size, gap = format_number(one.bytes_per_parameter, 2), format_number(one.gap, 4, sign=True)
            rows.append((one.recipe.name, size, gap, one.outcome, one.why))
        return "\n".join([self.headline(), self.recipe.explain(), "", *align_columns(rows)])


def tune(
    task: str | Task,
    tolerance: float | None = None,
    *,
    recipes: Sequence[str | Recipe] | None = None,
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listen: Listener | None = None,
) -> Tuned:
    """Find the recipe of fewest bytes per parameter that stays with float32 on a task.

    float32 and a twin whose start differs by 1e-7 are trained from every seed. Then the candidates are trained, those
    of fewest bytes first, each from one seed, and from the others unless that is far off, until one holds.

    Args:
        task: a task's name, a Task, or a training step of your own: `halfulp.trials.tasks.Step`.
        tolerance: by which share of float32's loss a recipe's may be above it, 0.01 for one per cent: gap and half of
            its 95% interval over seeds together. None: what `halfulp.compare` calls no difference or better where it
            compares that recipe alone.
        recipes: candidates of your own, tried by their bytes as they are; None takes bfloat16 with the updates
            nearest, stochastic, split8, kahan and split, and states in 8 bits, in float32 and as the optimizer chooses.
        seeds: how many (0, 1, ...), or which; three or more.
        steps: of every training; None is the task's own.
        data: the folder for tasks that read files.
        out, workers, resume, overwrite, listen: as `halfulp.compare` takes them.

    Returns:
        A Tuned: ``recipe``, ``evidence``, ``candidates`` with what became of each. Print it.

    Raises:
        ValueError: an unknown name, fewer than three seeds, a tolerance outside of 0 to 1, a task without an optimizer
            of `halfulp.optim`, or one that diverges in float32.
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
    if not isinstance(task, str | Task):
        raise TypeError(f"tune takes a task's name, a Task or a halfulp.trials.tasks.Step, got {name_type(task)}")
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 < tolerance < 1):
        raise ValueError(f"tolerance is a share of float32's loss between 0 and 1, or None; got {tolerance!r}")
    controls = [catalog.get(name) for name in (REFERENCE_RECIPE, TWIN_RECIPE)]
    given = [one for one in map(catalog.get, recipes or ()) if one not in controls]
    if recipes is not None and not given:
        raise ValueError("recipes= holds no candidate beside float32: give names or Recipes, or leave it out")
    first = plan_trials(task, [*controls, *given], seeds, steps, data)
    kind, length = first[0].task, first[0].steps
    numbers = list(dict.fromkeys(trial.seed for trial in first))
    if len(numbers) < 3:
        raise ValueError(f"a verdict needs three seeds, got {len(numbers)}: give seeds=3 or more")
    model = kind.model(kind.load(), numbers[0])
    best = reference = Candidate(
        controls[0], count_bytes_per_parameter(kind, model, controls[0]), "holds", "the reference", 0.0
    )
    candidates = [Candidate(one, count_bytes_per_parameter(kind, model, one)) for one in given] or list_candidates(
        kind, model
    )
    considered = [reference]
    with open_training_run(out, workers, listen, resume, overwrite) as run:
        run.train_trials_without_result([Trial(kind, one, seed, length) for seed in numbers for one in controls])
        if diverged := run.make_evidence().row(kind.name, REFERENCE_RECIPE).diverged:
            raise ValueError(
                f"task {kind.name!r} diverges in float32 from {diverged} of {len(numbers)} seeds: "
                "there is nothing to stay with; lower its learning rate"
            )
        for candidate in sorted(candidates, key=attrgetter("bytes_per_parameter")):
            if best is not reference:
                tried = dataclasses.replace(candidate, why=f"{best.recipe.name} holds at fewer bytes")
            else:
                tried = _train_and_judge_candidate(candidate, kind, numbers, length, tolerance, run)
                best = tried if tried.outcome == "holds" else best
            considered.append(tried)
    considered.sort(key=attrgetter("bytes_per_parameter"))
    return Tuned(best.recipe, run.make_evidence(), tuple(considered), tolerance)
