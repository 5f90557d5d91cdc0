"""Outlet: what writes a row somewhere, and stops with a warning where that fails, so that a training goes on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]


class Outlet:
    """Gives rows to a function until it raises; then it is closed, and `said` says why.

    Args:
        name: what it is called in that sentence.
        write: takes a row.

    Attributes:
        said: how it ended, without the words of the error, which may hold paths; None while it works.

    >>> def full(row):
    ...     raise OSError(28, "No space left on device")
    >>> outlet = Outlet("the CSV file", full)
    >>> with warnings.catch_warnings(record=True):
    ...     outlet.put({"step": 3})
    >>> outlet.said
    'the CSV file gets no more rows: it raised OSError (No space left on device) at step 3'
    """

    def __init__(self, name: str, write: Callable[[Row], object]) -> None:
        self.name = name
        self._write: Callable[[Row], object] | None = write
        self.said: str | None = None

    @property
    def closed(self) -> bool:
        """Whether it takes no more rows."""
        return self._write is None

    def put(self, row: Row) -> None:
        """Give a row; nothing once closed. An error of what takes it is a warning."""
        if self._write is None:
            return
        try:
            self._write(row)
        except Exception as error:
            self._write = None
            reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
            at = f" at step {row['step']}" if "step" in row else ""
            self.said = f"{self.name} gets no more rows: it raised {type(error).__name__}{reason}{at}"
            more = "" if reason or not str(error) else f": {error}"
            with contextlib.suppress(Warning):  # where warnings are errors the training goes on too
                warnings.warn(f"halfulp: {self.said}{more}; the training goes on", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Take no more rows."""
        self._write = None
