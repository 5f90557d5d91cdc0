"""How a command ends when something is wrong: one line on stderr, and exit code 2."""

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn


def fail(message: object) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    print(f"halfulp: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def or_fail(doing: str, telling: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """For code of the user's, which may raise anything: a traceback's exit code would be that of FAILED.

    Exceptions that are ``telling`` speak for themselves; before others goes what was being done, and their name.
    """
    try:
        yield
    except telling as error:
        fail(error)
    except (Exception, SystemExit) as error:
        fail(f"{doing} {type(error).__name__}: {error}".rstrip(": "))


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """For writing to a file that an option names."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror or error}; give another file with --out")
