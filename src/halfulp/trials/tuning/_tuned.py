"""Tuned: the recipe that a search found, the evidence for it, and what became of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...observation import Finding
from ...recipes import Recipe
from ..evidence._evidence import Evidence
from ..evidence._table import number, percent
from ..running._plan import REFERENCE
from ._candidates import Candidate

_MOST_FINDINGS = 5


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` found; ``print`` shows it.

    Attributes:
        recipe: the recipe of fewest bytes that stays with float32 within the tolerance; float32's own where none does.
        evidence: all trials, as `halfulp.compare` gives them: ``tuned.evidence.to_html(path)`` writes their page.
        candidates: what was considered, by bytes, and what became of each.
        findings: what `hu.observe` found in the observed trainings, the worst first.
        tolerance: the share of float32's loss by which a recipe may be above it; None is what `compare` calls no
            difference.
    """

    recipe: Recipe
    evidence: Evidence
    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]
    tolerance: float | None

    @property
    def bytes_per_parameter(self) -> float:
        """Weight, what lies beside it, optimizer states and gradient, of the recipe."""
        return next(one.bytes_per_parameter for one in self.candidates if one.recipe == self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return {
            "recipe": self.recipe.to_dict(),
            "bytes_per_parameter": self.bytes_per_parameter,
            "tolerance": self.tolerance,
            "candidates": [{**vars(one), "recipe": one.recipe.to_dict()} for one in self.candidates],
            "findings": [finding.to_dict() for finding in self.findings],
            "evidence": self.evidence.to_dict(),
        }

    def headline(self) -> str:
        """Which recipe it is and what it costs, in one sentence."""
        task = self.evidence.tasks()[0]
        within = f"within {percent(self.tolerance)} of float32" if self.tolerance else "no difference to float32"
        if self.recipe.name == REFERENCE:
            return f"{task}: no candidate is {within}; float32 remains."
        reference = self.evidence.row(task, REFERENCE)
        return (
            f"{task}: {self.recipe.name}, {within}, at {number(self.bytes_per_parameter, 1)} bytes per parameter "
            f"instead of {number(reference.bytes_per_parameter, 1)}."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The table of the candidates as words, its header first."""
        found: list[tuple[str, ...]] = [("recipe", "bytes/param", "gap to fp32", "outcome", "why")]
        for one in self.candidates:
            size, gap = number(one.bytes_per_parameter, 2), number(one.gap, 4, sign=True)
            found.append((one.recipe.name, size, gap, one.outcome, one.why))
        return found

    def observed(self) -> list[str]:
        """The worst findings of the observed trainings, a line each, under a heading; nothing without any."""
        shown = [f"  {finding.severity}: {finding}" for finding in self.findings[:_MOST_FINDINGS]]
        more = len(self.findings) - len(shown)
        shown += [f"  and {more} more in .findings"] if more else []
        return ["Observed where every update is rounded to nearest:", *shown] if shown else []

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        blank = [""] if self.findings else []
        return "\n".join([self.headline(), self.recipe.explain(), "", *table, *blank, *self.observed()])
