"""The benchmarks as a whole: which bars were missed, and which page has what."""

import re
from typing import Any

from ._places import place
from ._tables import grid


def _slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _page(area: str, title: str, heading: str = "") -> str:
    anchor = f"#{_slug(heading)}" if heading else ""
    return f"[{title}](benchmarks/{area}.md{anchor})"


def _label(table: Any, row: dict) -> str:
    """The words that a row starts with: up to three, no figures among them but the first."""
    words = []
    for column in table.columns:
        value = row.get(column)
        if len(words) == 3 or (words and not isinstance(value, str)) or column in ("bar", "met"):
            break
        words.append(table.text(row, column))
    return " ".join(words)


@place
def bars_in_short() -> str:
    """How many bars are met, in a sentence."""
    from benchmarks import tables

    rows = tables.judged([result for results in tables.areas().values() for result in results])
    missed = sum(tables.is_missed(row) for _, _, row in rows)
    return f"{len(rows) - missed:,} of {len(rows):,} bars are met, {missed} are missed."


@place
def missed_bars() -> str:
    """Every missed bar, by table."""
    from benchmarks import tables

    lines = []
    for area, results in tables.areas().items():
        found: dict[str, list] = {}
        for _, table, row in tables.judged(results):
            found.setdefault(table.title, []).append((table, row))
        for title, pairs in found.items():
            missed = [(table, row) for table, row in pairs if tables.is_missed(row)]
            if not missed:
                continue
            bars = dict.fromkeys(row["bar"] for _, row in missed if row.get("bar"))
            labels = "; ".join(dict.fromkeys(_label(table, row) for table, row in missed))
            cells = (_page(area, title, title), f"{len(missed)} of {len(pairs)}", "; ".join(bars), labels)
            lines.append([cell.replace("|", "\\|") for cell in cells])
    return grid(["table", "missed", "bar", "rows that miss it"], lines)


@place
def benchmark_pages() -> str:
    """The pages of measurements, what is on each, and how many of their bars are met."""
    from benchmarks import tables

    lines = []
    for area, results in tables.areas().items():
        rows = tables.judged(results)
        met = sum(not tables.is_missed(row) for _, _, row in rows)
        titles = "; ".join(result.title for result in results)
        lines.append([_page(area, tables.AREAS[area][0]), titles, f"{met:,} of {len(rows):,}" if rows else "none"])
    return grid(["page", "what is measured", "bars met"], lines)
