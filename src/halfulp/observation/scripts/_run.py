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
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

INTERRUPTED_EXIT_CODE = 130
TERMINATED_EXIT_CODE = 143
# What the script's names hold lives to the end of the process, as in Python: handlers at exit find it, and a process
# group whose threads are still ending is not taken apart under their feet, which can wait for ever.
_SCRIPT_STATE_KEPT_ALIVE: list[object] = []
# What trains in processes that a script starts is not seen.
CHILD_PROCESS_REMEDY = (
    "where a script trains in processes that it starts, put `with hu.observe(model, optimizer, interval=50) as seen:` "
    "around the loop there, and `seen.to_html('observe.html')` after it: rank 0 writes the page"
)


@contextlib.contextmanager
def replace_function_temporarily(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or a class, for a while, by another that takes it as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call_replacement(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    setattr(owner, name, call_replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


class ScriptEnding(NamedTuple):
    """The exit code that Python would have ended a script with, and why it ended."""

    code: int
    reason: Literal["finished", "exited", "crashed", "interrupted", "terminated"]


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    passing: type[BaseException] | tuple[type[BaseException], ...] = (),
    module: bool = False,
) -> ScriptEnding:
    """Run a script, or a module as `python -m` does, to its end; the traceback of a crash is printed.

    sys.argv, sys.path[0], __name__ and __file__ are what the script would find; they are put back afterwards. What is
    `passing` are the caller's exceptions and not the script's.
    """
    argv, search = sys.argv, list(sys.path)
    try:
        sys.argv = [path, *arguments]
        if not sys.flags.safe_path:
            sys.path[0:1] = [os.getcwd() if module else str(Path(path).resolve().parent)]
        if module:
            names = runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            names = runpy.run_path(path, run_name="__main__")
        _SCRIPT_STATE_KEPT_ALIVE[:] = [names]
    except passing:
        raise
    except SystemExit as ending:
        _SCRIPT_STATE_KEPT_ALIVE[:] = [ending]
        if ending.code is None or isinstance(ending.code, int):
            return ScriptEnding((ending.code or 0) & 0xFF, "exited")
        print(ending.code, file=sys.stderr)
        return ScriptEnding(1, "exited")
    except KeyboardInterrupt as interrupt:
        _SCRIPT_STATE_KEPT_ALIVE[:] = [interrupt]
        return ScriptEnding(INTERRUPTED_EXIT_CODE, "interrupted")
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        traceback.print_exception(error)
        _SCRIPT_STATE_KEPT_ALIVE[:] = [error]
        return ScriptEnding(1, "crashed")
    finally:
        sys.argv = argv
        sys.path[:] = search
    return ScriptEnding(0, "finished")


@contextlib.contextmanager
def report_and_exit_on_sigterm(report: Callable[[ScriptEnding], int]) -> Iterator[Callable[[ScriptEnding], int]]:
    """Answer SIGTERM by a report and `os._exit` with its code, so that no code of the script holds that up.

    A script that handles SIGTERM itself, and processes forked from it, are as they would be without. Yielded is the
    report for other endings, during which SIGTERM is ignored.
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
            code = TERMINATED_EXIT_CODE
            try:
                code = report_undisturbed(ScriptEnding(TERMINATED_EXIT_CODE, "terminated"))
            except SystemExit:  # said already
                code = 2
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Only the main thread can catch signals.
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
