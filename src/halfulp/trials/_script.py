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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .. import __version__, optim, recipes
from .._extensions import load_inherited_extensions
from ..environment import core_count, processor_line
from ..observation.scripts import ScriptEnding, find_model, run_script, tell_backward_losses
from ..recipes import Recipe
from ..recipes._convert import is_converted
from ..recipes._optimizer import choose_state_dtype, split_groups_by_update
from ._defaults import REFERENCE_RECIPE, TWIN_RECIPE
from .evidence._evidence import Evidence
from .evidence._row import Row
from .running._pool import describe_exit
from .tasks._task import finite_or_none

REPLACED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# What chooses an implementation in torch, and no other training.
_KERNEL_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


class RecipeRefusal(BaseException):
    """Raised where a recipe cannot be put into a script, past `except Exception` of the script's own."""


@dataclass
class Substitution:
    """The replacements made for a script's models and optimizers; it keeps none of them alive.

    Attributes:
        optimizers: that were made for converted models, ``optimizers_made`` in all.
        other_optimizers: names of the classes of other optimizers that stepped.
        step_count: how often any optimizer stepped.
    """

    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    optimizers_made: int = 0
    other_optimizers: list[str] = field(default_factory=list)
    step_count: int = 0

    def count_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step of an optimizer (a step hook)."""
        self.step_count += 1
        kind = type(optimizer)
        is_other = kind not in REPLACED_OPTIMIZERS and not _is_of_halfulp(optimizer)
        if is_other and kind.__name__ not in self.other_optimizers:
            self.other_optimizers.append(kind.__name__)

    def bytes_per_parameter(self) -> float | None:
        """Return the mean over parameters of halfulp's optimizers that live; None without any."""
        sizes = [
            (one.bytes_per_parameter(), sum(p.numel() for group in one.param_groups for p in group["params"]))
            for one in self.optimizers
            if _is_of_halfulp(one)
        ]
        return sum(size * count for size, count in sizes) / max(1, sum(count for _, count in sizes)) if sizes else None

    def write_notes(self) -> list[str]:
        """Return what is to be said of a run in which a recipe was used."""
        notes = []
        if self.optimizers_made > 1:
            notes.append(f"{self.optimizers_made} optimizers: the loss is the mean over the backward passes of all")
        if self.optimizers_made and self.other_optimizers:
            notes.append(f"{', '.join(self.other_optimizers)} and what it steps stayed as they are")
        return notes

    def explain_nothing_converted(self) -> str:
        """Return why no recipe was used."""
        known = "recipes replace torch.optim's SGD, Adam and AdamW, and no subclasses of them"
        if self.other_optimizers:
            return f"it trains by {', '.join(self.other_optimizers)}; {known}"
        return f"it makes no torch optimizer in its own process, and other processes are not reached; {known}"


@contextlib.contextmanager
def substitute_optimizers(recipe: Recipe) -> Iterator[Substitution]:
    """Give whoever makes torch.optim's SGD, Adam or AdamW a converted model and the recipe's optimizer.

    Recipes that scale or round gradients or emulate a format, by objects that the script has to use, are refused.
    """
    for need, words in (
        ("gradient_format", "its gradients go through hu.AdaptiveGradScaler, which the script has to call"),
        ("payload", "its parameters carry scales: use hu.scalify(model) and an optimizer of hu.optim in the script"),
        ("emulate", "it emulates a format by hu.emulate(model), which the script has to call"),
        ("format", "it holds weights to a format, by an optimizer of hu.optim with format="),
    ):
        if getattr(recipe, need):
            raise RecipeRefusal(words)
    inits: dict[Any, Any] = {kind: kind.__init__ for kind in REPLACED_OPTIMIZERS}
    done = Substitution()
    for kind in inits:
        kind.__init__ = _make_converting_init(kind, recipe, done)
    counting = register_optimizer_step_post_hook(done.count_step)
    try:
        yield done
    finally:
        counting.remove()
        for kind, init in inits.items():
            kind.__init__ = init


def _is_of_halfulp(optimizer: Any) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "halfulp"


