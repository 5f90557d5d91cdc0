"""Training a list of trials, in workers or in this process, and gathering their results."""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from ...environment import count_cores, describe_processor
from ...pages import require_page_packages, write_file_atomically
from ..evidence._evidence import Evidence
from ..tasks._task import Step
from ._plan import Trial
from ._pool import train_trials
from ._store import TrialStore

Listener = Callable[[str, Trial | None, Any], None]


class TrainingRun:
    """The trials of a run and their results so far; with a folder, each is kept there as soon as it has finished.

    ``workers`` and ``listen`` are as `halfulp.compare` takes them.

    Attributes:
        results: of the trials so far, by key.
    """

    def __init__(
        self,
        workers: int | None,
        listen: Listener | None,
        store: TrialStore | None,
        resume: bool,
    ) -> None:
        self._workers = workers or min(count_cores(), 8)
        self._listen: Listener = listen or (lambda kind, trial, content: None)
        self._store, self._resume = store, resume
        self._trials_by_key: dict[str, Trial] = {}
        self._seconds, self._trained = 0.0, 0
        self.results: dict[str, dict[str, Any]] = {}

    def train_trials_without_result(self, trials: Sequence[Trial]) -> None:
        """Train what has no result yet."""
        self._listen("plan", None, trials)
        if self._resume and any(isinstance(trial.task, Step) for trial in trials):
            raise ValueError(
                "resume=True with a training step of one's own: nothing tells whether its function, model and data are "
                "those of the trials in the folder. Write a Task, whose settings tell, or give overwrite=True"
            )
        if self._store is not None and self._resume:
            self.results |= self._store.read_finished_results(
                [trial for trial in trials if trial.key not in self.results]
            )
        missing = [trial for trial in trials if trial.key not in self.results]
        for trial in trials:
            if trial not in missing:
                self._listen("reused", trial, self.results[trial.key])
        start = time.monotonic()
        workers = min(self._workers, len(missing))
        with contextlib.closing(train_trials(missing, workers)) as events:
            for kind, trial, content in events:
                if kind == "done":
                    self._trained += 1
                    self.results[trial.key] = content
                    if self._store is not None:
                        self._store.write_trial(trial, content)
                self._listen(kind, trial, content)
        self._seconds += time.monotonic() - start
        self._trials_by_key |= {trial.key: trial for trial in trials}

    def make_evidence(self) -> Evidence:
        """Return the evidence of all trials so far."""
        trials = self._trials_by_key.items()
        records = [{"settings": trial.settings(), "result": self.results[key]} for key, trial in trials]
        run: dict[str, Any] = {"workers": min(self._workers, len(records)), "cores": count_cores()}
        run |= {"seconds": round(self._seconds, 1), "trained": self._trained}
        run |= {"reused": len(records) - self._trained, "processor": describe_processor()}
        return Evidence(trials=tuple(records), run=run)


@contextlib.contextmanager
def open_training_run(
    out: str | os.PathLike[str] | None,
    workers: int | None,
    listen: Listener | None,
    resume: bool,
    overwrite: bool,
) -> Generator[TrainingRun, None, None]:
    """Yield a `TrainingRun`; at the end of the block its folder, if any, gets compare.json and compare.html."""
    for name, given in (("resume", resume), ("overwrite", overwrite)):
        if given and out is None:
            raise ValueError(f"{name}=True needs the folder of an earlier comparison: give out=")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if out is None:
        yield TrainingRun(workers, listen, None, False)
        return
    require_page_packages("matplotlib", instead="give no out folder")
    store = TrialStore(out)
    store.refuse_or_delete_old_results(resume, overwrite)
    run = TrainingRun(workers, listen, store, resume)
    yield run
    evidence = run.make_evidence()
    evidence.to_html(store.page_path)
    write_file_atomically(store.json_path, evidence.to_json())
