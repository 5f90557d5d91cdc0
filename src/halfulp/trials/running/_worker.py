"""What a worker process does: receive trials, train them on one thread, send back progress and results."""

import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from ..._extensions import load_inherited
from ..tasks import Data
from ._plan import Trial
from ._probe import Probe, measure


def main(connection: Connection, log: str) -> None:
    """Serve trials until the parent hangs up. Whatever is printed meanwhile goes to the file ``log``.

    Messages sent are ("ready", None), ("timed", cost), ("progress", (step, loss)), ("done", result) and ("failed",
    (line, trace)).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    load_inherited()
    loaded: dict[str, Data] = {}
    try:
        connection.send(("ready", None))
        while True:
            job = connection.recv()
            connection.send(_answer(job, loaded, connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(job: Trial | Probe, loaded: dict[str, Data], connection: Connection) -> tuple[str, Any]:
    from ._trial import run

    trial = job.trial if isinstance(job, Probe) else job
    try:
        which = repr(trial.task.settings())
        if which not in loaded:
            loaded[which] = trial.task.load()
        if isinstance(job, Probe):
            return "timed", measure(trial, loaded[which])

        def report(step: int, loss: float) -> None:
            connection.send(("progress", (step, loss)))

        return "done", run(
            trial.task, trial.recipe, trial.seed, trial.steps, loaded[which], report, observed=trial.observed
        )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return "failed", (f"{type(error).__name__}: {lines[0]}", traceback.format_exc())
