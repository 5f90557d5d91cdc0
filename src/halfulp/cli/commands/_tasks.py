"""halfulp tasks: the jobs that recipes are compared on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._output import Json, console, plain_table, print_json

if TYPE_CHECKING:
    from ...trials.tasks import Task


def tasks(json: Json = False) -> None:
    """Print the tasks that recipes can be compared on."""
    from ...trials.tasks import kind_of, names

    rows = [_row(kind_of(name)) for name in names()]
    if json:
        print_json(rows)
        return
    table = plain_table(["task", "what it is", "steps", "judged by", "data"], right=["steps"], fold=["what it is"])
    for row in rows:
        data = "--data DIR" if row["needs_data"] else "embedded"
        table.add_row(row["name"], row["title"], f"{row['steps']:,}", row["judged_by"].replace("_", " "), data)
    console().print(table)


def _row(kind: type[Task]) -> dict[str, Any]:
    return {
        "name": kind.name,
        "title": kind.title,
        "steps": kind.steps,
        "judged_by": kind.judged_by,
        "needs_data": "data" in getattr(kind, "__dataclass_fields__", {}),
    }
