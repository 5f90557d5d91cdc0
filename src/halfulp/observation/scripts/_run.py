"""Run a script as Python does, and report how it ended."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
# What the script's names hold lives to the end of the process, as in Python: handlers at exit find it, and a process
# group whose threads are still ending is not taken apart under their feet, which can wait for ever.
_KEPT_SCRIPT_STATE: list[object] = []
# What trains in processes that a script starts is not seen.
PROCESS_REMEDY = (
    "where a script trains in processes that it starts, put `with hu.observe(model, optimizer, interval=50) as seen:` "
    "around the loop there, and `seen.to_html('observe.html')` after it: rank 0 writes the page"
)


@contextlib.contextmanager
def replace_function(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap a function of a module or a class, for a while."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass(frozen=True)
class ScriptEnding:
    """The way in which a script ended.

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
) -> ScriptEnding:
    """Run a script to its end; the traceback of a crash is printed.

    sys.argv, sys.path[0], __name__ and __file__ are what the script would find; they are put back afterwards.

    Args:
        path: of the script, or the dotted name of a module.
        arguments: what follows it on the command line.
        passing: exceptions that are the caller's and not the script's.
        module: whether `path` names a module, as after `python -m`.
    """
    try:
        with _run_as_main(path, arguments, module):
            kept = (
                runpy.run_module(path, run_name="__main__", alter_sys=True)
                if module
                else runpy.run_path(path, run_name="__main__")
            )
        _KEPT_SCRIPT_STATE[:] = [kept]
    except passing:
        raise
    except SystemExit as ending:
        _KEPT_SCRIPT_STATE[:] = [ending]
        if ending.code is None or isinstance(ending.code, int):
            return ScriptEnding((ending.code or 0) & 0xFF, "exited")
        print(ending.code, file=sys.stderr)
        return ScriptEnding(1, "exited")
    except KeyboardInterrupt as interrupt:
        _KEPT_SCRIPT_STATE[:] = [interrupt]
        return ScriptEnding(EXIT_INTERRUPTED, "interrupted")
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        traceback.print_exception(error)
        _KEPT_SCRIPT_STATE[:] = [error]
        return ScriptEnding(1, "crashed")
    return ScriptEnding(0, "finished")


@contextlib.contextmanager
def _run_as_main(path: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
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
def report_termination(report: Callable[[ScriptEnding], int]) -> Iterator[Callable[[ScriptEnding], int]]:
    """Answer SIGTERM by a report and `os._exit`, so that no code of the script holds that up.

    A script that handles SIGTERM itself, and processes forked from it, are as they would be without. Only the main
    thread can catch signals; elsewhere this does nothing.

    Args:
        report: called with the ending; returns the code to exit with.

    Yields:
        The report, during which SIGTERM is ignored, for other endings.
    """
    own, has_begun = os.getpid(), False

    def report_undisturbed(ending: ScriptEnding) -> int:
        nonlocal has_begun
        has_begun = True
        return report(ending)

    def end_process(number: int, frame: FrameType | None) -> None:
        if has_begun:  # launchers and batch systems may both send one
            return
        if os.getpid() == own:
            code = EXIT_TERMINATED
            try:
                code = report_undisturbed(ScriptEnding(EXIT_TERMINATED, "terminated"))
            except SystemExit:  # said already
                code = 2
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield report
        return
    signal.signal(signal.SIGTERM, end_process)
    try:
        yield report_undisturbed
    finally:
        if signal.getsignal(signal.SIGTERM) is end_process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
