"""tune: the cheapest recipe that stays with float32 on a task."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ... import recipes as catalog
from ..._messages import a_kind
from ..._names import unknown
from ...observation import Finding
from ...observation._finding import SEVERITIES
from ...recipes import Recipe
from .._defaults import REFERENCE, TWIN
from ..evidence._evidence import Evidence
from ..evidence._table import number, percent
from ..running._plan import plan
from ..running._training import Listener, training
from ..tasks import Task
from ._candidates import PROBES, Candidate
from ._search import Search

_MOST_FINDINGS = 5


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
        within = f"within {percent(self.tolerance)} of float32" if self.tolerance else "no difference to float32"
        if self.recipe.name == REFERENCE:
            return f"{task}: no candidate is {within}; float32 remains."
        reference = self.evidence.row(task, REFERENCE)
        return (
            f"{task}: {self.recipe.name}, {within}, at {number(self.bytes_per_parameter, 1)} bytes per parameter "
            f"instead of {number(reference.bytes_per_parameter, 1)}."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the candidates as words, its header first."""
        found: list[tuple[str, ...]] = [("recipe", "bytes/param", "gap to fp32", "outcome", "why")]
        for one in self.candidates:
            size, gap = number(one.bytes_per_parameter, 2), number(one.gap, 4, sign=True)
            found.append((one.recipe.name, size, gap, one.outcome, one.why))
        return found

    def observed(self) -> list[str]:
        """Return the worst findings of the observed trainings, a line each, under a heading; nothing without any."""
        shown = [f"  {finding.severity}: {finding}" for finding in self.findings[:_MOST_FINDINGS]]
        more = len(self.findings) - len(shown)
        shown += [f"  and {more} more in .findings"] if more else []
        return ["Observed where every update is rounded to nearest:", *shown] if shown else []

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        blank = [""] if self.findings else []
        return "\n".join([self.headline(), self.recipe.explain(), "", *table, *blank, *self.observed()])


def tune(
    task: str | Task,
    tolerance: float | None = None,
    *,
    recipes: Sequence[str | Recipe] | None = None,
    param_dtypes: Sequence[str] = ("bfloat16",),
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

    1. float32 and a twin whose start differs by 1e-7 are trained from every seed, and a training with 16-bit
       parameters, each update rounded to nearest, from the first one under `hu.observe`.
    2. What that saw says of each layer whether nearest rounding will do, stochastic rounding, or a residual, and which
       dtypes its tensors fit. The recipes that are left are ordered by bytes.
    3. They are trained, the cheapest first: from one seed, and from the others unless that is far off, until one holds.
       What keeps no more of anything than one that did not hold is not trained.
    4. Where the update of that recipe costs more than that of one that did not hold, it is given to as few kinds of
       layers as it takes, those that fare worst first, by bisection.

    Args:
        task: a task's name, a Task, or a training step of your own: `halfulp.trials.tasks.Step`.
        tolerance: by which share of float32's loss a recipe's may be above it, 0.01 for one per cent: gap and half of
            its 95% interval over seeds together. None: what `halfulp.compare` calls no difference or better where it
            compares that recipe alone.
        recipes: candidates of your own, tried by their bytes as they are; None takes those of step 2.
        param_dtypes: of the candidates: "bfloat16", "float16" or both, the preferred one first.
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
    _check_arguments(task, tolerance, param_dtypes, most)
    given = None if recipes is None else [catalog.get(one) for one in recipes]
    given = given if given is None else [one for one in given if one.name not in (REFERENCE, TWIN)]
    if given is not None and not given:
        raise ValueError("recipes= holds no candidate beside float32: give names or Recipes, or leave it out")
    for one in given or ():
        if one.name in PROBES.values() and one != catalog.get(one.name):
            raise ValueError(
                f"the name {one.name!r} belongs to the training that is observed: give your recipe another"
            )
    first = plan(task, [REFERENCE, TWIN, *(given or ())], seeds, steps, data)
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
    with training(out, controls, workers, listen, resume, overwrite) as run:
        search = Search(kind, numbers, length, tolerance, most, run)
        search.begin(param_dtypes)
        chosen = search.run(given, param_dtypes)
    return Tuned(chosen, run.evidence(), tuple(search.candidates), _collect_findings(search), tolerance)


def _check_arguments(task: object, tolerance: float | None, param_dtypes: Sequence[str], most: int) -> None:
    if not isinstance(task, str | Task):
        raise TypeError(f"tune takes a task's name, a Task or a halfulp.trials.tasks.Step, got {a_kind(task)}")
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 < tolerance < 1):
        raise ValueError(f"tolerance is a share of float32's loss between 0 and 1, or None; got {tolerance!r}")
    if isinstance(param_dtypes, str) or not param_dtypes:
        raise ValueError(f"param_dtypes is a list of {' or '.join(map(repr, PROBES))}; got {param_dtypes!r}")
    for dtype in param_dtypes:
        if dtype not in PROBES:
            raise ValueError(unknown("dtype of parameters", dtype, PROBES))
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"most is how many candidates are trained, 1 or more; got {most!r}")


def _collect_findings(search: Search) -> tuple[Finding, ...]:
    plain = [finding for one in search.observed.values() for finding in one["findings"]]
    found = [Finding(**{**finding, "where": tuple(finding["where"])}) for finding in plain]
    return tuple(sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)))
