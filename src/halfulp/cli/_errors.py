"""How a command ends when something is wrong, and standard output in encodings that lack letters; without packages."""

import contextlib
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, NoReturn


def escape_unencodable_letters() -> None:
    """Make outputs write a letter that their encoding lacks as its number, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Let what waits to be written to standard output go nowhere, as a full disk would change the exit code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def escape_control_characters(text: str) -> str:
    """Return text whose characters that steer a terminal, as in names of another's checkpoint, are written as codes.

    >>> print(escape_control_characters("a\\x1b[2J\\u202e\\nü"))
    a\\x1b[2J\\u202e
    ü
    """
    is_steering = [letter != "\n" and unicodedata.category(letter) in ("Cc", "Cf") for letter in text]
    return "".join(repr(letter)[1:-1] if steers else letter for letter, steers in zip(text, is_steering))


def print_json(content: Any) -> None:
    """Print one JSON document on standard output; it holds plain data without NaN."""
    print(json.dumps(content, indent=2, allow_nan=False))


def exit_with_error(message: object) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    print(f"halfulp: {escape_control_characters(' '.join(str(message).split()))}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def exit_on_exception(doing: str, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """End the command on an exception in a block; one that is not `expected` gets what was being done before it."""
    try:
        yield
    except expected as error:
        exit_with_error(error)
    except (Exception, SystemExit) as error:
        exit_with_error(f"{doing} {type(error).__name__}: {error}".rstrip(": "))
