"""run_suite: train the papers' kinds of tasks under their recipes, whatever some pairs refuse."""

import os
from collections.abc import Iterable, Mapping, Sequence

from ..recipes import Recipe
from ..recipes import get as get_recipe
from ._defaults import REFERENCE_RECIPE, TWIN_RECIPE
from .evidence._evidence import Evidence
from .running._plan import Trial, plan_trials
from .running._training import Listener, open_training_run
from .tasks import get as get_task

_FEW_BITS = ("e8m5-kahan-stochastic", "e8m3-kahan-stochastic", "e8m1-kahan-stochastic")
_OPERANDS = ("mixed-precision", "fp8-training", "mxfp8", "nvfp4")
# On every task.
COMMON_RECIPES: tuple[str | Recipe, ...] = (
    *(REFERENCE_RECIPE, TWIN_RECIPE, "bf16"),
    Recipe(
        name="bf16-update",
        description="float32 arithmetic, weights held to bfloat16 by nearest rounding",
        format="bf16",
        weight_update="nearest",
    ),
    *("bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8"),
    Recipe(
        name="bf16-split-8bit",
        description="exact float32 weights in 16 + 16 bits, 8-bit moments",
        param_dtype="bfloat16",
        weight_update="split",
        state_dtype="8bit",
    ),
    "fp16",
    *_FEW_BITS,
    *("fp16-constant-1", "fp16-constant-128", "fp16-constant-16384", "fp16-dynamic", "fp16-adaptive"),
    *("e5m2-adaptive", *_OPERANDS),
    *("scaled-fp16", "scaled-fp8-state16"),
)
# Several components in every operator take ten to forty times as long: on the tasks of their paper alone.
_COMPONENTS_AND_FLOAT64 = ("fp16-mc2", "fp16-mc3", "fp64", "fp64-mc2")

# Tasks, and what they are trained under beside the common recipes.
SUITE_TASKS: Mapping[str, tuple[str, ...]] = {
    "digits-fpu": ("e8m5", "e8m3", "e8m1"),
    "digits": (),
    "digits-slow": (),
    "cifar10-resnet-half": (),
    "sst2": (),
    "ml100k": (),
    "fsdd": (),
    "tinyshakespeare": (),
    "tinyshakespeare-lstm": (),
    "two-heads": (),
    "mammals": ("fp64", "fp64-mc2"),
    "cancer-mlp": _COMPONENTS_AND_FLOAT64,
    "linear-regression": _COMPONENTS_AND_FLOAT64,
}

# What "small" leaves out of these tasks unless it is named: all that it trains took about an hour of one core.
LEFT_OUT_AT_SMALL: Mapping[str, tuple[str, ...]] = {
    "cifar10-resnet-half": (
        *("fp16", *_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
        *("scaled-fp16", "scaled-fp8-state16"),
    ),
    "tinyshakespeare": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
    "tinyshakespeare-lstm": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
    "two-heads": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS, "scaled-fp8-state16"),
}


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
) -> Evidence:
    """Train the papers' kinds of tasks under every recipe that they go with.

    Args:
        size: Of every trial: "smoke", "small" or "full".
        seeds, data, out, workers, resume, overwrite, listen: As `halfulp.compare` takes them.
        tasks, recipes: Names, to run a part; None is all.

    Returns:
        The evidence; its ``run`` has the ``size`` and ``left_out``: by task and recipe, why a pair has no trials.

    Raises:
        ValueError, TrialError: As `halfulp.compare`.
    """
    trials, left_out = plan_suite(size, seeds, data, tasks, recipes)
    with open_training_run(out, workers, listen, resume, overwrite) as run:
        run.more_run_facts = {"size": size, "left_out": left_out}
        run.train_missing(trials)
    return run.make_evidence()


def plan_suite(
    size: str,
    seeds: int | Sequence[int],
    data: str | None,
    tasks: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> tuple[list[Trial], dict[str, dict[str, str]]]:
    """Return the trials of the suite, and by task and recipe why a pair is none of them."""
    common = {one if isinstance(one, str) else one.name: one for one in COMMON_RECIPES}
    known: dict[str, str | Recipe] = {**common, **{name: name for own in SUITE_TASKS.values() for name in own}}
    allowed = {REFERENCE_RECIPE, TWIN_RECIPE, *_choose_names("recipe", recipes, known)}
    left_out: dict[str, dict[str, str]] = {}
    trials: list[Trial] = []
    for name in _choose_names("task", tasks, SUITE_TASKS):
        task = get_task(name, data)
        late = LEFT_OUT_AT_SMALL.get(name, ()) if size == "small" and recipes is None else ()
        chosen = []
        for recipe in (get_recipe(known[one]) for one in (*common, *SUITE_TASKS[name]) if one in allowed):
            refused = task.refuses(recipe)
            why = f"the task {refused}" if refused else _WHY_NOT_AT_SMALL if recipe.name in late else None
            if why is None:
                chosen.append(recipe)
            else:
                left_out.setdefault(name, {})[recipe.name] = why
        trials += plan_trials(task, chosen, seeds, None, data, size)
    return trials, left_out


def _choose_names(kind: str, given: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise ValueError(f"the suite has no {kind} {', '.join(unknown)}; it has {', '.join(known)}")
    return [name for name in known if given is None or name in given]
