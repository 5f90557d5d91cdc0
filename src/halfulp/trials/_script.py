"""A user's script under several recipes, each in a process of its own, its model and optimizer replaced on the way."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import __version__, optim, recipes
from .._extensions import load_inherited_extensions
from ..environment import count_cores, describe_processor
from ..observation.scripts import find_outermost_module_of_parameters, listen_to_backward_losses, run_script
from ..recipes import Recipe
from ..recipes._optimizer import choose_optimizer_state_dtype, split_groups_by_update
from ._defaults import REFERENCE_RECIPE, TWIN_RECIPE
from .evidence._evidence import Evidence
from .evidence._row import Row
from .running._pool import describe_exit_code
from .tasks._task import replace_nonfinite_by_none

REPLACED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# What chooses an implementation in torch, and no other training.
_TORCH_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
_REPLACED_OPTIMIZERS_HINT = "recipes replace one optimizer, torch.optim's SGD, Adam or AdamW, and no subclasses of them"


class RecipeRefusal(BaseException):
    """Raised where a recipe cannot be put into a script, past `except Exception` of the script's own."""


@dataclass
class SubstitutedOptimizer:
    """The optimizer made for a script's model, which it does not keep alive, and the steps of all optimizers."""

    optimizer_ref: Callable[[], Any] | None = None
    step_count: int = 0

    def count_step(self, optimizer: Any, *_: Any) -> None:
        """Count a step of an optimizer (a step hook); refuse one that no recipe replaces."""
        kind = type(optimizer)
        if kind not in REPLACED_OPTIMIZERS and kind.__module__.partition(".")[0] != "halfulp":
            raise RecipeRefusal(f"it trains by {kind.__name__}; {_REPLACED_OPTIMIZERS_HINT}")
        self.step_count += 1

    def bytes_per_parameter(self) -> float | None:
        """Return what halfulp's optimizer takes; None without one, or where it is gone."""
        found = None if self.optimizer_ref is None else self.optimizer_ref()
        return found.bytes_per_parameter() if isinstance(found, optim.Optimizer) else None


@contextlib.contextmanager
def substitute_optimizers(recipe: Recipe) -> Iterator[SubstitutedOptimizer]:
    """Give whoever makes torch.optim's SGD, Adam or AdamW a converted model and the recipe's optimizer.

    Recipes that scale or round gradients or emulate a format, by objects that the script has to use, are refused.
    """
    if recipe.gradient_format or recipe.payload or recipe.emulate or recipe.format:
        raise RecipeRefusal(
            "it takes objects that the script has to use: hu.AdaptiveGradScaler, hu.scalify, hu.emulate or an "
            "optimizer of hu.optim with format="
        )
    inits: dict[Any, Any] = {kind: kind.__init__ for kind in REPLACED_OPTIMIZERS}
    done = SubstitutedOptimizer()
    for kind in inits:
        kind.__init__ = _make_optimizer_init_that_converts(kind, recipe, done)
    counting = register_optimizer_step_post_hook(done.count_step)
    try:
        yield done
    finally:
        counting.remove()
        for kind, init in inits.items():
            kind.__init__ = init


def _make_optimizer_init_that_converts(kind: Any, recipe: Recipe, substituted: SubstitutedOptimizer) -> Any:
    """Return a constructor that converts the model first; a narrow recipe's optimizer becomes halfulp's on the way.

    The constructor is replaced, and not the class, which a script may have imported before; subclasses stay theirs.
    """
    init = kind.__init__

    @functools.wraps(init)
    def convert_and_init(optimizer: Any, *args: Any, **options: Any) -> None:
        if type(optimizer) is not kind:
            init(optimizer, *args, **options)
            return
        if substituted.optimizer_ref is not None:
            raise RecipeRefusal(f"it makes several optimizers; {_REPLACED_OPTIMIZERS_HINT}")
        given = dict(inspect.signature(init).bind(optimizer, *args, **options).arguments)
        groups = _list_param_groups(given.pop("params"))
        model = find_outermost_module_of_parameters(parameter for group in groups for parameter in group["params"])
        if model is None:
            raise RecipeRefusal("no module holds the optimizer's parameters, so that there is no model to convert")
        given.pop("self")
        try:
            recipes.convert(model, recipe)
            if recipe.is_narrow:
                optimizer.__class__ = own = optim.OPTIMIZERS[kind.__name__]
                names = {id(parameter): key for key, parameter in model.named_parameters()}
                groups = [
                    {**group, **part}
                    for group in groups
                    for part in split_groups_by_update(recipe, model, [(names[id(p)], p) for p in group["params"]])
                ]
                given = {key: value for key, value in given.items() if key not in _TORCH_IMPLEMENTATION_OPTIONS}
                given["state_dtype"] = choose_optimizer_state_dtype(recipe, own, given)
                own.__init__(optimizer, groups, **given)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RecipeRefusal(" ".join(str(error).split())) from error
        if not recipe.is_narrow:
            init(optimizer, groups, **given)
        substituted.optimizer_ref = weakref.ref(optimizer)

    return convert_and_init


