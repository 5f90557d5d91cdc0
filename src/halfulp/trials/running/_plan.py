"""The plan of a comparison: its trials, in the order in which they start."""

import dataclasses
import json
import platform
import re
from collections.abc import Sequence
from typing import Any

from ... import recipes as catalog
from ...environment._describe import find_version
from ...recipes import Recipe
from .. import tasks as registry
from .._defaults import REFERENCE_RECIPE, TWIN_RECIPE
from ..tasks import Task

_JUDGED_LOSS_NAMES = ("train_loss", "validation_loss")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training to do: a task, a recipe, a seed, a length."""

    task: Task
    recipe: Recipe
    seed: int
    steps: int

    @property
    def key(self) -> str:
        """The trial's name in files and messages."""
        return f"{self.task.name}.{self.recipe.name}.seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.task.name} · {self.recipe.name} · seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """Return all that decides the result as plain data; a finished trial is reused only if it is equal."""
        import torch

        packages = {name: find_version(name) for name in ("halfulp", "numpy", "llvmlite")}
        return {
            "task": self.task.settings(),
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "steps": self.steps,
            "versions": {**packages, "torch": torch.__version__, "python": platform.python_version()},
        }


def plan_trials(
    task: str | Task | Sequence[str | Task],
    recipes: str | Recipe | Sequence[str | Recipe],
    seeds: int | Sequence[int],
    steps: int | None,
    data: str | None,
) -> list[Trial]:
    """Plan every task x seed x recipe, ordered so that the rows of one seed finish together.

    The float32 reference is always among the recipes, in front: every gap is measured against it.

    Raises:
        ValueError, TypeError: unknown names, names or seeds given twice, steps below 1, no recipe, a task that refuses
            a recipe, is judged by no loss that there is, or has settings that JSON cannot hold.
    """
    tasks = [registry.get(one, data) for one in ([task] if isinstance(task, str | Task) else task)]
    rows = [catalog.get(one) for one in ([recipes] if isinstance(recipes, str | Recipe) else recipes)]
    if not rows:
        raise ValueError("no recipe given; halfulp recipes lists them")
    _refuse_other_recipes_under_control_names(rows)
    if all(recipe.name != REFERENCE_RECIPE for recipe in rows):
        rows.insert(0, catalog.get(REFERENCE_RECIPE))
    numbers = _list_seeds(seeds)
    if not tasks:
        raise ValueError(f"no task given; the tasks are {', '.join(registry.names())}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    for kind, found in (("task", [one.name for one in tasks]), ("recipe", [one.name for one in rows])):
        _refuse_repeated_names(kind, found)
        for name in found:
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(
                    f"the name of a {kind} becomes a file name: letters, digits and _.+- only, got {name!r}"
                )
    for one in tasks:
        if barred := {recipe.name: why for recipe in rows if (why := one.explain_refusal(recipe))}:
            why = next(iter(barred.values()))
            raise ValueError(f"task {one.name!r} {why}: leave out {', '.join(barred)}, or choose another task")
        if one.judged_by not in _JUDGED_LOSS_NAMES:
            raise ValueError(
                f"task {one.name!r} is judged by {one.judged_by!r}: judged_by is {' or '.join(_JUDGED_LOSS_NAMES)}"
            )
        try:
            json.dumps(one.settings(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"task {one.name!r} has settings that its results cannot hold as JSON ({error}): hyper-parameters and "
                "fields are plain numbers, words and lists of them"
            ) from None
    trials = [
        Trial(task=one, recipe=recipe, seed=seed, steps=steps or one.steps)
        for one in tasks
        for seed in numbers
        for recipe in rows
    ]
    if len({trial.key for trial in trials}) < len(trials):
        raise ValueError("two trials have one name, as names of tasks and recipes hold dots: write them without")
    return trials


def _refuse_other_recipes_under_control_names(recipes: Sequence[Recipe]) -> None:
    """Refuse other recipes under the names of the reference and its twin, which gaps are measured by."""
    for recipe in recipes:
        if recipe.name not in (REFERENCE_RECIPE, TWIN_RECIPE):
            continue
        control = catalog.get(recipe.name)
        if dataclasses.replace(recipe, description=control.description) != control:
            raise ValueError(
                f"the name {recipe.name!r} belongs to float32, against which every recipe is measured, and the recipe "
                "given under it differs: give yours another name"
            )


def _list_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds from 0 on where their number is given, or those that are listed."""
    allowed = "seeds is how many (an int, at least 1) or which (ints, 0 and up)"
    given = range(seeds) if isinstance(seeds, int) else seeds
    is_list = isinstance(given, Sequence) and all(isinstance(number, int) for number in given)
    if isinstance(seeds, bool | bytes) or not is_list:
        raise TypeError(f"{allowed}, got {seeds!r}")
    numbers = list(given)
    if not numbers or min(numbers) < 0:
        raise ValueError(f"{allowed}, got {seeds!r}")
    _refuse_repeated_names("seed", [str(number) for number in numbers])
    return numbers


def _refuse_repeated_names(kind: str, names: list[str]) -> None:
    """Refuse names that are given more than once."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} {', '.join(twice)} is given more than once")
