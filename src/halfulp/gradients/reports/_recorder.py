"""Recorder: writes the exponents and measurements of measured iterations to a file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ...sinks import Outlet, RowFile
from ._last_step import LastStep
from ._site_table import SiteTable

_COLUMNS = (
    *("iteration", "applied", "reason", "site", "exponent", "received", "passed", "weight"),
    *("zero", "subnormal", "format", "overflows"),
)


class Recorder:
    """Appends one JSON line per measured iteration, or one CSV line per site and measured iteration.

    A disk that is full ends the record with a warning, and the training goes on.

    Args:
        path: ``.jsonl`` or ``.csv``; an existing file is continued.

    Raises:
        ValueError: another ending, a file that cannot be written, or a CSV of other columns.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = RowFile(path, _COLUMNS)
        self._file.check()
        self.path: Path = Path(path)
        self._outlet = Outlet("the record of gradient exponents", self._write)

    def add(self, iteration: int, step: LastStep | None, table: SiteTable) -> None:
        """Write one iteration, at once, so that a killed run keeps what it had; nothing once closed."""
        if self._outlet.closed:
            return
        applied, reason = (step.applied, step.reason) if step else (None, "")
        self._outlet.put({"iteration": iteration, "applied": applied, "reason": reason, "sites": table})

    def _write(self, row: Any) -> None:
        table, common = row["sites"], {key: value for key, value in row.items() if key != "sites"}
        if not self._file.is_csv:
            self._file.write([{**common, **table.to_dict()}])
            return
        sites = [dataclasses.asdict(one) for one in table.rows]
        self._file.write([{**common, **site, **site["amax"]} for site in sites])

    def close(self) -> None:
        """End the record."""
        self._outlet.close()
