"""Evidence: the results of a comparison, as a table, a page and JSON."""

import dataclasses
import json
import os
from typing import Any, ClassVar, Self

from ...pages import write_whole
from ._page import render_page
from ._row import FinishedTrials, check_record
from ._table import format_tables

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Evidence(FinishedTrials):
    """The results of ``compare``: every trial with its settings, and how it was run.

    Args:
        trials: One record per trial, ``{"settings": ..., "result": ...}``, plain data.
        run: How it was run: workers, cores, wall seconds.
    """

    stem: ClassVar[str] = "compare"
    kind: ClassVar[str] = "comparison"

    def to_dict(self) -> dict[str, Any]:
        """Return the trials and the rows computed from them, as plain data."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            "trials": list(self.trials),
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text without NaN or infinities; what is missing is null."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the evidence that ``to_json`` wrote; what follows from the trials is computed again.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}, this version reads {SCHEMA}")
            trials = tuple(cls._read_trials(data))
            for record in trials:
                check_record(record)
            return cls(trials=trials, run=data["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not the JSON of a {cls.kind}: {error}") from None

    @classmethod
    def _read_trials(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the records of trials from what ``to_dict`` gave."""
        trials: list[dict[str, Any]] = data["trials"]
        return trials

    def table(self) -> str:
        """Return the rows as text, one table per task."""
        return format_tables(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with the table and the curves.

        Raises:
            ValueError: jinja2 or matplotlib is missing, or the file cannot be written.
        """
        write_whole(path, render_page(self))

    def __str__(self) -> str:
        return self.table()
