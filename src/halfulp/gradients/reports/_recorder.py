"""Recorder: writes the exponents and measurements of measured iterations to a file."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ._last_step import LastStep
from ._site_table import SiteTable

_COLUMNS = (
    *("iteration", "applied", "reason", "site", "exponent", "received", "passed", "weight"),
    *("zero", "subnormal", "format", "overflows"),
)


class Recorder:
    """Appends one JSON line per measured iteration, or one CSV line per site and measured iteration.

    Args:
        path: ``.jsonl`` or ``.csv``; an existing file is continued.

    Raises:
        ValueError: another ending, or a file that cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        if self.path.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"a record is written to a .jsonl or a .csv file, got {str(path)!r}")
        try:
            self._file = self.path.open("a", newline="")
        except OSError as error:
            raise ValueError(f"cannot write the record {str(path)!r}: {error.strerror}; give another path") from None
        if self.path.suffix == ".csv" and not self._file.tell():
            self._write(_COLUMNS)

    def add(self, iteration: int, step: LastStep | None, table: SiteTable) -> None:
        """Write one iteration, at once, so that a killed run keeps what it had; nothing once closed."""
        if self._file.closed:
            return
        applied, reason = (step.applied, step.reason) if step else (None, "")
        if self.path.suffix == ".jsonl":
            line: dict[str, Any] = {"iteration": iteration, "applied": applied, "reason": reason, **table.to_dict()}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        else:
            for row in table.rows:
                data = dataclasses.asdict(row)
                amax = data.pop("amax")
                values = {"iteration": iteration, "applied": applied, "reason": reason, **data, **amax}
                self._write([values[column] for column in _COLUMNS])
        self._file.flush()

    def _write(self, values: Any) -> None:
        csv.writer(self._file).writerow(values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
