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
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_RUNPY_FILES = ("<frozen runpy>", runpy.__file__)
# What the script's names hold lives to the end of the process, as in Python: handlers at exit find it, and a process
# group whose threads are still ending is not taken apart under their feet, which can wait for ever.
_KEPT_SCRIPT_STATE: list[object] = []
# What trains in processes that a script starts is not seen.
PROCESS_REMEDY = (
    "where a script trains in processes that it starts, put `with hu.observe(model, optimizer, interval=50) as seen:` "
    "around the loop there, and `seen.to_html('observe.html')` after it: rank 0 writes the page"
)
_SCRIPTS_FOLDER = os.path.dirname(os.path.realpath(__file__))


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
    leave: Callable[[ScriptEnding], int] | None = None,
) -> ScriptEnding:
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
        with _run_as_main(path, arguments, module), _report_before_exit(leave):
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
            return _make_exit_ending(ending.code or 0)
        print(ending.code, file=sys.stderr)
        return ScriptEnding(1, "exited")
    except KeyboardInterrupt as interrupt:
        _KEPT_SCRIPT_STATE[:] = [interrupt]
        return ScriptEnding(EXIT_INTERRUPTED, "interrupted")
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        traceback.print_exception(type(error), error, _trim_traceback(error.__traceback__))
        _KEPT_SCRIPT_STATE[:] = [error]
        return ScriptEnding(1, "crashed")
    return ScriptEnding(0, "finished")


def _make_exit_ending(status: int) -> ScriptEnding:
    return ScriptEnding(status & 0xFF, "terminated" if status == EXIT_TERMINATED else "exited")


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


def _report_before_exit(leave: Callable[[ScriptEnding], int] | None) -> contextlib.AbstractContextManager[None]:
    """Report before os._exit; of this process alone, since processes forked from it end by it too."""
    own = os.getpid()

    def wrap(leave_now: Callable[[int], None]) -> Callable[[int], None]:
        def left(status: int) -> None:
            if os.getpid() == own and leave is not None:
                os._exit = leave_now  # type: ignore[assignment]
                try:
                    status = leave(_make_exit_ending(status))
                except Exception:
                    traceback.print_exc()
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
            leave_now(status)

        return left

    return replace_function(os, "_exit", wrap)


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that lead to the script: those of this package and of runpy."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.realpath(file)) != _SCRIPTS_FOLDER and file not in _RUNPY_FILES:
            break
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def exit_on_termination() -> Iterator[Callable[[], None]]:
    """Answer SIGTERM by `os._exit(143)`, before which `run_script` has what was observed reported.

    As without, no code of the script holds that up. A script that handles SIGTERM itself, and processes forked from it,
    are as they would be without. Only the main thread can catch signals; elsewhere this does nothing.

    Yields:
        A function that has SIGTERM ignored until the end: the report is being written.
    """
    own = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            ignore()  # launchers and batch systems may both send one
            os._exit(EXIT_TERMINATED)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def ignore() -> None:
        if handles and signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, ignored)

    def ignored(number: int, frame: FrameType | None) -> None:
        """Do nothing, unlike SIG_IGN, which processes that are started now would inherit."""

    is_main = threading.current_thread() is threading.main_thread()
    handles = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if handles:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield ignore
    finally:
        if handles and signal.getsignal(signal.SIGTERM) in (leave, ignored):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