def _make_converting_init(kind: Any, recipe: Recipe, done: Substitution) -> Any:
    """Return a constructor that converts the model first; a narrow recipe's optimizer becomes halfulp's on the way.

    The constructor is replaced, and not the class, which a script may have imported before; subclasses stay theirs.
    """
    init = kind.__init__

    @functools.wraps(init)
    def convert_and_init(optimizer: Any, *args: Any, **options: Any) -> None:
        if type(optimizer) is not kind:
            init(optimizer, *args, **options)
            return
        given = dict(inspect.signature(init).bind(optimizer, *args, **options).arguments)
        groups = _list_param_groups(given.pop("params"))
        model = find_model(parameter for group in groups for parameter in group["params"])
        if model is None:
            raise RecipeRefusal("no module holds the optimizer's parameters, so that there is no model to convert")
        given.pop("self")
        try:
            if not is_converted(model, recipe):  # a model, or a copy of one, that had an optimizer before
                recipes.convert(model, recipe)
            if recipe.narrow:
                optimizer.__class__ = own = optim.OPTIMIZERS[kind.__name__]
                names = {id(parameter): key for key, parameter in model.named_parameters()}
                groups = [
                    {**group, **part}
                    for group in groups
                    for part in split_groups_by_update(recipe, model, [(names[id(p)], p) for p in group["params"]])
                ]
                given = {key: value for key, value in given.items() if key not in _KERNEL_OPTIONS}
                given["state_dtype"] = choose_state_dtype(recipe, own, given)
                own.__init__(optimizer, groups, **given)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RecipeRefusal(" ".join(str(error).split())) from error
        if not recipe.narrow:
            init(optimizer, groups, **given)
        done.optimizers.add(optimizer)
        done.optimizers_made += 1

    return convert_and_init