def _list_param_groups(params: Any) -> list[dict[str, Any]]:
    """Return param groups whose params are lists of tensors, from whatever an optimizer takes."""
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    found = []
    for group in groups:
        given = group["params"]
        members: Iterable[Any] = [given] if isinstance(given, Tensor) else given
        found.append({**group, "params": [one[1] if isinstance(one, tuple) else one for one in members]})
    return found


# The loss is the mean over this share of the backward passes at the end.
_SHARE_OF_LAST_LOSSES = 0.1
# A recipe counts as different beyond so many times what the twin differs by, and this share of float32's loss.
_TWIN_GAP_FACTOR = 2.0
GAP_TOLERANCE = 0.01
# Curves are means over as many stretches.
_MOST_CURVE_POINTS = 200
_TABLE_NOTES = (
    "One run for each recipe, with the script's own seeds.",
    f"The loss is what backward passes began with, without a scaler's factor, as the mean over the last tenth. A gap "
    f"within {GAP_TOLERANCE:.0%} of it, or within {_TWIN_GAP_FACTOR:g} times that of {TWIN_RECIPE}, whose start "
    "differs by 1e-7, is no difference.",
)


@dataclass(frozen=True)
class ScriptRun:
    """The losses and the ending of one run of a script, plain data.

    Attributes:
        losses: that backward passes began with, without a scaler's factor.
        steps: of optimizers.
        failure: why there are no results, None where there are.
        bytes_per_parameter: weights, states, gradients, where halfulp's optimizer stepped; None elsewhere.
    """

    losses: Sequence[float] = ()
    steps: int = 0
    failure: str | None = None
    bytes_per_parameter: float | None = None

    def compute_final_mean_loss(self) -> float:
        """Return the mean over the last losses."""
        count = max(1, math.ceil(_SHARE_OF_LAST_LOSSES * len(self.losses)))
        return sum(self.losses[-count:]) / count

    def compute_loss_curve(self) -> list[list[float]]:
        """Return the loss curve, [backward passes so far, mean loss since the point before], where it is finite."""
        width = max(1, math.ceil(len(self.losses) / _MOST_CURVE_POINTS))
        parts = [(k, self.losses[k : k + width]) for k in range(0, len(self.losses), width)]
        points = [[float(k + len(part)), sum(part) / len(part)] for k, part in parts]
        return [point for point in points if math.isfinite(point[1])]


def run_script_worker() -> None:
    """Run `[recipe, result file, script, *arguments]` of sys.argv and write the `ScriptRun` as JSON."""
    load_inherited_extensions()
    recipe, result, script, *arguments = sys.argv[1:]
    losses: list[float] = []
    try:
        with (
            substitute_optimizers(recipes.get(recipe)) as done,
            listen_to_backward_losses(lambda loss: losses.append(float(loss))),
        ):
            ending = run_script(script, arguments, reraised=RecipeRefusal)
    except RecipeRefusal as refusal:
        run = ScriptRun(failure=f"could not be used: {refusal}")
    else:
        why = None
        if ending.code:
            why = f"{ending.reason} with exit code {ending.code}, see above"
        elif not losses:
            why = "called no backward of a loss"
        elif done.optimizer_ref is None:
            why = f"made no optimizer to replace; {_REPLACED_OPTIMIZERS_HINT}"
        elif not done.step_count:
            why = "never stepped its optimizer"
        run = ScriptRun(losses, done.step_count, why, None if why else done.bytes_per_parameter())
    Path(result).write_text(json.dumps(asdict(run)), encoding="utf-8")


