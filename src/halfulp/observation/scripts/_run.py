"""A Python script run as `python SCRIPT.py` or `python -m MODULE` would run it, inside this process."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130
TERMINATED = 143
_RUNPY = ("<frozen runpy>", runpy.__file__)
# What the script's names hold lives to the end of the process, as in Python: handlers at exit find it, and a process
# group whose threads are still ending is not taken apart under their feet, which can wait for ever.
_KEPT: list[object] = []
_HERE = os.path.dirname(os.path.realpath(__file__))


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes:
        code: the exit code that Python would have ended with.
        reason: "finished", "exited", "crashed", "interrupted" or "terminated".
    """

    code: int
    reason: str


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    passing: type[BaseException] | tuple[type[BaseException], ...] = (),
    module: bool = False,
    leave: Callable[[Ending], int] | None = None,
) -> Ending:
    """Run a script to its end; a traceback is printed as Python prints it, from the script's first line on.

    sys.argv, sys.path[0], __name__ and __file__ are what the script would find; they are put back afterwards.

    Args:
        path: of the script, or the dotted name of a module.
        arguments: what follows it on the command line.
        passing: exceptions that are the caller's and not the script's.
        module: whether `path` names a module, as after `python -m`.
        leave: called before the script ends this process by os._exit, after which nothing else runs; returns the code
            to exit with.
    """
    try:
        with _as_main(path, arguments, module), _leaving(leave):
            kept = (
                runpy.run_module(path, run_name="__main__", alter_sys=True)
                if module
                else runpy.run_path(path, run_name="__main__")
            )
        _KEPT[:] = [kept]
    except passing:
        raise
    except SystemExit as ending:
        _KEPT[:] = [ending]
        return _exited(ending)
    except KeyboardInterrupt as interrupt:
        _KEPT[:] = [interrupt]
        return Ending(INTERRUPTED, "interrupted")
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        traceback.print_exception(type(error), error, _of_script(error.__traceback__))
        _KEPT[:] = [error]
        return Ending(1, "crashed")
    return Ending(0, "finished")


@contextlib.contextmanager
def _as_main(path: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0:1] = [os.getcwd() if module else str(Path(path).resolve().parent)]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = search


@contextlib.contextmanager
def _leaving(leave: Callable[[Ending], int] | None) -> Iterator[None]:
    """Let somebody report before os._exit; of this process alone, since processes forked from it end by it too."""
    leave_now, own = os._exit, os.getpid()

    def left(status: int) -> None:
        if os.getpid() == own and leave is not None:
            os._exit = leave_now
            status = leave(Ending(status & 0xFF, "exited"))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        leave_now(status)

    os._exit = left  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave_now


def _exited(ending: SystemExit) -> Ending:
    """As Python takes the argument of sys.exit: none is 0, a number itself, anything else is printed and 1."""
    code = ending.code
    if code is None:
        return Ending(0, "exited")
    if isinstance(code, int):
        return Ending(code & 0xFF, "exited")
    print(code, file=sys.stderr)
    return Ending(1, "exited")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead to the script: those of this package and of runpy."""
    at = trace
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.realpath(file)) != _HERE and file not in _RUNPY:
            return at
        at = at.tb_next
    return None
