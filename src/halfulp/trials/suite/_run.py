"""run_suite: train a suite's tasks under its recipes, whatever some pairs refuse."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from ...recipes import Recipe
from .._defaults import REFERENCE, TWIN
from ..running._plan import Trial, plan_trials
from ..running._training import Listener, open_training_run
from ._report import SuiteEvidence
from ._statements import COMMON_RECIPES, LEFT_OUT_AT_SMALL, SUITE_TASKS

_WHY_NOT_AT_SMALL = "left out at small, which is to take an hour of one core: name the recipe, or take --size full"


def run_suite(
    size: str = "small",
    seeds: int | Sequence[int] = 3,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listen: Listener | None = None,
    tasks: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> SuiteEvidence:
    """Train the papers' kinds of tasks under every recipe, and set their figures and findings beside ours.

    A trial that raises does not end the run: it is listed with what it said. So is what does not go together.

    Args:
        size: Of every trial: "smoke", "small" or "full".
        seeds: How many (0, 1, ...), or which.
        data, workers, resume, overwrite, listen: As `halfulp.compare` takes them.
        out: A folder for evidence.json, evidence.html and evidence.md, and for finished trials.
        tasks, recipes: Names, to run a part; None is all.

    Returns:
        The evidence.

    Raises:
        ValueError: an unknown name, missing data, an output folder that cannot be written or holds something else, or
            no task whose float32 trained.
        TrialError: a worker was killed; what had finished is kept in ``out``.
    """
    trials, left_out = plan_suite(size, seeds, data, tasks, recipes)
    failed: list[dict[str, Any]] = []
    with open_training_run(out, workers, listen, resume, overwrite, SuiteEvidence) as run:
        run.more_run_facts = {"size": size, "left_out": left_out, "failed": failed}
        run.train_missing(trials, failed=failed)
        if not run.make_evidence().tasks():
            said = {one["task"]: one["why"] for one in failed if one["recipe"] == REFERENCE}
            told = "; ".join(f"{task}: {why}" for task, why in said.items())
            raise ValueError(f"no trial under {REFERENCE} finished, against which every gap is measured: {told}")
    evidence = run.make_evidence()
    assert isinstance(evidence, SuiteEvidence)
    return evidence


def plan_suite(
    size: str,
    seeds: int | Sequence[int],
    data: str | None,
    tasks: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> tuple[list[Trial], dict[str, dict[str, str]]]:
    """Return the trials of the suite, and by task and recipe why a pair is none of them."""
    common = {one if isinstance(one, str) else one.name: one for one in COMMON_RECIPES}
    everything: dict[str, str | Recipe] = {**common, **{name: name for own in SUITE_TASKS.values() for name in own}}
    allowed = {REFERENCE, TWIN, *_choose_names("recipe", recipes, everything)}
    left_out: dict[str, dict[str, str]] = {}
    trials: list[Trial] = []
    for task in _choose_names("task", tasks, SUITE_TASKS):
        own = [everything[name] for name in (*common, *SUITE_TASKS[task]) if name in allowed]
        late = LEFT_OUT_AT_SMALL.get(task, ()) if size == "small" and recipes is None else ()
        for trial in plan_trials(task, own, seeds, None, data, size, left_out):
            if trial.recipe.name in late:
                left_out.setdefault(task, {})[trial.recipe.name] = _WHY_NOT_AT_SMALL
            else:
                trials.append(trial)
    return trials, left_out


def _choose_names(kind: str, given: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise ValueError(f"the suite has no {kind} {', '.join(unknown)}; it has {', '.join(known)}")
    return [name for name in known if given is None or name in given]