class ScriptEvidence(Evidence):
    """The results of a script under recipes, one run each: a comparison whose task is the script.

    ``run`` has besides how it was run the ``notes``, and ``refused``: recipes without results, and why.
    """

    def rows(self, task: str | None = None) -> list[Row]:
        """Return one row per recipe, with verdicts by what the twin's one run differs by."""
        found = {row.recipe: row for row in super().rows(task)}
        reference, twin = found[REFERENCE_RECIPE].loss, found[TWIN_RECIPE].gap if TWIN_RECIPE in found else None
        for name, row in found.items():
            if row.verdict is not None:
                continue
            verdict = "no verdict"
            if row.gap is not None and twin is not None and reference is not None:
                alike = abs(row.gap) <= max(_TWIN_GAP_FACTOR * abs(twin), GAP_TOLERANCE * abs(reference))
                verdict = "no difference" if alike else "worse" if row.gap > 0 else "better"
            found[name] = replace(row, verdict=verdict)
        return list(found.values())


def _make_trial_record(name: str, run: ScriptRun) -> dict[str, Any]:
    """Return a run as the trial of a comparison."""
    unknown, loss = {"loss": None, "accuracy": None}, replace_nonfinite_by_none(run.compute_final_mean_loss())
    task = {"name": "script", "title": "a training script of one's own", "rule": "the script's own", "hyper": {}}
    task |= {"batch": "the script's own", "judged_by": "train_loss", "target": ""}
    versions = {"halfulp": __version__, "torch": torch.__version__, "python": platform.python_version()}
    settings = {"task": task, "recipe": recipes.get(name).to_dict(), "seed": 0}
    return {
        "settings": {**settings, "steps": run.steps, "versions": versions},
        "result": {
            "curve": run.compute_loss_curve(),
            "float32": {"train": {"loss": loss, "accuracy": None}, "validation": unknown},
            "bytes_per_parameter": run.bytes_per_parameter,
            **dict.fromkeys(("step_ms", "cancelled", "realised", "diverged_at")),
            **{"parameters": 0, "targets": 0, "data": "the script's own data"},
        },
    }


def compare_script(
    script: str,
    arguments: Sequence[str],
    names: Sequence[str],
    listen: Callable[[str, str], None] = lambda recipe, words: None,
) -> ScriptEvidence:
    """Run a script once per recipe, each in a process of its own, and say what its training loss became.

    float32 and a twin whose start differs by 1e-7 run first. Where the script makes torch's SGD, Adam or AdamW, its
    float32 model is converted and the recipe's optimizer returned; everything else is the script's own, seeds too.

    Args:
        script, arguments: its path and its own arguments. What it prints to stderr, tracebacks too, passes through.
        names: recipes.
        listen: told what became of each recipe.

    Raises:
        ValueError: an unknown recipe, or a script that does not train by such an optimizer in float32.
    """
    for name in names:
        recipes.get(name)
    runs: dict[str, ScriptRun] = {}
    start = time.monotonic()
    for name in dict.fromkeys([REFERENCE_RECIPE, TWIN_RECIPE, *names]):
        run = runs[name] = _run_script_under_recipe(script, arguments, name)
        if name == REFERENCE_RECIPE and run.failure:
            raise ValueError(f"the script cannot be compared under recipes: fp32 {run.failure}")
        listen(name, run.failure or f"loss {run.compute_final_mean_loss():.4g} after {run.steps:,} steps")
    facts = {
        "notes": _TABLE_NOTES,
        "refused": [{"recipe": name, "why": run.failure} for name, run in runs.items() if run.failure],
        **{"workers": 1, "cores": count_cores(), "seconds": round(time.monotonic() - start, 1)},
        **{"trained": len(runs), "reused": 0, "processor": describe_processor()},
    }
    return ScriptEvidence(tuple(_make_trial_record(name, run) for name, run in runs.items() if not run.failure), facts)


def _run_script_under_recipe(script: str, arguments: Sequence[str], recipe: str) -> ScriptRun:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        code = f"from {__name__} import run_script_worker; run_script_worker()"
        command = [sys.executable, "-c", code, recipe, str(result), script, *arguments]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if result.exists() and ended >= 0:
            return ScriptRun(**json.loads(result.read_text(encoding="utf-8")))
    return ScriptRun(failure=describe_exit_code(ended))
