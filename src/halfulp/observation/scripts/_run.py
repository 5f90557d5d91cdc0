"""Run a script as Python does, and tell the processes that it starts."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
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
        return _get_exit_ending(ending)
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
                status = leave(ScriptEnding(status & 0xFF, "exited"))
                _flush_streams()
            leave_now(status)

        return left

    return replace_function(os, "_exit", wrap)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _get_exit_ending(ending: SystemExit) -> ScriptEnding:
    """Return the exit code for an argument of sys.exit: None is 0, a number itself, anything else is printed and 1."""
    if ending.code is None or isinstance(ending.code, int):
        return ScriptEnding((ending.code or 0) & 0xFF, "exited")
    print(ending.code, file=sys.stderr)
    return ScriptEnding(1, "exited")


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that lead to the script: those of this package and of runpy."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.realpath(file)) != _SCRIPTS_FOLDER and file not in _RUNPY_FILES:
            break
        trace = trace.tb_next
    return trace


# Modules whose processes load data, share memory or wait for work: the function that they run is no training's.
_HELPER_MODULES = (
    "torch.utils.data.",
    "torch.multiprocessing.",
    "multiprocessing.",
    "concurrent.futures.",
    "multiprocess.",
)
_SPAWN_MODULE = "torch.multiprocessing.spawn"
PROCESS_REMEDY = (
    "put `with hu.observe(model, optimizer, interval=50) as seen:` around the loop in that function, and "
    "`seen.to_html('observe.html')` after it: rank 0 writes the page; or train in one process, without spawn"
)


class ChildProcesses:
    """Notes the processes that a script starts by multiprocessing.

    Attributes:
        functions: what runs in them, helpers left out, one name each.
        spawned: whether torch.multiprocessing.spawn started some.
    """

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.spawned: bool = False
        self._own: int = os.getpid()

    def watch_starts(self) -> contextlib.AbstractContextManager[None]:
        """Note the processes that are started while the context is open."""

        def wrap(start: Callable[[multiprocessing.process.BaseProcess], None]) -> Callable[..., None]:
            def started(process: multiprocessing.process.BaseProcess) -> None:
                self._note_start(process)  # start() forgets the function
                start(process)

            return started

        return replace_function(multiprocessing.process.BaseProcess, "start", wrap)

    def _note_start(self, process: multiprocessing.process.BaseProcess) -> None:
        if os.getpid() != self._own:
            return
        target, args = vars(process).get("_target"), vars(process).get("_args") or ()
        if getattr(target, "__module__", "") == _SPAWN_MODULE and args:
            self.spawned = True
            self.functions.append(_get_name(args[0]))
        elif target is None:
            self.functions.append(type(process).__name__)
        elif not str(getattr(target, "__module__", "")).startswith(_HELPER_MODULES):
            self.functions.append(_get_name(target))

    def explain_unseen(self) -> str:
        """Explain that training may have run in processes that the script started, and what to write instead.

        Empty where it started none.
        """
        if not self.functions:
            return ""
        by = "torch.multiprocessing.spawn" if self.spawned else "multiprocessing"
        count, names = len(self.functions), ", ".join(dict.fromkeys(self.functions))
        many = "a process" if count == 1 else f"{count} processes"
        return (
            f"it started {many} by {by}, where {names} runs, and what trains there is not seen here: {PROCESS_REMEDY}"
        )


def _get_name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


class TerminationHandler:
    """While open, SIGTERM is answered by a report, and then ends the process as it would have.

    A script that handles SIGTERM itself, and processes forked from it, are as they would be without. Only the main
    thread can catch signals; elsewhere this does nothing.

    Args:
        report: called once, before the process ends.
    """

    def __init__(self, report: Callable[[], object]) -> None:
        self._report: Callable[[], object] | None = report
        self._received = False
        self._handles = False

    def __enter__(self) -> TerminationHandler:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle_signal)
            self._handles = True
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._restore_handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handler()
        if self._received:
            self._end_process()

    def delay_signals(self) -> None:
        """Delay signals from now on until the context ends: the report is being written."""
        self._report = None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        report, self._report, self._received = self._report, None, True
        if report is None:
            return
        try:
            report()
        except Exception:
            traceback.print_exc()
        finally:
            self._restore_handler()
            self._end_process()

    def _restore_handler(self) -> None:
        if self._handles and signal.getsignal(signal.SIGTERM) == self._handle_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._handles = False

    def _end_process(self) -> None:
        _flush_streams()
        os.kill(os.getpid(), signal.SIGTERM)
