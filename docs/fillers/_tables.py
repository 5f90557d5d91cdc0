"""Markdown tables, of rows and of the files that benchmarks wrote. A file that is not there yet gives no text."""

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of figures are right-aligned."""
    figures = [all(re.match(r"[(<+−-]*\d|–?$|emulated", row[i]) for row in rows) for i in range(len(headers))]
    align = " | ".join("---:" if right else "---" for right in figures)
    lines = [f"| {' | '.join(headers)} |", f"| {align} |", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def measured(name: str) -> Any:
    """What a benchmark wrote, as a `benchmarks._results.Result`; None where it did not."""
    from benchmarks._results import load

    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return load(path) if path.exists() else None


def _table(name: str, title: str) -> Any:
    """The table of a benchmark whose title starts as given; None where there is none."""
    result = measured(name)
    return next((table for table in result.tables if table.title.startswith(title)), None) if result else None


def paragraph(text: str) -> str:
    """Text in lines of 120 characters."""
    return textwrap.fill(text, 120, break_on_hyphens=False)


def benchmark_table(
    name: str, title: str, columns: Sequence[str], keep: Callable[[dict], bool] = lambda row: True
) -> str:
    """Some columns of the table of a benchmark whose title starts as given."""
    table = _table(name, title)
    if table is None:
        return ""
    shown = [column for column in columns if column in table.columns]
    rows = [[table.text(row, column).replace("|", "\\|") for column in shown] for row in table.rows if keep(row)]
    return grid([column.replace("|", "\\|") for column in shown], rows)


def whole_table(name: str, title: str) -> str:
    """The whole table of a benchmark whose title starts as given, and its note if it has one."""
    table = _table(name, title)
    if table is None:
        return ""
    return "\n\n".join(filter(None, [benchmark_table(name, title, list(table.columns)), paragraph(table.note)]))


def benchmark_rows(name: str, title: str) -> list[dict]:
    """The rows of a benchmark's table whose title starts as given."""
    table = _table(name, title)
    return table.rows if table else []


def all_tables(name: str) -> str:
    """All tables of a benchmark, each under its title."""
    result = measured(name)
    tables = [table for table in result.tables if table.rows] if result else []
    return "\n\n".join(
        f"{table.title}:\n\n" + benchmark_table(name, table.title, list(table.columns)) for table in tables
    )


def text_and_note(name: str, end: str = "") -> str:
    """A benchmark's text and the note of its first table."""
    result = measured(name)
    return paragraph(f"{result.text} {result.tables[0].note}{end}") if result else ""
