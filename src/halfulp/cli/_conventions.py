"""What all commands share: lists of names in options, tables, and the folder of pages and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..pages import check_writable, require_page_packages, write_file_atomically
from ._errors import escape_control_characters, print_json

if TYPE_CHECKING:
    from ..observation.page import InstrumentName


def describe_names_option(kind: str, default: Sequence[str]) -> str:
    """Return the help text of an option that takes several names."""
    return f"{kind}, separated by commas or one option each. Default: {', '.join(default)}"


def split_names(given: list[str] | None, default: Sequence[str]) -> list[str]:
    """Split ``["a,b", "c"]`` into ``["a", "b", "c"]``; return the default for an empty list.

    >>> split_names(["digits, text", "cifar10"], ["text"]), split_names(None, ["text"])
    (['digits', 'text', 'cifar10'], ['text'])
    """
    if given is None:
        return list(default)
    return [name.strip() for part in given for name in part.split(",") if name.strip()]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program in place of tables.")]


@contextlib.contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Send what a script and its processes print in a block to stderr, so that stdout has JSON alone."""
    if sys.stdout is None:
        raise ValueError("--json writes to standard output, which is closed: give it a file or a pipe")
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


def make_stdout_console() -> Any:
    """Return rich's console of standard output, as wide as the terminal, and where there is none, as any table."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=1000)


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], styles: Sequence[str] = (), cut: int | None = None
) -> None:
    """Print a table with a style of rich per row; `cut` columns stand in a first table where one is too wide."""
    from rich.table import Table

    cells = [[_format_cell(cell) for cell in row] for row in rows]
    console, table = make_stdout_console(), Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header, column in zip(headers, zip(*cells)):
        is_number = all(cell[:1] in "0123456789+−(–" for cell in column)
        table.add_column(header, justify="right" if is_number else "left", no_wrap=is_number)
    for place, row in enumerate(cells):
        table.add_row(*row, style=styles[place] if styles else None)
    if cut and console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        for part in (slice(0, cut), slice(cut, None)):
            chosen = [[row[0], *row[part]] if part.start else row[part] for row in (headers, *cells)]
            print_table(chosen[0], chosen[1:], styles)
    else:
        console.print(table)


def _format_cell(cell: Any) -> str:
    """Return a value as a table's text.

    >>> _format_cell(True), _format_cell(1 / 3), _format_cell(1500), _format_cell(None), _format_cell("bf16")
    ('yes', '0.3333', '1,500', '–', 'bf16')
    """
    if cell is None or isinstance(cell, bool):
        return {None: "–", True: "yes", False: "no"}[cell]
    return f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)


OutFolderOption = Annotated[str | None, typer.Option(help="Folder for the page and the JSON, named after the command.")]


def prepare_out_folder(out: str | None, name: InstrumentName | Literal["compare-script"]) -> None:
    """Create the output folder and check, before any work, that a page can be written into it."""
    if out is None:
        return
    if out.endswith((".html", ".json")) and not Path(out).is_dir():
        raise ValueError(f"--out {out} looks like a file: give a folder, and {name}.html and {name}.json stand in it")
    require_page_packages(instead="leave --out away")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror or error}; give another folder with --out") from None
    for ending in ("html", "json"):
        check_writable(Path(out, f"{name}.{ending}"))


def print_result(found: Any, as_json: bool) -> None:
    """Print what a command found, for a person or as JSON."""
    if as_json:
        print_json(found.to_dict())
    else:
        print(escape_control_characters(str(found)))


def write_page_and_json(out: str | None, name: InstrumentName, found: Any) -> None:
    """Write what an instrument found as NAME.html and NAME.json, each whole or not at all; without a folder nothing."""
    if out is None:
        return
    from ..observation.page import write_page

    content = found.to_dict()
    write_file_atomically(Path(out, f"{name}.json"), json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    write_page(name, content, Path(out, f"{name}.html"))
