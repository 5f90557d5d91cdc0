"""run_suite: train a suite's tasks under its recipes, whatever some pairs refuse."""

import os
from collections.abc import Sequence
from typing import Any

from ...recipes import Recipe
from .._defaults import REFERENCE
from ..running._plan import Trial, plan_trials
from ..running._training import Listener, open_training_run
from . import _statements as papers
from ._report import SuiteEvidence

SUITE_NAMES = ("papers",)


def run_suite(
    suite: str = "papers",
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
        suite: "papers".
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
    trials, left_out = plan_suite(suite, size, seeds, data, tasks, recipes)
    failed: list[dict[str, Any]] = []
    with open_training_run(out, trials, workers, listen, resume, overwrite, SuiteEvidence) as run:
        run.more_run_facts = {"suite": suite, "size": size, "left_out": left_out, "failed": failed}
        run.train_missing(trials, failed=failed)
        if not run.make_evidence().tasks():
            said = {one["task"]: one["why"] for one in failed if one["recipe"] == REFERENCE}
            told = "; ".join(f"{task}: {why}" for task, why in said.items())
            raise ValueError(f"no trial under {REFERENCE} finished, against which every gap is measured: {told}")
    evidence = run.make_evidence()
    assert isinstance(evidence, SuiteEvidence)
    return evidence


def plan_suite(
    suite: str,
    size: str,
    seeds: int | Sequence[int],
    data: str | None,
    tasks: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> tuple[list[Trial], dict[str, dict[str, str]]]:
    """Return the trials of a suite, and by task and recipe why a pair is none of them."""
    if suite not in SUITE_NAMES:
        raise ValueError(f"no suite {suite!r}; there is {', '.join(SUITE_NAMES)}")
    chosen = _choose_names("task", tasks, list(papers.SUITE_TASKS))
    everything = {
        _name_recipe(one): one
        for one in (*papers.COMMON_RECIPES, *papers.FEW_BIT_RECIPES, *papers.COMPONENT_RECIPES, *papers.FLOAT64_RECIPES)
    }
    allowed = {"fp32", "fp32-twin", *_choose_names("recipe", recipes, list(everything))}
    left_out: dict[str, dict[str, str]] = {}
    trials: list[Trial] = []
    for task in chosen:
        names = dict.fromkeys(
            _name_recipe(one) for one in (*papers.COMMON_RECIPES, *papers.SUITE_TASKS[task], *papers.COMPONENT_RECIPES)
        )
        own = [everything[name] for name in names if name in allowed]
        planned = plan_trials(task, own, seeds, None, data, size, left_out)
        # What cannot be trained at all has said so by now; the rest of what is left out could be.
        late = papers.LEFT_OUT_AT_SMALL.get(task, ()) if size == "small" and recipes is None else ()
        barred, why = papers.RECIPES_LEFT_OUT.get(task, ((), ""))
        slow = [name for name in papers.COMPONENT_RECIPES if name not in papers.SUITE_TASKS[task]]
        reasons = (
            dict.fromkeys(late, papers.WHY_NOT_AT_SMALL)
            | dict.fromkeys(barred, why)
            | dict.fromkeys(slow, papers.WHY_NO_COMPONENTS)
        )
        could = (trial.recipe.name for trial in planned if trial.recipe.name in reasons)
        left_out.setdefault(task, {}).update({name: reasons[name] for name in could})
        trials += [trial for trial in planned if trial.recipe.name not in reasons]
    return trials, {task: pairs for task, pairs in left_out.items() if pairs}


def _name_recipe(recipe: str | Recipe) -> str:
    return recipe if isinstance(recipe, str) else recipe.name


def _choose_names(kind: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise ValueError(f"the suite has no {kind} {', '.join(unknown)}; it has {', '.join(known)}")
    return [name for name in known if given is None or name in given]