def _list_param_groups(params: Any) -> list[dict[str, Any]]:
    """Return param groups whose params are lists of tensors, from whatever an optimizer takes."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise RecipeRefusal(f"the optimizer was given {type(params).__name__} for parameters")
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    found = []
    for group in groups:
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        found.append({**group, "params": [one[1] if isinstance(one, tuple) else one for one in members]})
    return found


# The loss is the mean over this share of the backward passes at the end.
_FINAL_SHARE = 0.1
# A recipe counts as different beyond so many times what the twin differs by, and this share of float32's loss.
_TWIN_GAP_FACTOR = 2.0
GAP_TOLERANCE = 0.01
# Curves are means over as many stretches.
_CURVE_POINTS = 200


@dataclass(frozen=True)
class ScriptRun:
    """The losses and the ending of one run of a script, plain data.

    Attributes:
        losses: that backward passes began with, without a scaler's factor.
        steps: of optimizers.
        refusal: why the recipe could not be used, None where it was.
        notes: what else is to be said.
        ending: "finished", "exited", "crashed", "interrupted", or words where the process left no result.
        exit_code: its exit code.
        bytes_per_parameter: weights, states, gradients, where halfulp's optimizer stepped; None elsewhere.
        error_output: what it printed to stderr.
    """

    losses: Sequence[float] = ()
    steps: int = 0
    refusal: str | None = None
    notes: Sequence[str] = ()
    ending: str | None = None
    exit_code: int = 0
    bytes_per_parameter: float | None = None
    error_output: str = ""

    def explain_failure(self) -> str:
        """Return why a recipe has no results; empty where it has."""
        if self.refusal:
            return f"could not be used: {self.refusal}"
        if self.exit_code:
            return self.describe_ending("")
        return "" if self.losses else "called no backward of a loss"

    def describe_ending(self, where: str) -> str:
        """Return how the process ended, and of a crash the last line of stderr, which is the error."""
        how = f"{self.ending} with exit code {self.exit_code}" if self.ending == "exited" else str(self.ending)
        line = (self.error_output.strip().splitlines() or [""])[-1].strip()
        return f"{how}{where}{f': {line}' if line and self.ending == 'crashed' else ''}"

    def compute_loss(self, share: float = _FINAL_SHARE) -> float | None:
        """Return the mean over the last losses, or with a negative share over the first; None without any."""
        count = max(1, math.ceil(abs(share) * len(self.losses)))
        part = self.losses[:count] if share < 0 else self.losses[-count:]
        return sum(part) / len(part) if part else None

    def compute_curve(self) -> list[list[float]]:
        """Return the loss curve, [backward passes so far, mean loss since the point before], where it is finite."""
        width = max(1, math.ceil(len(self.losses) / _CURVE_POINTS))
        parts = [(k, self.losses[k : k + width]) for k in range(0, len(self.losses), width)]
        points = [[float(k + len(part)), sum(part) / len(part)] for k, part in parts]
        return [point for point in points if math.isfinite(point[1])]


def run_worker() -> None:
    """Run `[recipe, result file, "file" or "module", script, *arguments]` of sys.argv and write the Run as JSON."""
    load_inherited_extensions()
    recipe, result, kind, script, *arguments = sys.argv[1:]
    losses: list[float] = []
    done = Substitution()

    def write(ending: ScriptEnding | None, refused: str | None = None) -> None:
        code = 0 if ending is None else ending.code
        if refused is None and not done.optimizers_made and not code:
            refused = done.explain_nothing_converted()
        size = None if refused else done.bytes_per_parameter()
        run = ScriptRun(
            losses, done.step_count, refused, done.write_notes(), None if ending is None else ending.reason, code, size
        )
        Path(result).write_text(json.dumps(asdict(run)), encoding="utf-8")

    def log(loss: Tensor) -> None:
        losses.append(float(loss))

    try:
        with substitute_optimizers(recipes.get(recipe)) as done, tell_backward_losses(log):
            ending = run_script(script, arguments, passing=RecipeRefusal, module=kind == "module")
    except RecipeRefusal as refusal:
        write(None, str(refusal))
    else:
        write(ending)


@dataclass(frozen=True)
class ScriptEvidence(Evidence):
    """The results of a script under recipes, one run each: a comparison whose task is the script.

    ``run`` has besides how it was run the ``notes``, and ``refused``: recipes without results, and why.
    """

    file_stem: ClassVar[str] = "compare-script"

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


def _write_notes(runs: dict[str, ScriptRun]) -> list[str]:
    """Return sentences on how the verdicts came about, and on a reference that did not learn."""
    reference = runs[REFERENCE_RECIPE]
    said = [
        f"One run for each recipe, with the script's own seeds; {reference.steps:,} steps in float32.",
        f"The loss is what backward passes began with, without a scaler's factor, as the mean over the last tenth. "
        f"A gap within {GAP_TOLERANCE:.0%} of it, or within {_TWIN_GAP_FACTOR:g} times that of {TWIN_RECIPE}, whose "
        f"start differs by 1e-7, is no difference.",
    ]
    first, last = reference.compute_loss(-_FINAL_SHARE), reference.compute_loss()
    if finite_or_none(last) is None:
        said.insert(
            0, "The loss is not finite in float32: the script does not learn as it is, and no recipe gets a verdict."
        )
    elif first is not None and last is not None and not last < first:
        said.insert(0, f"The loss did not fall in float32, from {first:.4g} to {last:.4g}: the gaps say little.")
    for name, run in runs.items():
        other = [] if run.refusal or run.steps == reference.steps else [f"{run.steps:,} steps"]
        said += [f"{name}: {note}." for note in (*other, *run.notes)]
    return said


def _make_record(name: str, run: ScriptRun) -> dict[str, Any]:
    """Return a run as the trial of a comparison."""
    unknown, loss = {"loss": None, "accuracy": None}, finite_or_none(run.compute_loss())
    task = {"name": "script", "title": "a training script of one's own", "rule": "the script's own", "hyper": {}}
    task |= {"batch": "the script's own", "judged_by": "train_loss", "target": ""}
    versions = {"halfulp": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "settings": {
            "task": task,
            "recipe": recipes.get(name).to_dict(),
            "seed": 0,
            "steps": run.steps,
            "versions": versions,
        },
        "result": {
            "curve": run.compute_curve(),
            "float32": {"train": {"loss": loss, "accuracy": None}, "validation": unknown},
            "own": unknown,
            "bytes_per_parameter": run.bytes_per_parameter,
            **dict.fromkeys(("step_ms", "cancelled", "realised", "diverged_at")),
            **{"parameters": 0, "targets": 0, "data": "the script's own data"},
        },
    }


_WORKER_CODE = "from halfulp.trials._script import run_worker; run_worker()"


class ScriptError(ValueError):
    """Raised for a script that does not train unchanged, or gives nothing to compare; ``said`` is its stderr."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


