"""The papers' kinds of tasks under every recipe that they go with: `python -m benchmarks.papers_suite --data DIR`.

What it found is docs/results/evidence.json, and docs/evidence.md shows it.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import halfulp as hu
from halfulp.recipes import Recipe
from halfulp.trials import Evidence
from halfulp.trials.tasks import get

_FEW_BITS = ("e8m5-kahan-stochastic", "e8m3-kahan-stochastic", "e8m1-kahan-stochastic")
_OPERANDS = ("mixed-precision", "fp8-training", "mxfp8", "nvfp4")
# On every task.
COMMON_RECIPES: tuple[str | Recipe, ...] = (
    *("fp32", "fp32-twin", "bf16"),
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

# Steps of a trial by size: seconds a task, minutes a task on two cores, and what the task deserves (None: its own).
SIZES = ("smoke", "small", "full")
STEPS: Mapping[str, tuple[int, int, int | None]] = {
    "digits-fpu": (30, 1350, None),
    "digits": (30, 600, None),
    "digits-slow": (30, 600, None),
    "cifar10-resnet-half": (4, 120, 20_000),
    "sst2": (4, 80, 2000),
    "ml100k": (8, 450, 10_000),
    "fsdd": (4, 80, 4000),
    "tinyshakespeare": (4, 60, 20_000),
    "tinyshakespeare-lstm": (3, 60, 10_000),
    "two-heads": (4, 200, None),
    "mammals": (60, 2050, None),
    "cancer-mlp": (20, 300, None),
    "linear-regression": (40, 1000, None),
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


def choose_recipes(
    task: str, size: str, data: str | None, named: Sequence[str] | None
) -> tuple[list[Recipe], dict[str, str]]:
    """The recipes of a task, all or those that are named, and by recipe why the others are left out."""
    recipes, left_out = [], {}
    for recipe in (hu.recipes.get(one) for one in (*COMMON_RECIPES, *SUITE_TASKS[task])):
        if named and recipe.name not in ("fp32", "fp32-twin", *named):
            continue
        refused = get(task, data).explain_refusal(recipe)
        if refused:
            left_out[recipe.name] = f"the task {refused}"
        elif size == "small" and not named and recipe.name in LEFT_OUT_AT_SMALL.get(task, ()):
            left_out[recipe.name] = _WHY_NOT_AT_SMALL
        else:
            recipes.append(recipe)
    return recipes, left_out


def run_suite(
    tasks: Iterable[str], recipes: Sequence[str] | None, size: str, seeds: Sequence[int], data: str | None, out: Path
) -> Evidence:
    """Train tasks one after the other, each in a folder of its own that is resumed; one evidence of all."""
    found, left_out = [], {}
    for task in tasks:
        steps = STEPS[task][SIZES.index(size)]
        chosen, barred = choose_recipes(task, size, data, recipes)
        left_out |= {task: barred} if barred else {}
        found.append(hu.compare(task, chosen, seeds, steps, data, out=out / task, resume=True))
    run = {**found[0].run, "size": size, "left_out": left_out}
    run |= {name: sum(one.run[name] for one in found) for name in ("seconds", "trained", "reused")}
    return dataclasses.replace(found[0], trials=tuple(trial for one in found for trial in one.trials), run=run)


def main() -> None:
    """All tasks and recipes, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", nargs="*", choices=list(SUITE_TASKS), default=list(SUITE_TASKS))
    parser.add_argument("--recipe", nargs="*", help="these beside fp32 and fp32-twin")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="another start, order of the data and random bits")
    parser.add_argument("--data", help="the folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("halfulp-evidence"))
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    evidence = run_suite(given.task, given.recipe, given.size, seeds, given.data, given.out)
    (given.out / "evidence.json").write_text(evidence.to_json(), encoding="utf-8")
    print(evidence)


if __name__ == "__main__":
    main()
