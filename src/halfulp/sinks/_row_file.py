"""RowFile: a .jsonl or .csv file that rows are appended to, each at once."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".csv")


class RowFile:
    """A file of rows: a JSON object per line, or a line of CSV each under a header.

    The file is open only while rows are written, unbuffered, so that a run that is killed keeps all rows of before and
    a full disk leaves nothing behind. Rows go behind those that are there. A line that a killed run left without an end
    stays a line of its own.

    Args:
        path: ending in .jsonl or .csv.
        columns: names of the CSV's columns; other entries of a row are left out, entries that a row lacks stay empty.
        anew: whether the first write begins the file anew.

    Raises:
        ValueError: another ending.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = RowFile(Path(folder, "seen.jsonl"), ())
    ...     file.write([{"step": 0, "loss": math.nan}, {"step": 50, "loss": 1.5}])
    ...     print(file.path.read_text(encoding="utf-8"), end="")
    {"step": 0, "loss": "nan"}
    {"step": 50, "loss": 1.5}
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], anew: bool = False) -> None:
        self.path: Path = Path(path).absolute()  # a script may change to another folder
        if self.path.suffix not in SUFFIXES:
            raise ValueError(f"rows are written to a .jsonl or a .csv file, got {str(path)!r}")
        self.columns: tuple[str, ...] = tuple(columns)
        self._given: str = str(path)
        self._anew = anew

    @property
    def is_csv(self) -> bool:
        """Whether it is a CSV file."""
        return self.path.suffix == ".csv"

    def check(self) -> None:
        """Check, before any work, that rows can be appended; nothing is written.

        Raises:
            ValueError: it is a folder, the file or its folder is missing or not writable, or the file holds a CSV of
                other columns.
        """
        held: list[str] | None = None
        try:
            if not self.path.exists():
                with tempfile.TemporaryFile(dir=self.path.parent):
                    return
            with open(self.path, "ab"):
                pass
            if self.is_csv and self.path.is_file() and not self._anew:
                with open(self.path, newline="", encoding="utf-8") as file:
                    held = next(csv.reader(file), None)
        except OSError as error:
            raise ValueError(f"cannot write {self._given!r}: {error.strerror}; give another path") from None
        except (csv.Error, UnicodeDecodeError):
            held = []
        if held is not None and held != list(self.columns):
            raise ValueError(f"{self._given!r} holds a CSV of other columns: give another path, or a .jsonl file")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows.

        Raises:
            OSError: a full disk, a folder that is gone.
        """
        with open(self.path, "wb" if self._anew else "ab", buffering=0) as file:
            self._anew = False
            at_begin = not file.tell()
            text = "" if at_begin or _ends_line(self.path) else "\n"
            if self.is_csv and at_begin:
                text += _csv_line(self.columns)
            data = (text + "".join(map(self._line, rows))).encode()
            while data:
                data = data[file.write(data) :]

    def _line(self, row: Mapping[str, Any]) -> str:
        if self.is_csv:
            return _csv_line([row.get(column) for column in self.columns])
        return json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return plain data with "nan", "inf" and "-inf" for the numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _csv_line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
