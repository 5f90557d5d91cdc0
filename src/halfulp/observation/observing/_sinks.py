"""The sinks of an observation: rank 0 alone gives them rows, and one that fails is named in the record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ..._messages import a_kind
from ...sinks import Outlet, Sink, outlet
from .._record import StepRecord
from ._notebook import Notebook
from ._rows import Rows


class Sinks:
    """Gives each sink a row of every sampled step.

    Args:
        book: of the observation.
        given: the sinks.

    Raises:
        TypeError: a sink that can take no rows.
        ValueError: a path that cannot be written.
    """

    def __init__(self, book: Notebook, given: Sequence[Sink]) -> None:
        self._book = book
        self._rows = Rows(book.record)
        # Of several processes the others may see another disk.
        self._outlets: list[Outlet] = [outlet(sink, self._rows.columns, check=is_first()) for sink in given]

    def put(self, step: StepRecord) -> None:
        """Give a sampled step that has ended to all sinks that still take rows."""
        if not self._outlets or not is_first():
            return
        row = self._rows.row(step, self._book.totals)
        for one in self._outlets:
            one.put(row)
            if one.said is not None:
                self._book.missed(f"rows of the steps: {one.said}")
        self._outlets = [one for one in self._outlets if not one.closed]


def checked_sinks(given: Any) -> Sequence[Sink]:
    """Return the sinks as a list.

    Raises:
        TypeError: it is none.
    """
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        raise TypeError(f"sinks= takes a list of sinks, got {a_kind(given)}: put it into a list, sinks=[...]")
    return list(given)


def is_first() -> bool:
    """Return whether this process is the first of those that train together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")
