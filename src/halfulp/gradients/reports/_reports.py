"""SiteReports: a scaler's tables of its sites, and their records in files."""

from __future__ import annotations

import os

from .._controller import Controller
from ._recorder import Recorder
from ._site_table import SiteTable


class SiteReports:
    """The methods of a scaler that report its sites."""

    _controller: Controller
    _recorders: list[Recorder]

    def sites(
        self, pattern: str | None = None, *, kind: str | None = None, sort: str | None = None, limit: int | None = None
    ) -> SiteTable:
        """Every gradient's exponent and what was measured there last; ``print`` it for a table.

        Args:
            pattern: Only sites of this name, or in the module of this name; ``*``, ``?`` and ``[...]`` stand for other
                characters, as in file names.
            kind: Only gradients that are "received", "passed" on, or a "weight"'s, and sites where these were measured.
            sort: The worst first: "underflow", "margin" (to overflow), "overflows", "exponent", or by name, "site".
            limit: Only so many of these.

        Raises:
            ValueError: an unknown kind or order, or a limit below 1.
        """
        return SiteTable.of(self._controller.sites, pattern, kind=kind, sort=sort, limit=limit)

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Start writing ``sites()`` and ``last_step`` to a ``.jsonl`` or ``.csv`` file at each measured iteration.

        Returns:
            The recorder, whose ``close()`` ends it.

        Raises:
            ValueError: another ending, or a file that cannot be written.
        """
        recorder = Recorder(path)
        self._recorders.append(recorder)
        return recorder
