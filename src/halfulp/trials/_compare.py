"""compare: train a task under several recipes and gather the evidence."""

import os
from collections.abc import Sequence

from ..recipes import Recipe
from ._defaults import DEFAULT_RECIPES
from .evidence._evidence import Evidence
from .running._plan import plan_trials
from .running._training import Listener, open_training_run
from .tasks import Task


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

    Every trial runs on one thread of a worker process, those of a `halfulp.trials.tasks.Step` in this one. A verdict
    needs three seeds. In a script, call it under ``if __name__ == "__main__":``, since the workers import the script
    again.

    Args:
        task: A task's name, a Task, or several.
        recipes: Names or Recipes; the float32 reference is added where it is missing.
        seeds: How many (0, 1, ...), or which.
        steps: Optimizer steps of every trial; None is each task's own.
        data: The folder for tasks that read files.
        out: A folder for compare.json and compare.html; finished trials are kept there while it runs. One that holds
            a comparison is refused without ``resume`` or ``overwrite``.
        workers: How many processes; None is one per core, at most 8.
        resume: Take over the finished trials that ``out`` holds; not of a `Step`, which nothing tells from others.
        overwrite: Delete the comparison that ``out`` holds.
        listen: Called with ("plan", None, trials) and ("reused" | "start" | "progress" | "done", trial, content).

    Returns:
        The Evidence; ``print`` it for a table.

    Raises:
        ValueError: an unknown name, missing data, an output folder that cannot be written or holds another comparison,
            settings that differ from those of the trials to resume, or another recipe called fp32 or fp32-twin.
        TypeError: seeds that are no integers.
        TrialError: a trial crashed or its worker was killed. What had finished is kept in ``out``.
    """
    trials = plan_trials(task, recipes, seeds, steps, data)
    with open_training_run(out, workers, listen, resume, overwrite) as run:
        run.train_trials_without_result(trials)
    return run.make_evidence()
