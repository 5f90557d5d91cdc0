"""Output of commands: a table for a person, or with --json one JSON document on standard output."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from ._streams import print_json as print_json

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program in place of tables.")]


@contextlib.contextmanager
def print_elsewhere() -> Iterator[None]:
    """Send what a script and its processes print in a block to stderr, so that stdout has JSON alone."""
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 1)
            os.close(kept)


def make_console() -> Any:
    """Return a console as wide as the terminal, and wide enough for every column where there is none."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=200)


def make_plain_table(headers: Sequence[str], right: Sequence[str] = (), gap: int = 2, fold: Sequence[str] = ()) -> Any:
    """Return a table without lines, to which `add_row` adds.

    Args:
        headers: One per column.
        right: The headers of the columns that hold numbers.
        gap: How many spaces stand between columns.
        fold: The headers of columns whose text may go on in a next line.
    """
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=header not in fold)
    return table


def choose_style(verdict: str | None) -> str:
    """Return the colour of a verdict's line in a terminal.

    >>> choose_style("no difference"), choose_style("reference")
    ('green', '')
    """
    from ..trials._defaults import TONES

    return {"good": "green", "bad": "red", "open": "yellow"}.get(TONES.get(verdict or "", ""), "")


def format_cell(value: Any) -> str:
    """Return a value as a table's text.

    >>> format_cell(True), format_cell(1 / 3), format_cell(None), format_cell("bf16")
    ('yes', '0.3333', '–', 'bf16')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
