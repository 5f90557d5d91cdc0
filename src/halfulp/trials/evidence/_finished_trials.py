"""FinishedTrials: the records of a comparison's trials, and the rows computed from them."""

import dataclasses
from typing import Any

from ._row import Record, Row, rows


@dataclasses.dataclass(frozen=True)
class FinishedTrials:
    """Every trial of a comparison with its settings, and how it was run.

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
