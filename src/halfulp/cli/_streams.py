"""Standard output and errors in encodings that lack letters, as Windows' for files and pipes."""

import json
import sys
from typing import Any


def write_any_letter() -> None:
    """Make outputs write a letter that their encoding lacks as its number, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def is_unicode(stream: object) -> bool:
    """Return whether an output can hold every letter.

    >>> import io
    >>> is_unicode(io.TextIOWrapper(io.BytesIO(), "cp1252")), is_unicode(io.StringIO())
    (False, True)
    """
    encoding = getattr(stream, "encoding", None)
    return encoding is None or encoding.lower().replace("-", "").startswith("utf")


def print_json(content: Any) -> None:
    """Print one JSON document on standard output; it holds plain data without NaN."""
    print(json.dumps(content, indent=2, ensure_ascii=not is_unicode(sys.stdout), allow_nan=False))
