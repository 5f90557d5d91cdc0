"""HTML pages: one engine for templates, tables, and files written whole."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


def write_file_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file whole or not at all: a temporary file beside it, then a rename; raises ValueError if not.

    A link is followed, and what is no regular file (a pipe, a terminal) is written as it is.
    """
    path = Path(path)
    real = path.resolve()
    temporary = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    try:
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
            return
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, real)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, before any work, unless a file can be written at a path; nothing is left there."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; give the name of a file in it")
    try:
        if _is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError("it is not writable")
            return
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}; give another file") from None


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file()


MISSING_VALUE_TEXT = "–"


class Cell(NamedTuple):
    """One cell of a table."""

    text: str
    sort: float | str | None = None  # what it sorts by; None is its text, "" stands last
    bar: float | None = None  # length of a bar beneath, from 0 to 1
    tone: str = ""  # "bad", "open", "good" or "quiet" makes a chip of the text
    title: str = ""  # a tooltip


class Table(NamedTuple):
    """A table of a page, which readers can sort and filter."""

    key: str  # its id on the page
    caption: str  # for who does not see the heading
    columns: list[tuple[str, str]]  # header; "number", "minor" (a narrow screen goes without it), both or neither
    rows: list[list[Cell]]  # by column; the first cell is the row's header
    hint: str  # what the filter field suggests to type


def make_table(
    key: str,
    caption: str,
    items: Iterable[Any],
    columns: Sequence[tuple[str, str, Callable[[Any], Cell]]],
    hint: str = "filter",
) -> Table:
    """Make a table with a row per item, of columns that also say how an item's cell is made.

    >>> make_table("t", "Two", [1, 2], [("half", "number", lambda one: Cell(f"{one / 2}"))]).rows[1][0].text
    '1.0'
    """
    heads = [(title, marks) for title, marks, _ in columns]
    return Table(key, caption, heads, [[make_cell(one) for _, _, make_cell in columns] for one in items], hint)


def format_share(part: float | None) -> str:
    """Return a share from 0 to 1 as per cent, never rounded to a 0 or 100 that it is not.

    >>> format_share(0.0), format_share(1e-6), format_share(0.1234), format_share(0.99999), format_share(None)
    ('0%', '<0.01%', '12.3%', '>99.9%', '–')
    """
    if part is None:
        return MISSING_VALUE_TEXT
    if 0 < part < 1e-4:
        return "<0.01%"
    if 0.999 < part < 1:
        return ">99.9%"
    digits = f"{100 * part:.{1 if part >= 0.01 else 2}f}"
    return f"{digits.rstrip('0').rstrip('.')}%"


def format_count(number: float | None) -> str:
    """Return a count with its thousands apart.

    >>> format_count(1234567), format_count(None)
    ('1,234,567', '–')
    """
    return MISSING_VALUE_TEXT if number is None else f"{number:,}"


def format_number(value: float | str | None, digits: int = 3) -> str:
    """Return a number in few digits; words stand as they are.

    >>> format_number(3e-5), format_number(0.25), format_number("inf"), format_number(None), format_number(12)
    ('3e-05', '0.25', 'inf', '–', '12')
    """
    if value is None:
        return MISSING_VALUE_TEXT
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def require_page_packages(*modules: str, instead: str = "write no page") -> None:
    """Raise ValueError, before any work, unless jinja2 and other modules of a page are there; say what else to do."""
    for name in ("jinja2", *modules):
        try:
            importlib.import_module(name)
        except ImportError:
            raise ValueError(f"the page needs {name}: pip install 'halfulp[cli]', or {instead}") from None


def render_template(package: str, template: str, **values: Any) -> str:
    """Return a page of a template in a package's folder as text; values are escaped unless the template says otherwise.

    The template extends "base.html.j2". It may call ``source(name)`` for a style sheet or script, of its own folder or
    of the base; ``data | tojson`` is plain data as JSON inside a script element.
    """
    require_page_packages()
    import jinja2
    from markupsafe import Markup

    def read_source(name: str) -> str:
        own = importlib.resources.files(package).joinpath(name)
        return (own if own.is_file() else importlib.resources.files(__package__).joinpath(name)).read_text("utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_source), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["source"] = lambda name: Markup(read_source(name).rstrip("\n"))
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template(template).render(**values)
