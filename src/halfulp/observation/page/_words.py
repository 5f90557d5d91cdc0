"""Words that the pages share."""

from __future__ import annotations

from ... import __version__, formats


def dtype_word(dtype: str | None) -> str:
    """Return the short name of a dtype given by torch's.

    >>> dtype_word("bfloat16"), dtype_word("int8"), dtype_word(None)
    ('bf16', 'int8', '–')
    """
    if dtype is None:
        return "–"
    try:
        return formats.get(dtype).name
    except ValueError:
        return dtype


def versions() -> str:
    """Return what made the page."""
    return f"halfulp {__version__}"
