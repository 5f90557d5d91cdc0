"""compare: train a task under several recipes and gather the evidence."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..recipes import Recipe
from . import _page, _pool
from ._defaults import DEFAULT_RECIPES
from ._evidence import Evidence
from ._plan import Trial, plan
from ._store import Store, write
from .tasks import Task

Listener = Callable[[str, Trial, Any], None]


def compare(
    task: str | Task | Sequence[str | Task],
    recipes: Sequence[str | Recipe] = DEFAULT_RECIPES,
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    resume: bool = False,
    listen: Listener | None = None,
) -> Evidence:
    """Train each task under each recipe from each seed, with the same data order and hyper-parameters.

    Every trial runs on one thread of a worker process. A verdict needs three seeds. In a script, call it under
    ``if __name__ == "__main__":``, since the workers import the script again.

    Args:
        task: A task's name, a Task, or several.
        recipes: Names or Recipes; the float32 reference is added where it is missing.
        seeds: How many (0, 1, ...), or which.
        steps: Optimizer steps of every trial; None is each task's own.
        data: The folder for tasks that read files.
        out: A folder for compare.json and compare.html; finished trials are kept there while it runs.
        workers: How many processes; None is one per core, at most 8.
        resume: Take over the finished trials that ``out`` holds.
        listen: Called with ("plan", None, trials), ("reused" | "start" | "progress" | "done", trial, content).

    Returns:
        The Evidence; ``print`` it for a table.

    Raises:
        ValueError: an unknown name, missing data, an output folder that cannot be written, or settings that differ
            from those of the trials to resume.
        TrialError: a trial crashed or its worker was killed. What had finished is kept in ``out``.
    """
    trials = plan(task, recipes, seeds, steps, data)
    if resume and out is None:
        raise ValueError("resume=True needs the folder of the interrupted comparison: give out=")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    workers = min(workers or min(_pool.cores(), 8), len(trials))
    if out is not None:
        _page.require()
    store = None if out is None else Store(out)
    results = {} if store is None else store.begin(trials, resume)
    listen = listen or _nobody
    listen("plan", None, trials)
    for trial in trials:
        if trial.key in results:
            listen("reused", trial, results[trial.key])
    start = time.monotonic()
    missing = [trial for trial in trials if trial.key not in results]
    with contextlib.closing(_pool.work(missing, workers)) as events:
        for kind, trial, content in events:
            if kind == "done":
                results[trial.key] = content
                if store is not None:
                    store.keep(trial, content)
            listen(kind, trial, content)
    records = [{"settings": trial.settings(), "result": results[trial.key]} for trial in trials]
    run = {"workers": workers, "cores": _pool.cores(), "seconds": round(time.monotonic() - start, 1)}
    evidence = Evidence(
        trials=tuple(records), run=run | {"trained": len(missing), "reused": len(trials) - len(missing)}
    )
    if store is not None:
        evidence.to_html(store.page)
        write(store.report, evidence.to_json())
    return evidence


def _nobody(kind: str, trial: Trial | None, content: Any) -> None:
    """Nobody listens."""
