"""Comparison of recipes on a user's own script: one process per recipe, and the losses of each."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import recipes
from ...pages import write_whole
from .._defaults import REFERENCE, TWIN
from ..page._script_page import render_script_page
from ..running._pool import describe_exit, is_killed
from ..tasks._task import finite_or_none

# The loss is the mean over this share of the backward passes at the end.
_LAST = 0.1
# A recipe counts as different beyond so many times what the twin differs by, and this share of float32's loss.
_SPREAD = 2.0
TOLERANCE = 0.01
# Curves are means over as many stretches.
_POINTS = 200


@dataclass(frozen=True)
class Run:
    """The losses and the ending of one run of a script.

    Attributes:
        losses: that backward passes began with.
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


@dataclass(frozen=True)
class ScriptRow:
    """The results of a script under one recipe.

    Attributes:
        recipe: its name.
        steps: of optimizers.
        loss: mean over the last tenth of the backward passes; None without any, or where it is not finite.
        gap: loss minus that of float32; None for float32 itself and where either is missing.
        verdict: "reference", "control", "no difference", "worse", "better", "diverged", "no verdict", "cannot" or
            "crashed".
        reason: why it cannot, how it ended, or what else is to be said.
        bytes_per_parameter: weights, states, gradients, where halfulp's optimizer stepped; None elsewhere.
    """

    recipe: str
    steps: int
    loss: float | None
    gap: float | None
    verdict: str
    reason: str
    bytes_per_parameter: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return dict(vars(self))


@dataclass
class ScriptComparison:
    """The runs of a script by recipe, float32 first.

    Attributes:
        runs: by the recipes' names.
    """

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
            "recipes": [{**row.to_dict(), "curve": self.runs[row.recipe].curve()} for row in self.rows],
            "notes": self.notes(),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all.

        Raises:
            ValueError: jinja2 or matplotlib is missing, or the file cannot be written.
        """
        write_whole(path, render_script_page(self.to_dict()))

    def _loss(self, name: str) -> float | None:
        run = self.runs.get(name)
        return None if run is None or run.code or run.refused else finite_or_none(run.loss())

    def _spread(self) -> float | None:
        """Return the gap that counts as no difference; None where float32 and its twin do not tell."""
        reference, twin = self._loss(REFERENCE), self._loss(TWIN)
        if reference is None or twin is None:
            return None
        return max(_SPREAD * abs(twin - reference), TOLERANCE * abs(reference))

    def _verdict(self, name: str, run: Run) -> tuple[str, str]:
        notes = "; ".join(run.notes)
        if run.refused:
            return "cannot", run.refused
        if run.code:
            return "crashed", run.read_last_line() if run.ended == "crashed" else run.describe_ending()
        loss, reference, spread = finite_or_none(run.loss()), self._loss(REFERENCE), self._spread()
        if name in (REFERENCE, TWIN):
            broken = "" if loss is not None else "its loss is not finite: it did not learn"
            return ("reference" if name == REFERENCE else "control"), "; ".join(filter(None, (broken, notes)))
        if reference is None or spread is None:
            which = REFERENCE if reference is None else TWIN
            return "no verdict", f"{which} did not learn"
        if loss is None:
            return "diverged", "; ".join(filter(None, ("its loss is not finite", notes)))
        if run.steps != self.runs[REFERENCE].steps:
            notes = "; ".join(filter(None, (f"{self.runs[REFERENCE].steps} steps in float32", notes)))
        if abs(loss - reference) <= spread:
            return "no difference", notes
        return ("worse" if loss > reference else "better"), notes


_WORKER = "from halfulp.trials.script._worker import main; main()"


class ScriptError(ValueError):
    """Raised for a script that does not train unchanged, or gives nothing to compare.

    Attributes:
        said: what it printed to stderr.
    """

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

    float32 and a twin whose start differs by 1e-7 run first: a gap within twice theirs, or within 1% of the
    loss, is no difference: one run cannot tell. Where the
    script makes torch's SGD, Adam or AdamW, its float32 model is converted and the recipe's optimizer returned;
    everything else is the script's own, seeds too.

    Args:
        script: its path, or the dotted name of a module.
        arguments: its own.
        names: recipes.
        module: whether it is a module.
        listen: told each recipe before it runs (with None), and afterwards its row and the seconds that it took.

    Returns:
        A row per recipe, float32 and its twin first.

    Raises:
        ValueError: an unknown recipe, or a script that fails as it is.
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
            with_result = json.loads(result.read_text(encoding="utf-8"))
            return Run(**with_result, said=done.stderr)
    return Run(ended=_describe_end(done.returncode), code=done.returncode or 1, said=done.stderr)


def _describe_end(code: int) -> str:
    """Describe how a process ended that left no result.

    >>> _describe_end(-9), _describe_end(3)
    ('was killed by SIGKILL, as where memory is short', 'ended with exit code 3 before it could report')
    """
    if code >= 0:
        return f"{describe_exit(code)} before it could report"
    return f"{describe_exit(code)}{', as where memory is short' if is_killed(code) else ''}"


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
