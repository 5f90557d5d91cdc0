"""A user's script under several recipes, each in a process of its own, its model and optimizer replaced on the way."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .. import optim, recipes
from .._extensions import load_inherited
from ..observation.scripts import ScriptEnding, find_model, run_script, tell_backward_losses
from ..pages import write_whole
from ..recipes import Recipe
from ..recipes._optimizer import _state as recipe_state
from ..recipes._optimizer import split_by_update
from ._defaults import REFERENCE, TWIN
from .page._script_page import render_script_page
from .running._pool import describe_exit
from .tasks._task import finite_or_none

RULES = ("SGD", "Adam", "AdamW")
# What chooses an implementation in torch, and no other training.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


class Refusal(BaseException):
    """Raised where a recipe cannot be put into a script, past `except Exception` of the script's own."""


@dataclass
class Substitution:
    """The replacements made for a script's models and optimizers; it keeps none of them alive.

    Attributes:
        models: that were converted.
        optimizers: that were made for them, ``made`` in all.
        others: names of the classes of other optimizers that stepped.
        steps: how often any optimizer stepped.
        kinds: torch's classes whose optimizers, and copies of these, are the recipe's.
    """

    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    made: int = 0
    others: list[str] = field(default_factory=list)
    steps: int = 0
    kinds: frozenset[type] = frozenset()

    def add(self, optimizer: Any) -> None:
        """Add an optimizer of the recipe's."""
        self.optimizers.add(optimizer)
        self.made += 1

    def count(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step of an optimizer (a step hook)."""
        self.steps += 1
        kind = type(optimizer)
        if kind not in self.kinds and not _is_own(optimizer) and kind.__name__ not in self.others:
            self.others.append(kind.__name__)

    def bytes_per_parameter(self) -> float | None:
        """Return the mean over parameters of halfulp's optimizers that live; None without any."""
        found = [(one.bytes_per_parameter(), _count_elements(one)) for one in self.optimizers if _is_own(one)]
        return sum(size * count for size, count in found) / sum(count for _, count in found) if found else None

    def notes(self) -> list[str]:
        """Return what is to be said of a run in which a recipe was used."""
        notes = []
        if self.made > 1:
            notes.append(f"{self.made} optimizers: the loss is the mean over the backward passes of all")
        if self.made and self.others:
            notes.append(f"{', '.join(self.others)} and what it steps stayed as they are")
        return notes

    def explain_nothing_converted(self) -> str:
        """Return why no recipe was used."""
        known = f"recipes replace torch.optim's {', '.join(RULES[:-1])} and {RULES[-1]}, and no subclasses of them"
        if self.others:
            return f"it trains by {', '.join(self.others)}; {known}"
        return f"it makes no torch optimizer in its own process, and other processes are not reached; {known}"


@contextlib.contextmanager
def substitute_optimizers(recipe: Recipe) -> Iterator[Substitution]:
    """Give whoever makes torch.optim's SGD, Adam or AdamW a converted model and the recipe's optimizer.

    A Refusal is raised where the recipe needs more than that.
    """
    check_supported(recipe)
    kinds = {name: getattr(torch.optim, name) for name in RULES}
    inits = {kind: kind.__init__ for kind in kinds.values()}
    done = Substitution(kinds=frozenset() if recipe.narrow else frozenset(inits))
    if recipe.narrow:
        _put_classes({name: _make_class(kind, recipe, done) for name, kind in kinds.items()}, kinds)
    else:
        for kind in inits:
            kind.__init__ = _make_converting_init(kind, recipe, done)
    counting = register_optimizer_step_post_hook(done.count)
    try:
        yield done
    finally:
        counting.remove()
        _put_classes(kinds, kinds)
        for kind, init in inits.items():
            kind.__init__ = init


def _put_classes(classes: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Put classes where torch's stand: in torch.optim, and in the module of each."""
    for name, kind in kinds.items():
        for place in (torch.optim, sys.modules[kind.__module__]):
            setattr(place, name, classes[name])


def _is_own(optimizer: Any) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "halfulp"


def _count_elements(optimizer: Any) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"]) or 1


def check_supported(recipe: Recipe) -> None:
    """Refuse recipes that scale or round gradients or emulate a format, by objects that the script has to use."""
    for need, words in (
        ("gradient_format", "its gradients go through hu.AdaptiveGradScaler, which the script has to call"),
        ("payload", "its parameters carry scales: use hu.scalify(model) and an optimizer of hu.optim in the script"),
        ("emulate", "it emulates a format by hu.emulate(model), which the script has to call"),
        ("format", "it holds weights to a format, by an optimizer of hu.optim with format="),
    ):
        if getattr(recipe, need):
            raise Refusal(words)


def _make_class(own: Any, recipe: Recipe, done: Substitution) -> type:
    """Return a subclass of an optimizer whose call returns the recipe's; a subclass of it is an optimizer of its own.

    Not `__new__` of torch's own class: one that was set and deleted leaves a class that takes no arguments any more.
    """

    def make(cls: type, *args: Any, **options: Any) -> Any:
        if cls is not kind:
            return object.__new__(cls)
        return _make_recipe_optimizer(own, recipe, done, args, options)

    kind = type(own.__name__, (own,), {"__new__": make, "__module__": own.__module__, "__doc__": own.__doc__})
    return kind


def _make_recipe_optimizer(own: Any, recipe: Recipe, done: Substitution, args: tuple, options: dict[str, Any]) -> Any:
    """Return the recipe's optimizer for what was to be torch's."""
    given = dict(inspect.signature(own.__init__).bind(None, *args, **options).arguments)
    groups = _list_groups(given.pop("params"))
    model = _convert(groups, recipe, done)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    given = {key: value for key, value in given.items() if key not in ("self", *_IMPLEMENTATION)}
    with _turn_into_refusals():
        split = []
        for group in groups:
            named = [(names[id(parameter)], parameter) for parameter in group["params"]]
            split += [{**group, **part} for part in split_by_update(recipe, model, named)]
        kind: Any = optim.OPTIMIZERS[own.__name__]
        made = kind(split, state_dtype=recipe_state(recipe, kind, given), **given)
    done.add(made)
    return made


def _make_converting_init(kind: Any, recipe: Recipe, done: Substitution) -> Any:
    """Return a constructor that converts the model first; the optimizer stays torch's, and a subclass what it is."""
    init = kind.__init__

    @functools.wraps(init)
    def convert_and_init(optimizer: Any, params: Any, *args: Any, **options: Any) -> None:
        if type(optimizer) is not kind:
            init(optimizer, params, *args, **options)
            return
        groups = _list_groups(params)
        _convert(groups, recipe, done)
        init(optimizer, groups, *args, **options)
        done.add(optimizer)

    return convert_and_init


def _convert(groups: list[dict[str, Any]], recipe: Recipe, done: Substitution) -> nn.Module:
    """Convert the model that holds an optimizer's parameters, unless it has been; return it."""
    model = find_model(parameter for group in groups for parameter in group["params"])
    if model is None:
        raise Refusal("no module holds the optimizer's parameters, so that there is no model to convert")
    if model not in done.models:
        with _turn_into_refusals():
            recipes.convert(model, recipe)
        done.models.add(model)
    return model


@contextlib.contextmanager
def _turn_into_refusals() -> Iterator[None]:
    """Turn errors of a conversion into a Refusal."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def _list_groups(params: Any) -> list[dict[str, Any]]:
    """Return param groups whose params are lists of tensors, from whatever an optimizer takes."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise Refusal(f"the optimizer was given {type(params).__name__} for parameters")
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    found = []
    for group in groups:
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        found.append({**group, "params": [one[1] if isinstance(one, tuple) else one for one in members]})
    return found


# The loss is the mean over this share of the backward passes at the end.
_LAST = 0.1
# A recipe counts as different beyond so many times what the twin differs by, and this share of float32's loss.
_SPREAD = 2.0
TOLERANCE = 0.01
# Curves are means over as many stretches.
_POINTS = 200


@dataclass(frozen=True)
class Run:
    """The losses and the ending of one run of a script, plain data.

    Attributes:
        losses: that backward passes began with, without a scaler's factor.
        steps: of optimizers.
        refused: why the recipe could not be used, None where it was.
        notes: what else is to be said.
        ended: "finished", "exited", "crashed", "interrupted", or words where the process left no result.
        code: its exit code.
        bytes_per_parameter: weights, states, gradients, where halfulp's optimizer stepped; None elsewhere.
        said: what it printed to stderr.
    """

    losses: Sequence[float] = ()
    steps: int = 0
    refused: str | None = None
    notes: Sequence[str] = ()
    ended: str | None = None
    code: int = 0
    bytes_per_parameter: float | None = None
    said: str = ""

    def describe_ending(self) -> str:
        """Describe how the process ended."""
        return f"{self.ended} with exit code {self.code}" if self.ended == "exited" else str(self.ended)

    def read_last_line(self) -> str:
        """Return the last line that it said on stderr, which of a crash is the error."""
        return (self.said.strip().splitlines() or [""])[-1].strip()

    def loss(self, share: float = _LAST) -> float | None:
        """Return the mean over the last losses, or with a negative share over the first; None without any."""
        count = max(1, math.ceil(abs(share) * len(self.losses)))
        part = self.losses[:count] if share < 0 else self.losses[-count:]
        return sum(part) / len(part) if part else None

    def curve(self) -> list[list[float]]:
        """Return the loss curve, [backward passes so far, mean loss since the point before], where it is finite."""
        width = max(1, math.ceil(len(self.losses) / _POINTS))
        parts = [(k, self.losses[k : k + width]) for k in range(0, len(self.losses), width)]
        points = [[float(k + len(part)), sum(part) / len(part)] for k, part in parts]
        return [point for point in points if math.isfinite(point[1])]


def main() -> None:
    """Run `[recipe, result file, "file" or "module", script, *arguments]` of sys.argv and write the Run as JSON."""
    load_inherited()
    recipe, result, kind, script, *arguments = sys.argv[1:]
    losses: list[float] = []
    done = Substitution()

    def write(ending: ScriptEnding | None, refused: str | None = None) -> int:
        code = 0 if ending is None else ending.code
        if refused is None and not done.made and not code:
            refused = done.explain_nothing_converted()
        size = None if refused else done.bytes_per_parameter()
        run = Run(losses, done.steps, refused, done.notes(), None if ending is None else ending.reason, code, size)
        Path(result).write_text(json.dumps(asdict(run)), encoding="utf-8")
        return code

    def log(loss: Tensor) -> None:
        losses.append(float(loss))

    try:
        with substitute_optimizers(recipes.get(recipe)) as done, tell_backward_losses(log):
            # Where the script ends the process by os._exit, the result is written before.
            ending = run_script(script, arguments, passing=Refusal, module=kind == "module", leave=write)
    except Refusal as refusal:
        write(None, str(refusal))
    else:
        write(ending)


@dataclass(frozen=True)
class ScriptRow:
    """The results of a script under one recipe.

    Attributes:
        loss: mean over the last tenth of the backward passes; None without any, or where it is not finite.
        gap: loss minus that of float32; None for float32 itself and where either is missing.
        verdict: "reference", "control", "no difference", "worse", "better", "diverged", "no verdict", "cannot" or
            "crashed".
        reason: why it cannot, how it ended, or what else is to be said.
    """

    recipe: str
    steps: int
    loss: float | None
    gap: float | None
    verdict: str
    reason: str
    bytes_per_parameter: float | None


@dataclass
class ScriptComparison:
    """The runs of a script by the recipes' names, float32 first."""

    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def rows(self) -> list[ScriptRow]:
        """One row per recipe, in the order in which they ran."""
        return [self.row(name) for name in self.runs]

    def row(self, name: str) -> ScriptRow:
        """Return the row of a recipe."""
        run = self.runs[name]
        verdict, reason = self._verdict(name, run)
        if verdict == "cannot":
            return ScriptRow(name, 0, None, None, verdict, reason, None)
        loss, reference = finite_or_none(run.loss()), self._loss(REFERENCE)
        gap = None if name == REFERENCE or loss is None or reference is None else loss - reference
        return ScriptRow(name, run.steps, loss, gap, verdict, reason, run.bytes_per_parameter)

    def notes(self) -> list[str]:
        """Return sentences on how the verdicts came about, and on a reference that did not learn."""
        said = [
            f"The loss is the mean over the last tenth of the backward passes, of one run with the script's own seeds. "
            f"A gap within {TOLERANCE:.0%} of it, or within {_SPREAD:g} times that of {TWIN}, whose start differs by "
            f"1e-7, is no difference."
        ]
        first, last = self.runs[REFERENCE].loss(-_LAST), self.runs[REFERENCE].loss()
        if self._loss(REFERENCE) is None:
            broken = "The loss is not finite in float32: the script does not learn as it is"
            said.insert(0, f"{broken}, and no recipe gets a verdict.")
        elif first is not None and last is not None and not last < first:
            flat = f"The loss did not fall in float32, from {first:.4g} to {last:.4g}: the gaps say little."
            said.insert(0, flat)
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold; neither the script's name nor its arguments nor what it printed."""
        return {
            "recipes": [{**vars(row), "curve": self.runs[row.recipe].curve()} for row in self.rows],
            "notes": self.notes(),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all."""
        write_whole(path, render_script_page(self.to_dict()))

    def _loss(self, name: str) -> float | None:
        run = self.runs.get(name)
        return None if run is None or run.code or run.refused else finite_or_none(run.loss())

    def _verdict(self, name: str, run: Run) -> tuple[str, str]:
        notes = list(run.notes)
        if run.refused:
            return "cannot", run.refused
        if run.code:
            return "crashed", run.read_last_line() if run.ended == "crashed" else run.describe_ending()
        loss, reference, twin = finite_or_none(run.loss()), self._loss(REFERENCE), self._loss(TWIN)
        if name in (REFERENCE, TWIN):
            broken = ["its loss is not finite: it did not learn"] if loss is None else []
            return ("reference" if name == REFERENCE else "control"), "; ".join([*broken, *notes])
        if reference is None or twin is None:
            return "no verdict", f"{REFERENCE if reference is None else TWIN} did not learn"
        if loss is None:
            return "diverged", "; ".join(["its loss is not finite", *notes])
        if run.steps != self.runs[REFERENCE].steps:
            notes.insert(0, f"{self.runs[REFERENCE].steps} steps in float32")
        verdict = "worse" if loss > reference else "better"
        if abs(loss - reference) <= max(_SPREAD * abs(twin - reference), TOLERANCE * abs(reference)):
            verdict = "no difference"
        return verdict, "; ".join(notes)


_WORKER = "from halfulp.trials._script import main; main()"


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
    listen: Callable[[str, ScriptRow | None, float], None] = lambda recipe, row, seconds: None,
) -> ScriptComparison:
    """Run a script once per recipe, each in a process of its own, and say what its training loss became.

    float32 and a twin whose start differs by 1e-7 run first. Where the script makes torch's SGD, Adam or AdamW, its
    float32 model is converted and the recipe's optimizer returned; everything else is the script's own, seeds too.

    Args:
        script, arguments: its path, or as a ``module`` the dotted name of one, and its own arguments.
        names: recipes.
        listen: told each recipe before it runs (with None), and afterwards its row and the seconds that it took.
    """
    for name in names:
        recipes.get(name)
    found = ScriptComparison()
    for name in dict.fromkeys([REFERENCE, TWIN, *names]):
        listen(name, None, 0.0)
        begin = time.monotonic()
        run = _run(script, arguments, name, module)
        if name == REFERENCE:
            _check_reference(run)
        found.runs[name] = run
        listen(name, found.row(name), time.monotonic() - begin)
    return found


def _run(script: str, arguments: Sequence[str], recipe: str, module: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-c", _WORKER, recipe, str(result), "module" if module else "file"]
        done = subprocess.run(
            [*command, script, *arguments], capture_output=True, text=True, errors="replace", check=False
        )
        if result.exists() and done.returncode >= 0:
            found = json.loads(result.read_text(encoding="utf-8"))
            return Run(**{**found, "said": done.stderr})
    before = " before it could report" if done.returncode >= 0 else ""
    return Run(ended=describe_exit(done.returncode) + before, code=done.returncode or 1, said=done.stderr)


def _check_reference(run: Run) -> None:
    """Refuse a script that does not train in float32, as nothing can be compared with it."""
    if run.refused:
        raise ScriptError(f"the script cannot be compared under recipes: {run.refused}", run.said)
    if run.code:
        why = f": {run.read_last_line()}" if run.said.strip() else ""
        raise ScriptError(f"the script {run.describe_ending()} in float32{why}", run.said)
    if not run.losses:
        raise ScriptError("the script called no backward of a loss: there is nothing to compare", run.said)
    if not run.steps:
        raise ScriptError(
            "the script computes gradients and never steps an optimizer, so that its weights stay: there is nothing to "
            "compare",
            run.said,
        )
