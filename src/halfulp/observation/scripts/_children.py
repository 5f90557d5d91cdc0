"""Processes that a script starts: what trains in them is not seen from here, and is said."""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
from types import TracebackType
from typing import Any

# Modules whose processes load data, share memory or wait for work: the function that they run is no training's.
_HELPERS = ("torch.utils.data.", "torch.multiprocessing.", "multiprocessing.", "concurrent.futures.", "multiprocess.")
_SPAWN = "torch.multiprocessing.spawn"
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")
REMEDY = (
    "put `with hu.observe(model, optimizer, interval=50) as seen:` around the loop in that function, and "
    "`seen.to_html('observe.html')` after it: rank 0 writes the page; or train in one process, without spawn"
)

# Their methods are replaced for a while.
_PROCESS: Any = multiprocessing.process.BaseProcess
_POPEN: Any = subprocess.Popen


class Children:
    """Notes the processes that are started while the context is open.

    Attributes:
        functions: what runs in those of multiprocessing, helpers left out, one name each.
        spawned: whether torch.multiprocessing.spawn started some.
        launched: launchers of Python that were started as programs.
    """

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.spawned: bool = False
        self.launched: list[str] = []
        self._own: int = os.getpid()
        self._start: Any = None
        self._popen: Any = None

    def __enter__(self) -> Children:
        self._start, self._popen = _PROCESS.start, _POPEN.__init__
        start, popen = self._start, self._popen

        @functools.wraps(start)
        def started(process: multiprocessing.process.BaseProcess) -> None:
            self._note(process)  # start() forgets the function
            start(process)

        @functools.wraps(popen)
        def opened(program: Any, args: Any, *more: Any, **options: Any) -> None:
            popen(program, args, *more, **options)
            name = os.path.basename(str(args[0] if isinstance(args, list | tuple) and args else args).split(" ")[0])
            if os.getpid() == self._own and name.startswith(_LAUNCHERS):
                self.launched.append(name)

        _PROCESS.start, _POPEN.__init__ = started, opened
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PROCESS.start, _POPEN.__init__ = self._start, self._popen

    def _note(self, process: multiprocessing.process.BaseProcess) -> None:
        if os.getpid() != self._own:
            return
        target, args = vars(process).get("_target"), vars(process).get("_args") or ()
        if getattr(target, "__module__", "") == _SPAWN and args:
            self.spawned = True
            self.functions.append(_name(args[0]))
        elif target is None:
            self.functions.append(type(process).__name__)
        elif not str(getattr(target, "__module__", "")).startswith(_HELPERS):
            self.functions.append(_name(target))

    def why_unseen(self) -> str:
        """Return that a training may have run in processes that the script started, and what to write instead.

        Empty where it started none.
        """
        if self.functions:
            by = "torch.multiprocessing.spawn" if self.spawned else "multiprocessing"
            count, names = len(self.functions), ", ".join(dict.fromkeys(self.functions))
            many = "a process" if count == 1 else f"{count} processes"
            return f"it started {many} by {by}, where {names} runs, and what trains there is not seen here: {REMEDY}"
        if self.launched:
            names = ", ".join(dict.fromkeys(self.launched))
            return (
                f"it started {names}, and what trains there is not seen here: put `halfulp observe` before the script "
                "that this runs"
            )
        return ""


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
