"""Worker processes that train trials, one thread each, and training in this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ..._extensions import load_inherited_extensions
from ..._messages import get_first_line_of_error
from ..tasks import Data
from ._plan import Trial
from ._trial import run_trial


def describe_exit_code(code: int | None) -> str:
    """Describe how a process ended, by its exit code: minus a signal's number where one killed it.

    >>> describe_exit_code(3), describe_exit_code(-15), describe_exit_code(-99)
    ('ended with exit code 3', 'was killed by SIGTERM', 'was killed by signal 99')
    >>> describe_exit_code(-9)
    'was killed by SIGKILL, as where memory is short'
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    names = {member.value: member.name for member in signal.Signals} | {9: "SIGKILL, as where memory is short"}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def train_received_trials(connection: Connection, log: str) -> None:
    """Serve trials until the parent hangs up; what is printed meanwhile goes to the file ``log``.

    Messages sent are ("ready", None), ("progress", (step, loss)), ("done", result) and ("failed",
    (line, trace)).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    load_inherited_extensions()
    loaded: dict[str, Data] = {}
    try:
        connection.send(("ready", None))
        while True:
            trial = connection.recv()
            connection.send(_run_and_report_trial(trial, loaded, connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _run_and_report_trial(trial: Trial, loaded: dict[str, Data], connection: Connection) -> tuple[str, Any]:
    """Train a trial and return the message that says what came of it."""
    try:
        which = repr(trial.task.settings())
        if which not in loaded:
            loaded[which] = trial.task.load()

        def report(step: int, loss: float) -> None:
            connection.send(("progress", (step, loss)))

        return "done", run_trial(trial, loaded[which], report)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        return "failed", (f"{type(error).__name__}: {get_first_line_of_error(error)}", traceback.format_exc())


TrialEvent = tuple[str, Trial, Any]


class TrialError(RuntimeError):
    """A trial that ended without a result; ``details`` are the traceback or the last output of its worker."""

    def __init__(self, message: str, trial: Trial | None = None, details: str = ""):
        super().__init__(message)
        self.trial = trial
        self.details = details


class _WorkerProcess:
    """One process with a pipe to it, and the trial that it is busy with."""

    def __init__(self, number: int, logs: str):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.log = Path(logs) / f"worker{number}.log"
        self.trial: Trial | None = None
        self.process: BaseProcess = context.Process(
            target=train_received_trials, args=(theirs, str(self.log)), name=f"halfulp-trials-{number}", daemon=True
        )
        self.process.start()
        theirs.close()

    def end_process(self) -> None:
        """Stop it, whatever it is doing."""
        self.connection.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def train_in_workers(trials: Sequence[Trial], workers: int) -> Generator[TrialEvent, None, None]:
    """Train all trials and yield ("start", trial, None), ("progress", trial, (step, loss)), ("done", trial, result).

    Leaving the loop early, by an exception or otherwise, ends the workers.
    """
    waiting, unfinished = list(reversed(trials)), len(trials)
    with tempfile.TemporaryDirectory(prefix="halfulp-") as logs, contextlib.ExitStack() as stack:
        crew: dict[Any, _WorkerProcess] = {}
        for number in range(min(workers, unfinished)):
            worker = _WorkerProcess(number, logs)
            stack.callback(worker.end_process)
            crew[worker.connection] = worker
        while unfinished:
            for connection in wait(list(crew)):
                worker = crew[connection]
                try:
                    kind, content = worker.connection.recv()
                except (EOFError, OSError):
                    raise _make_death_error(worker) from None
                if kind == "failed":
                    raise TrialError(f"trial {worker.trial} failed: {content[0]}", worker.trial, content[1])
                if worker.trial is not None:  # what has none yet is ready for its first
                    yield kind, worker.trial, content
                unfinished -= kind == "done"
                if kind != "progress" and waiting:
                    worker.trial = waiting.pop()
                    with contextlib.suppress(OSError):  # of one that died meanwhile, which reading its pipe tells
                        worker.connection.send(worker.trial)
                    yield "start", worker.trial, None


def _make_death_error(worker: _WorkerProcess) -> TrialError:
    """Return the error of a worker that ended early: its exit code and its last output."""
    worker.process.join(10)
    how = describe_exit_code(worker.process.exitcode)
    output = worker.log.read_text(encoding="utf-8", errors="replace") if worker.log.exists() else ""
    if worker.trial is None:
        hint = 'in a script, call compare under `if __name__ == "__main__":`, since workers import the script again'
        return TrialError(f"a worker {how} before its first trial; {hint}", None, output)
    return TrialError(f"the worker of trial {worker.trial} {how}", worker.trial, output)


def train_trials(trials: Sequence[Trial], workers: int) -> Generator[TrialEvent, None, None]:
    """Yield the events of trials as they train, in workers or, where they must, here; torch's random state stays."""
    yield from train_in_workers([trial for trial in trials if not trial.task.in_process], workers)
    for trial in trials:
        if not trial.task.in_process:
            continue
        yield "start", trial, None
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            try:
                result = run_trial(trial, trial.task.load())
            except Exception as error:
                said = f"trial {trial} failed: {type(error).__name__}: {get_first_line_of_error(error)}"
                raise TrialError(said, trial, traceback.format_exc()) from error
        yield "done", trial, result
