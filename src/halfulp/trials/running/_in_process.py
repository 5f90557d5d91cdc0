"""Trials in the process that asks for them, one after the other: for tasks that no worker process can receive."""

import traceback
from collections.abc import Generator, Sequence

import torch

from ._plan import Trial
from ._pool import Event, TrialError
from ._trial import run


def work(trials: Sequence[Trial]) -> Generator[Event, None, None]:
    """Train all trials and yield ("start", trial, None), then ("done", trial, result).

    Each begins from its own seed, and torch's random state is afterwards as it was.

    Raises:
        TrialError: a trial crashed; its ``details`` are the traceback.
    """
    for trial in trials:
        yield "start", trial, None
        devices = list(range(torch.cuda.device_count()))
        with torch.random.fork_rng(devices=devices):
            try:
                result = run(
                    trial.task, trial.recipe, trial.seed, trial.steps, trial.task.load(), observed=trial.observed
                )
            except Exception as error:
                line = (str(error).strip().splitlines() or [""])[0]
                said = f"trial {trial} failed: {type(error).__name__}: {line}"
                raise TrialError(said, trial, traceback.format_exc()) from error
        yield "done", trial, result
