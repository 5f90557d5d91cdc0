"""How a command ends when something is wrong, and standard output in encodings that lack letters; without packages."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn


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


def fail(message: object) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    print(f"halfulp: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def run_or_fail(doing: str, telling: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Run a user's code in a block: any exception ends the command with exit code 2.

    Exceptions that are ``telling`` speak for themselves; before others goes what was being done, and their name.
    """
    try:
        yield
    except telling as error:
        fail(error)
    except (Exception, SystemExit) as error:
        fail(f"{doing} {type(error).__name__}: {error}".rstrip(": "))


@dataclass
class ExitCode:
    """The exit code of a block of `catch_exit_code`."""

    code: int = 0


@contextlib.contextmanager
def catch_exit_code() -> Iterator[ExitCode]:
    """Keep exceptions inside of a block: print their messages, and make its exit code 2."""
    found = ExitCode()
    try:
        yield found
    except SystemExit as ending:
        found.code = ending.code if isinstance(ending.code, int) else 2
    except ValueError as error:
        with contextlib.suppress(SystemExit):
            fail(error)
        found.code = 2


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Write, in a block, to a path that an option names; errors end the command."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror or error}; give another file with --out")
