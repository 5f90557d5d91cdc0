"""Words of error messages: a class with its article, lists of names, missing and unknown ones; where warnings point."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

_MOST_LISTED = 5
# Packages whose lines no user wrote.
_PACKAGES_WITHOUT_USER_CODE = {"halfulp", "torch", "contextlib"}
# Ends the message of whatever a platform, a device, a version or a missing package is to blame for.
ENV_HINT = "`halfulp env` prints what there is, and what a report needs"


def name_type(given: object) -> str:
    """Return the class's name of an object with its article, for messages.

    >>> name_type(3), name_type({}), name_type(None)
    ('an int', 'a dict', 'None')
    """
    if given is None:
        return "None"
    name = type(given).__name__
    # Abbreviations are read letter by letter: an LSTM, an MCTensor, a GRU.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "aeioAEIO"
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


def quote(names: Iterable[object]) -> str:
    """Return names as a sentence's list, shortened if there are many.

    >>> quote(["a", "b"]), quote("abcdefg")
    ("'a', 'b'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    names = list(names)
    rest = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(map(repr, names[:_MOST_LISTED])) + rest


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns.

    >>> align_columns([("name", "bits"), ("e4m3fn", "8")])
    ['name    bits', 'e4m3fn  8']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def write_differing_names(missing: Iterable[object], unknown: Iterable[object]) -> str:
    """Return the words for the names that a file lacks and those that it has in excess.

    >>> write_differing_names(["a"], []), write_differing_names(["a"], ["b"])
    ("lacks 'a'", "lacks 'a' and has the unknown 'b'")
    """
    lacks = [f"lacks {quote(missing)}"] if missing else []
    return " and ".join(lacks + ([f"has the unknown {quote(unknown)}"] if unknown else []))


def get_first_line_of_error(error: object) -> str:
    """Return the first line of an error's message; "" of one that has none.

    >>> get_first_line_of_error(ValueError("no such task", )), get_first_line_of_error(KeyboardInterrupt())
    ('no such task', '')
    """
    return str(error).strip().partition("\n")[0]


def find_user_stack_level() -> int:
    """Return the `stacklevel` by which warnings.warn, called in the same line, points at the user's line.

    That is the innermost one outside this package and torch, whose hooks and decorators stand between.
    """
    frame, level = sys._getframe(1), 1
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES_WITHOUT_USER_CODE
    ):
        frame, level = frame.f_back, level + 1
    return level
