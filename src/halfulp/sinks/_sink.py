"""Sinks: where rows of numbers go while a run goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .._messages import name_type

Row = Mapping[str, Any]


class GuardedSink:
    """Gives rows to a function until it raises; then it is closed, and `failure` says why.

    Args:
        name: what it is called in that sentence.
        write: takes a row.

    Attributes:
        failure: how it ended, without the words of the error, which may hold paths; None while it works.

    >>> def full(row):
    ...     raise OSError(28, "No space left on device")
    >>> outlet = GuardedSink("the file", full)
    >>> with warnings.catch_warnings(record=True):
    ...     outlet.put({"step": 3})
    >>> outlet.failure
    'the file gets no more rows: it raised OSError (No space left on device) at step 3'
    """

    def __init__(self, name: str, write: Callable[[Row], object]) -> None:
        self.name: str = name
        self._write = write
        self.failure: str | None = None

    def put(self, row: Row) -> None:
        """Write a row to the sink, unless closed; an error of the sink becomes a warning."""
        if self.failure is not None:
            return
        try:
            self._write(row)
        except Exception as error:
            reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
            at = f" at step {row['step']}" if "step" in row else ""
            self.failure = f"{self.name} gets no more rows: it raised {type(error).__name__}{reason}{at}"
            more = "" if reason or not str(error) else f": {error}"
            with contextlib.suppress(Warning):  # where warnings are errors the training goes on too
                warnings.warn(f"halfulp: {self.failure}{more}; the training goes on", RuntimeWarning, stacklevel=2)


class JsonLinesFile:
    """A file of rows, a JSON object per line.

    The file is open only while a row is written, so that a run that is killed keeps all rows of before. Rows go behind
    those that are there, unless the first write is to `overwrite` it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = JsonLinesFile(Path(folder, "seen.jsonl"))
    ...     file.write({"step": 0, "loss": math.nan})
    ...     file.write({"step": 50, "loss": 1.5})
    ...     print(file.path.read_text(encoding="utf-8"), end="")
    {"step": 0, "loss": "nan"}
    {"step": 50, "loss": 1.5}
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        self.path: Path = Path(path).absolute()  # a script may change to another folder
        if self.path.suffix != ".jsonl":
            raise ValueError(
                f"rows are written to a .jsonl file, got {str(path)!r}; pandas.read_json(..., lines=True) reads it"
            )
        self._mode = "w" if overwrite else "a"

    def check(self) -> None:
        """Check, before any work, that rows can be appended; nothing is written."""
        try:
            if not self.path.exists():
                with tempfile.TemporaryFile(dir=self.path.parent):
                    return
            self.path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ValueError(f"cannot write {str(self.path)!r}: {error.strerror}; give another path") from None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; a full disk, or a folder that is gone, is an OSError."""
        text = json.dumps(replace_nonfinite_by_strings(row), ensure_ascii=False, allow_nan=False)
        with open(self.path, self._mode, encoding="utf-8") as file:
            self._mode = "a"
            file.write(f"{text}\n")


def replace_nonfinite_by_strings(value: Any) -> Any:
    """Return plain data with "nan", "inf" and "-inf" for the numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: replace_nonfinite_by_strings(item) for key, item in value.items()}
    return [replace_nonfinite_by_strings(item) for item in value] if isinstance(value, list | tuple) else value


# A path, a function of a dict, an GuardedSink, or a logger with `add_scalar`, `log` or `log_metrics`.
Sink: TypeAlias = Any


def make_guarded_sink(sink: Sink, check: bool = True) -> GuardedSink:
    """Return the outlet of a sink, whose rows have a "step"; check that a file can be written.

    >>> make_guarded_sink(print).put({"step": 3})
    {'step': 3}
    """
    if isinstance(sink, GuardedSink):
        return sink
    if isinstance(sink, str | os.PathLike):
        file = JsonLinesFile(sink)
        if check:
            file.check()
        return GuardedSink("the file of JSON lines", file.write)
    name = f"the {type(sink).__name__}"
    if callable(add := getattr(sink, "add_scalar", None)):  # before the others: a SummaryWriter may have more than one

        def add_scalars(row: Row) -> None:
            for key, value in _name_row_entries_for_loggers(row).items():
                if key != "halfulp/step":
                    add(key, value, row["step"])

        return GuardedSink(name, add_scalars)
    log = next((log for log in (getattr(sink, "log", None), getattr(sink, "log_metrics", None)) if callable(log)), None)
    if log is not None:
        return GuardedSink(name, lambda row: log(_name_row_entries_for_loggers(row), step=row["step"]))
    if callable(sink):
        return GuardedSink("the function", lambda row: sink(dict(row)))
    raise TypeError(
        "a sink is a path that ends in .jsonl, a SummaryWriter (add_scalar), a run whose log or log_metrics takes a "
        f"dict and step=, or a function of a dict; got {name_type(sink)}"
    )


def _name_row_entries_for_loggers(row: Row) -> dict[str, Any]:
    """Return a row under the names for loggers, without the entries that are None."""
    return {f"halfulp/{key}": value for key, value in row.items() if value is not None}
