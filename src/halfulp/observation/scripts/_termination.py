"""SIGTERM while a script is observed, as torchrun and batch systems send it: the report first, then the end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType


class Termination:
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

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)
            self._handles = True
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._release)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        if self._received:
            self._end()

    def wait(self) -> None:
        """From now on a signal waits for the end of the context: the report is being written."""
        self._report = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        report, self._report, self._received = self._report, None, True
        if report is None:
            return
        try:
            report()
        except Exception:
            traceback.print_exc()
        finally:
            self._release()
            self._end()

    def _release(self) -> None:
        if self._handles and signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._handles = False

    def _end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.kill(os.getpid(), signal.SIGTERM)
