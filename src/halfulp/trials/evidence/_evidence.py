"""Evidence: the finished trials of a comparison, and everything that is read off them."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ._row import Record, Row, check, rows

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What ``compare`` found: every trial with its settings, and how it was run.

    Args:
        trials: One record per trial, ``{"settings": ..., "result": ...}``, plain data.
        run: How it was run: workers, cores, wall seconds.
    """

    trials: tuple[Record, ...]
    run: dict[str, Any]

    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(dict.fromkeys(record["settings"]["task"]["name"] for record in self.trials))

    def of_task(self, task: str) -> list[Record]:
        """The trials of one task."""
        return [record for record in self.trials if record["settings"]["task"]["name"] == task]

    def rows(self, task: str | None = None) -> list[Row]:
        """One row per recipe, of one task or of all."""
        chosen = self.tasks() if task is None else [task]
        return [row for name in chosen for row in rows(name, self.of_task(name))]

    def row(self, task: str, recipe: str) -> Row:
        """The row of one recipe on one task.

        Raises:
            ValueError: it was not among those compared.
        """
        for row in self.rows(task):
            if row.recipe == recipe:
                return row
        raise ValueError(f"no trial of recipe {recipe!r} on task {task!r} in this evidence")

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the trials, and the rows computed from them."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            "trials": list(self.trials),
        }

    def to_json(self) -> str:
        """``to_dict`` as JSON text without NaN or infinities; what is missing is null."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Evidence":
        """The evidence that ``to_json`` wrote; the rows are computed again from the trials.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}, this version reads {SCHEMA}")
            for record in data["trials"]:
                check(record)
            return cls(trials=tuple(data["trials"]), run=data["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not the JSON of a comparison: {error}") from None

    def table(self) -> str:
        """The rows as text, one table per task."""
        from ._table import text

        return text(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with the table and the curves.

        Raises:
            ValueError: jinja2 or matplotlib is missing, or the file cannot be written.
        """
        from ..page._page import html
        from ..running._store import write

        write(Path(path), html(self))

    def __str__(self) -> str:
        return self.table()
