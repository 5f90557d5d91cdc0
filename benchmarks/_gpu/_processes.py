"""Processes that end together with whatever they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

PATIENCE = 3.0  # seconds between asking a process to end and ending it


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a command, in a session of its own where the system has them, which `end` ends as a whole."""
    return subprocess.Popen(command, start_new_session=hasattr(os, "killpg"), **options)


def end(process: subprocess.Popen) -> None:
    """End a process that `start` has made, and the processes that it has left running.

    It is asked first, as it may have started sessions of its own, which only it knows of.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    if hasattr(os, "killpg"):
        # One that has ended by itself may have left others; where nobody is left there is no group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()
