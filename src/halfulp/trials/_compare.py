"""compare: train a task under several recipes and gather the evidence."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..pages import require, write_whole
from ..recipes import Recipe
from ._defaults import DEFAULT_RECIPES
from .evidence._evidence import Evidence
from .running import _pool
from .running._plan import Trial, plan
from .running._store import Store
from .tasks import Task

Listener = Callable[[str, Trial | None, Any], None]


def compare(
    task: str | Task | Sequence[str | Task],
    recipes: str | Recipe | Sequence[str | Recipe] = DEFAULT_RECIPES,
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
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
        out: A folder for compare.json and compare.html; finished trials are kept there while it runs. One that holds
            a comparison is refused without ``resume`` or ``overwrite``, one that another process writes into always.
        workers: How many processes; None is one per core, at most 8.
        resume: Take over the finished trials that ``out`` holds.
        overwrite: Delete the comparison that ``out`` holds.
        listen: Called with ("plan", None, trials), ("reused" | "start" | "progress" | "done", trial, content).

    Returns:
        The Evidence; ``print`` it for a table.

    Raises:
        ValueError: an unknown name, missing data, an output folder that cannot be written or holds another comparison,
            settings that differ from those of the trials to resume, or another recipe called fp32 or fp32-twin.
        TypeError: seeds that are no integers.
        TrialError: a trial crashed or its worker was killed. What had finished is kept in ``out``.
    """
    trials = plan(task, recipes, seeds, steps, data)
    for name, given in (("resume", resume), ("overwrite", overwrite)):
        if given and out is None:
            raise ValueError(f"{name}=True needs the folder of an earlier comparison: give out=")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    workers = min(workers or min(_pool.cores(), 8), len(trials))
    listen = listen or _nobody
    if out is None:
        return _train(trials, {}, workers, listen, None)
    require("matplotlib", instead="give no out folder")
    store = Store(out)
    with store.alone():
        evidence = _train(trials, store.begin(trials, resume, overwrite), workers, listen, store)
        evidence.to_html(store.page)
        write_whole(store.report, evidence.to_json())
    return evidence


def _train(
    trials: Sequence[Trial], results: dict[str, dict[str, Any]], workers: int, listen: Listener, store: Store | None
) -> Evidence:
    """Train what has no result yet, and keep each result in the store."""
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
    return Evidence(trials=tuple(records), run=run | {"trained": len(missing), "reused": len(trials) - len(missing)})


def _nobody(kind: str, trial: Trial | None, content: Any) -> None:
    """Nobody listens."""
