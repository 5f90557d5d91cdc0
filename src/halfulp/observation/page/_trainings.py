"""The trainings of a script that has several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...pages import Cell, Column, Table, count
from .._finding import SEVERITIES
from .._text import plural

_TONES = {"error": "bad", "warning": "open", "note": "quiet"}


def trainings_table(trainings: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row per training; without rows where there are not several.

    Args:
        trainings: as `Report.to_dict` gives them.
    """
    columns = [
        Column("training", numeric=True),
        Column("model"),
        Column("optimizer"),
        Column("steps", numeric=True),
        Column("errors and warnings"),
        Column("codes", minor=True),
        Column("beside", minor=True),
    ]
    rows = [_row(one) for one in trainings] if len(trainings) > 1 else []
    return Table("trainings", "The trainings of the script", columns, rows, "filter, as a model's name")


def shown_words(trainings: Sequence[Mapping[str, Any]]) -> str:
    """Return which training the rest of the page is of."""
    shown = [one["number"] for one in trainings if one["shown"]]
    if len(trainings) < 2 or not shown:
        return ""
    return (
        f"The script trained {len(trainings)} times. The findings are those of all; what follows this table is of "
        f"training {shown[0]}, the longest, and observe.json holds the others too."
    )


def _row(one: Mapping[str, Any]) -> list[Cell]:
    found = Counter(finding["severity"] for finding in one["findings"])
    worst = next((severity for severity in reversed(SEVERITIES) if found[severity]), None)
    said = [plural(found[severity], severity) for severity in ("error", "warning") if found[severity]]
    codes = dict.fromkeys(finding["code"] for finding in one["findings"])
    rank = -1 if worst is None else SEVERITIES.index(worst)
    return [
        Cell(str(one["number"]), sort=one["number"]),
        Cell(one["model"]),
        Cell(", ".join(one["optimizers"])),
        Cell(count(one["steps"]), sort=one["steps"]),
        Cell(", ".join(said) or "none", sort=rank, tone=_TONES.get(worst or "", "good")),
        Cell(", ".join(codes) or "–"),
        Cell(", ".join(map(str, one["overlaps"])) or "–"),
    ]
