"""What `hu.forecast` computed: plain data that findings, tables and pages read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from .._finding import Finding, format_findings, group_causes_as_dicts
from .._text import name_dtype
from ..page import write_page
from ._layers import LayerForecast

_MOST_LAYER_LINES = 40


@dataclass(frozen=True)
class Forecast:
    """The predicted effect of rounding on a training under a schedule; `hu.forecast` makes it.

    `str()` is a table of the layers with the findings before it.

    Attributes:
        layers: in the model's order.
        rule: the optimizer's update rule.
        start, steps: steps made so far, and of the whole run.
        notes: what could not be read or is not known, in sentences.
        learning_rates: (step, learning rate of the first group) at steps spread over the schedule.
        is_halfulp: whether the optimizer is one of halfulp's.
        findings: the plan's problems, the worst first.
    """

    layers: tuple[LayerForecast, ...]
    rule: str
    schedule: str
    start: int
    steps: int
    notes: tuple[str, ...] = ()
    learning_rates: tuple[tuple[int, float], ...] = ()
    is_halfulp: bool = False
    findings: list[Finding] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: findings, layers, and what the schedule was."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "causes": group_causes_as_dicts(self.findings),
            "layers": [layer.to_dict() for layer in self.layers],
            "rule": self.rule,
            "schedule": self.schedule,
            "start": self.start,
            "steps": self.steps,
            "learning_rates": [list(pair) for pair in self.learning_rates],
            "notes": list(self.notes),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        write_page("forecast", self.to_dict(), path)

    def __str__(self) -> str:
        lines = [f"{self.rule}, {self.schedule} schedule, steps {self.start} to {self.steps}"]
        lines += ["", *format_findings(self.findings)]
        rows = [("layer", "dtype", "freezes at step", "lr there", "updates lost", "decay lost")]
        for layer in self.layers[:_MOST_LAYER_LINES]:
            frozen = "never" if layer.freeze_step is None else f"{layer.freeze_step}"
            frozen = frozen if layer.weight_update == "nearest" else f"({frozen})"
            numbers = ((layer.freeze_lr, ".2g"), (layer.lost_share, ".0%"), (layer.decay_lost, ".0%"))
            lr, lost, decay = ("" if value is None else format(value, spec) for value, spec in numbers)
            step = "not known" if layer.updates is None else frozen
            rows.append((layer.name, name_dtype(layer.dtype), step, lr, lost, decay))
        first, *widths = (max(map(len, column)) for column in zip(*rows))
        lines.append("")
        for name, *cells in rows:
            aligned = (cell.rjust(width) for cell, width in zip(cells, widths))
            lines.append("  ".join([name.ljust(first), *aligned]).rstrip())
        if len(self.layers) > _MOST_LAYER_LINES:
            lines.append(f"... and {len(self.layers) - _MOST_LAYER_LINES} more (.layers)")
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])
