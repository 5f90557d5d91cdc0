"""Evidence: what a comparison found, as a table, JSON, and one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from typing import Any, Self

from ...pages import render_template, require_page_packages, write_file_atomically
from .._defaults import REFERENCE_RECIPE, TONE_BY_VERDICT
from ..page._curves import LineStyle, LossesByRecipe, choose_line_styles, draw_loss_curves
from ._row import FinishedTrials, Row, check_trial_record
from ._table import (
    compute_stored_bytes,
    describe_judged_loss,
    describe_recipes_without_pass,
    format_number,
    format_row_cells,
    format_tables,
    has_few_seeds,
    list_filled_column_headers,
    list_table_notes,
    write_comparison_headline,
)

_WIDE_FIGURE_SIZE, _NARROW_FIGURE_SIZE = (820, 560), (340, 560)


def render_comparison_page(evidence: FinishedTrials) -> str:
    """Return a comparison's page as HTML text; it refers to nothing outside itself."""
    require_page_packages("matplotlib", instead="give no out folder")
    first = evidence.trials[0]["settings"]
    refused = [f"{one['recipe']} {one['why']}." for one in evidence.run.get("refused", [])]
    return render_template(
        "halfulp.trials.page",
        "compare.html.j2",
        headline=write_comparison_headline(evidence),
        recipes_without_pass=[*describe_recipes_without_pass(evidence), *refused],
        indication=has_few_seeds(evidence),
        is_script="notes" in evidence.run,
        tasks=[_make_task_for_template(evidence, task) for task in evidence.tasks()],
        run=evidence.run,
        versions=first["versions"],
        date=datetime.date.today().isoformat(),
        trials=len(evidence.trials),
    )


def _make_task_for_template(evidence: FinishedTrials, task: str) -> dict[str, Any]:
    """Return one task for the template: its rows, curves, notes and settings."""
    rows = evidence.rows(task)
    settings = evidence.of_task(task)[0]["settings"]
    of_task = settings["task"]
    ends = (f"{row.recipe} ends at {format_number(row.loss)}" for row in rows if row.loss is not None)
    said = {"optimizer": of_task["rule"], **{key: str(value) for key, value in of_task["hyper"].items()}}
    said |= {"batch": str(of_task["batch"]), "steps": str(settings["steps"]), "judged by": of_task["judged_by"]}
    most = max((compute_stored_bytes(row) or 0.0 for row in rows), default=0.0)
    curves = read_loss_curves(evidence, task)
    styles = choose_line_styles([row.recipe for row in rows])
    reach = max((abs(gap) for row in rows for gap in evidence.gaps(row.task, row.recipe)), default=0.0) or 1.0
    return {
        "name": task,
        "title": of_task["title"],
        "loss_name": describe_judged_loss(evidence, task),
        "headers": list_filled_column_headers(evidence, task),
        "notes": list_table_notes(evidence, task),
        "curves_in_words": f"Training loss over {settings['steps']} steps, and its difference to fp32; "
        f"{'; '.join(ends)}. The table has the same numbers.",
        "wide": draw_loss_curves(curves, task, *_WIDE_FIGURE_SIZE),
        "narrow": draw_loss_curves(curves, task, *_NARROW_FIGURE_SIZE),
        "rows": [_make_row_for_template(evidence, row, styles[row.recipe], most, reach) for row in rows],
        "settings": said,
        "recipes": [evidence.of_recipe(task, row.recipe)[0]["settings"]["recipe"] for row in rows],
    }


def read_loss_curves(evidence: FinishedTrials, task: str) -> LossesByRecipe:
    """Return the training loss of a task's trials."""
    curves: dict[str, dict[int, dict[int, float]]] = {}
    for record in evidence.of_task(task):
        settings = record["settings"]
        points = {int(step): loss for step, loss in record["result"]["curve"]}
        curves.setdefault(settings["recipe"]["name"], {})[settings["seed"]] = points
    return curves


def _make_row_for_template(
    evidence: FinishedTrials, row: Row, style: LineStyle, most: float, reach: float
) -> dict[str, Any]:
    """Return one row for the template: the table's words, and lengths of bars in per cent."""
    words = format_row_cells(evidence, row)
    return {
        "row": row,
        "recipe": row.recipe,
        "words": words,
        "verdict": words["verdict"],
        "tone": TONE_BY_VERDICT.get(row.verdict or "", ""),
        "style": style,
        "widths": {
            "cancelled": 100 * (row.cancelled or 0.0),
            "bytes/param": 100 * (compute_stored_bytes(row) or 0.0) / most if most else 0.0,
        },
        "dots": [50 + 46 * gap / reach for gap in evidence.gaps(row.task, row.recipe)],
        "band": min(46 * row.noise / reach, 50) if row.noise else None,
    }


EVIDENCE_JSON_VERSION = 1
_RUN_FIELDS = {"workers", "cores", "seconds"}


def _refuse_nonfinite_json_constant(name: str) -> None:
    raise ValueError(f"{name} among its numbers")


@dataclasses.dataclass(frozen=True)
class Evidence(FinishedTrials):
    """The results of ``compare``: every trial with its settings, and how it was run.

    Args:
        trials: One record per trial, ``{"settings": ..., "result": ...}``, plain data.
        run: How it was run: workers, cores, wall seconds.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the trials and the rows computed from them, as plain data."""
        return {
            "schema": EVIDENCE_JSON_VERSION,
            "run": self.run,
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            "trials": list(self.trials),
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text, a row or trial a line, without NaN; what is missing is null."""
        parts = []
        for key, value in self.to_dict().items():
            lines = [json.dumps(one, allow_nan=False) for one in (value if isinstance(value, list) else [value])]
            text = ",\n  ".join(lines)
            parts.append(f"{json.dumps(key)}: {f'[{chr(10)}  {text}{chr(10)} ]' if isinstance(value, list) else text}")
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the evidence that ``to_json`` wrote; what follows from the trials is computed again.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            data = json.loads(text, parse_constant=_refuse_nonfinite_json_constant)
            if data["schema"] != EVIDENCE_JSON_VERSION:
                raise ValueError(f"schema {data['schema']}, this version reads {EVIDENCE_JSON_VERSION}")
            trials = tuple(data["trials"])
            for record in trials:
                check_trial_record(record)
            if missing := _RUN_FIELDS - dict(data["run"]).keys():
                raise ValueError(f"its run has no {', '.join(sorted(missing))}")
            found = cls(trials=trials, run=data["run"])
            if not found.tasks():
                raise ValueError(f"it has no trial of {REFERENCE_RECIPE}")
            found.rows()
            return found
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise ValueError(f"not the JSON of a comparison: {error}") from None

    def table(self) -> str:
        """Return the rows as text, one table per task."""
        return format_tables(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with the table and the curves.

        Raises:
            ValueError: jinja2 or matplotlib is missing, or the file cannot be written.
        """
        write_file_atomically(path, render_comparison_page(self))

    def __str__(self) -> str:
        return self.table()
