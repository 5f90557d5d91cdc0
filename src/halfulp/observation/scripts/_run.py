"""A Python script run as `python SCRIPT.py` would run it, inside this process."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes:
        code: the exit code that Python would have ended with.
        reason: "finished", "exited", "crashed" or "interrupted".
    """

    code: int
    reason: str


def run_script(
    path: str, arguments: Sequence[str] = (), passing: type[BaseException] | tuple[type[BaseException], ...] = ()
) -> Ending:
    """Run a script to its end; a traceback is printed as Python prints it, from the script's first line on.

    sys.argv, sys.path[0], __name__ and __file__ are what the script would find; they are put back afterwards.

    Args:
        path: of the script.
        arguments: what follows it on the command line.
        passing: exceptions that are the caller's and not the script's.
    """
    try:
        with _as_main(path, arguments):
            runpy.run_path(path, run_name="__main__")
    except passing:
        raise
    except SystemExit as ending:
        return _exited(ending)
    except KeyboardInterrupt:
        return Ending(INTERRUPTED, "interrupted")
    except BaseException as error:
        sys.stdout.flush()
        traceback.print_exception(type(error), error, _of_script(error.__traceback__, path))
        return Ending(1, "crashed")
    return Ending(0, "finished")


@contextlib.contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path[0:1] = [str(Path(path).resolve().parent)]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = search


def _exited(ending: SystemExit) -> Ending:
    """As Python takes the argument of sys.exit: none is 0, a number itself, anything else is printed and 1."""
    code = ending.code
    if code is None:
        return Ending(0, "exited")
    if isinstance(code, int):
        return Ending(code & 0xFF, "exited")
    print(code, file=sys.stderr)
    return Ending(1, "exited")


def _of_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The traceback from the script's own frame on; all of it where the script never ran."""
    script, at = os.path.realpath(path), trace
    while at is not None:
        if os.path.realpath(at.tb_frame.f_code.co_filename) == script:
            return at
        at = at.tb_next
    return None
