"""ScriptComparison: the runs of a script under recipes, their losses, and what one run each can tell."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...pages import write_whole
from ..page._script_page import script_html
from ..running._plan import REFERENCE, TWIN

# The loss is the mean over this share of the backward passes at the end.
_LAST = 0.1
# A recipe counts as different beyond so many times what the twin differs by, and this share of float32's loss.
_SPREAD = 2.0
TOLERANCE = 0.01
# Curves are means over as many stretches.
_POINTS = 200


@dataclass(frozen=True)
class Run:
    """What one run of a script gave.

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

    def how(self) -> str:
        """How it ended, in words."""
        return f"{self.ended} with exit code {self.code}" if self.ended == "exited" else str(self.ended)

    def last_words(self) -> str:
        """The last line that it said on stderr, which of a crash is the error."""
        return (self.said.strip().splitlines() or [""])[-1].strip()

    def loss(self, share: float = _LAST) -> float | None:
        """Return the mean over the last losses, or with a negative share over the first; None without any."""
        count = max(1, math.ceil(abs(share) * len(self.losses)))
        part = self.losses[:count] if share < 0 else self.losses[-count:]
        return sum(part) / len(part) if part else None

    def curve(self) -> list[list[float]]:
        """Return [backward passes so far, mean loss since the point before], finite ones."""
        width = max(1, math.ceil(len(self.losses) / _POINTS))
        parts = [(k, self.losses[k : k + width]) for k in range(0, len(self.losses), width)]
        points = [[float(k + len(part)), sum(part) / len(part)] for k, part in parts]
        return [point for point in points if math.isfinite(point[1])]


@dataclass(frozen=True)
class ScriptRow:
    """One recipe's run.

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
        """Return plain data."""
        return dict(vars(self))


@dataclass
class ScriptComparison:
    """Runs by recipe, float32 first.

    Attributes:
        runs: by the recipes' names.
    """

    runs: dict[str, Run] = field(default_factory=dict)

    def add(self, recipe: str, run: Run) -> None:
        """Add a recipe's run."""
        self.runs[recipe] = run

    @property
    def rows(self) -> list[ScriptRow]:
        """One per recipe, in order."""
        return [self.row(name) for name in self.runs]

    def row(self, name: str) -> ScriptRow:
        """Return the row of a recipe."""
        run = self.runs[name]
        verdict, reason = self._verdict(name, run)
        if verdict == "cannot":
            return ScriptRow(name, 0, None, None, verdict, reason, None)
        loss, reference = _finite(run.loss()), self._loss(REFERENCE)
        gap = None if name == REFERENCE or loss is None or reference is None else loss - reference
        return ScriptRow(name, run.steps, loss, gap, verdict, reason, run.bytes_per_parameter)

    def notes(self) -> list[str]:
        """Return what a reader has to know before the numbers."""
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
        write_whole(path, script_html(self.to_dict()))

    def _loss(self, name: str) -> float | None:
        run = self.runs.get(name)
        return None if run is None or run.code or run.refused else _finite(run.loss())

    def _spread(self) -> float | None:
        """What counts as no difference; None where float32 and its twin do not tell."""
        reference, twin = self._loss(REFERENCE), self._loss(TWIN)
        if reference is None or twin is None:
            return None
        return max(_SPREAD * abs(twin - reference), TOLERANCE * abs(reference))

    def _verdict(self, name: str, run: Run) -> tuple[str, str]:
        notes = "; ".join(run.notes)
        if run.refused:
            return "cannot", run.refused
        if run.code:
            return "crashed", run.last_words() if run.ended == "crashed" else run.how()
        loss, reference, spread = _finite(run.loss()), self._loss(REFERENCE), self._spread()
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