def compare_script(
    script: str,
    arguments: Sequence[str],
    names: Sequence[str],
    module: bool = False,
    listen: Callable[[str, str, float], None] = lambda recipe, said, seconds: None,
) -> tuple[ScriptEvidence, dict[str, str]]:
    """Run a script once per recipe, each in a process of its own, and say what its training loss became.

    float32 and a twin whose start differs by 1e-7 run first. Where the script makes torch's SGD, Adam or AdamW, its
    float32 model is converted and the recipe's optimizer returned; everything else is the script's own, seeds too.

    Args:
        script, arguments: its path, or as a ``module`` the dotted name of one, and its own arguments.
        names: recipes.
        listen: told each recipe before it runs (with ""), and afterwards what became of it and the seconds it took.

    Returns:
        The evidence, and what the runs that crashed printed to stderr, by recipe.
    """
    for name in names:
        recipes.get(name)
    runs: dict[str, ScriptRun] = {}
    start = time.monotonic()
    for name in dict.fromkeys([REFERENCE_RECIPE, TWIN_RECIPE, *names]):
        listen(name, "", 0.0)
        begin = time.monotonic()
        run = runs[name] = _run_script_under(script, arguments, name, module)
        if name == REFERENCE_RECIPE:
            _check_reference(run)
        loss = run.compute_loss()
        said = run.explain_failure() or f"loss {loss:.4g} after {run.steps:,} steps"
        listen(name, said, time.monotonic() - begin)
    failed = {name: why for name, run in runs.items() if (why := run.explain_failure())}
    facts = {
        "notes": _write_notes(runs),
        "refused": [{"recipe": name, "why": why} for name, why in failed.items()],
        **{"workers": 1, "cores": core_count(), "seconds": round(time.monotonic() - start, 1)},
        **{"trained": len(runs), "reused": 0, "processor": processor_line()},
    }
    trials = tuple(_make_record(name, run) for name, run in runs.items() if name not in failed)
    return ScriptEvidence(trials, facts), {name: run.error_output for name, run in runs.items() if run.exit_code}


def _run_script_under(script: str, arguments: Sequence[str], recipe: str, module: bool) -> ScriptRun:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-c", _WORKER_CODE, recipe, str(result), "module" if module else "file"]
        done = subprocess.run(
            [*command, script, *arguments], capture_output=True, text=True, errors="replace", check=False
        )
        if result.exists() and done.returncode >= 0:
            found = json.loads(result.read_text(encoding="utf-8"))
            return ScriptRun(**{**found, "error_output": done.stderr})
    before = " before it could report" if done.returncode >= 0 else ""
    return ScriptRun(
        ending=describe_exit(done.returncode) + before, exit_code=done.returncode or 1, error_output=done.stderr
    )


def _check_reference(run: ScriptRun) -> None:
    """Refuse a script that does not train in float32, as nothing can be compared with it."""
    if run.refusal:
        raise ScriptError(f"the script cannot be compared under recipes: {run.refusal}", run.error_output)
    if run.exit_code:
        raise ScriptError(f"the script {run.describe_ending(' in float32')}", run.error_output)
    if not run.losses:
        raise ScriptError("the script called no backward of a loss: there is nothing to compare", run.error_output)
    if not run.steps:
        raise ScriptError(
            "the script computes gradients and never steps an optimizer, so that its weights stay: there is nothing to "
            "compare",
            run.error_output,
        )
