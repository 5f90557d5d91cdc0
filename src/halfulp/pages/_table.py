"""Tables for a page: columns, cells with what they sort by, and the words for numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: what it shows.
        sort: what it sorts by; None is its text, "" stands last.
        bar: length of a bar beneath, from 0 to 1.
        tone: "bad", "open", "good" or "quiet" makes a chip of the text.
        small: a second line.
        title: a tooltip.
    """

    text: str
    sort: float | str | None = None
    bar: float | None = None
    tone: str = ""
    small: str = ""
    title: str = ""


@dataclass(frozen=True)
class Column:
    """One column: its header, whether it holds numbers, whether a narrow screen goes without it."""

    title: str
    numeric: bool = False
    minor: bool = False


@dataclass(frozen=True)
class Table:
    """A table that sorts and filters.

    Attributes:
        key: its id on the page.
        caption: what it is, for who does not see the heading.
        columns, rows: cells by column; the first is the row's header.
        hint: what the filter field suggests to type.
    """

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)
    hint: str = "filter"


def share(part: float | None) -> str:
    """Return a share from 0 to 1 as per cent, never rounded to a 0 or 100 that it is not.

    >>> share(0.0), share(1e-6), share(0.1234), share(0.99999), share(1.0), share(1.1234), share(None)
    ('0%', '<0.01%', '12.3%', '>99.9%', '100%', '112.3%', '–')
    """
    if part is None:
        return DASH
    if 0 < part < 1e-4:
        return "<0.01%"
    if 0.999 < part < 1:
        return ">99.9%"
    digits = f"{100 * part:.{1 if part >= 0.01 else 2}f}"
    return f"{digits.rstrip('0').rstrip('.')}%"


def count(number: float | None) -> str:
    """Return a count with its thousands apart.

    >>> count(1234567), count(None)
    ('1,234,567', '–')
    """
    return DASH if number is None else f"{number:,}"


def number(value: float | str | None, digits: int = 3) -> str:
    """Return a number in few digits; words stand as they are.

    >>> number(3e-5), number(0.25), number("inf"), number(None), number(12)
    ('3e-05', '0.25', 'inf', '–', '12')
    """
    if value is None:
        return DASH
    return value if isinstance(value, str) else f"{value:.{digits}g}"
