"""Estimate: how long trials take together, before they start, and TimeLeft: how long they still take."""

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ._plan import Trial
from ._probe import Cost, cost_class

# What was measured while training counts as much as the probes once it covers this share of the whole.
_TRUST = 0.05


@dataclasses.dataclass(frozen=True)
class Estimate:
    """About how long a comparison takes on this machine.

    Attributes:
        seconds: From start to end of the training, the timing of a few steps included, of the trials that were timed;
            None where there are none.
        untimed: How many trials were not timed: the whole takes longer by them.
        of_trial: Seconds of each trial on its worker, by key; what was not timed is missing.
        of_task: Seconds of the trials of each task, were they alone.
        workers: How many processes train at once.
        processor: The processor's name.
    """

    seconds: float | None
    untimed: int
    of_trial: Mapping[str, float]
    of_task: Mapping[str, float]
    workers: int
    processor: str


def estimate(
    trials: Sequence[Trial],
    costs: Mapping[str, Cost | None],
    workers: int,
    cores: int,
    spent: float,
    processor: str,
) -> Estimate:
    """Add up the trials' costs over the workers, as each takes the next trial as soon as it is free.

    Args:
        trials: In the order in which they start.
        costs: What was measured, by class of cost.
        workers: How many processes train at once.
        cores: How many of them can compute at once. The costs are those of as many busy workers as there were probes.
        spent: Seconds until now, which count as well.
        processor: The processor's name.
    """
    timed = sum(cost is not None for cost in costs.values())
    crowding = max(1.0, workers / cores) / max(1.0, min(workers, timed or 1) / cores)
    of_trial = {}
    for trial in trials:
        cost = costs.get(cost_class(trial))
        if cost is not None:
            of_trial[trial.key] = crowding * cost.seconds(trial.steps)
    of_task = {
        name: makespan([of_trial[t.key] for t in trials if t.task.name == name and t.key in of_trial], workers)
        for name in dict.fromkeys(trial.task.name for trial in trials)
    }
    known = [of_trial[trial.key] for trial in trials if trial.key in of_trial]
    seconds = spent + makespan(known, workers) if known else None
    tasks = {name: s for name, s in of_task.items() if s}
    return Estimate(seconds, len(trials) - len(known), of_trial, tasks, workers, processor)


def makespan(seconds: Iterable[float], workers: int, busy: Sequence[float] = ()) -> float:
    """How long workers take for jobs that are handed out in order, some workers being busy for a while.

    >>> makespan([3.0, 1.0, 1.0, 2.0], 2), makespan([1.0], 2, busy=[5.0, 2.0]), makespan([], 2)
    (4.0, 5.0, 0.0)
    """
    free = [*busy, *([0.0] * (workers - len(busy)))]
    heapq.heapify(free)
    for job in seconds:
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free, default=0.0)


class TimeLeft:
    """How long the trials that have not finished still take, by the estimate and by how the others went.

    Without an estimate, or for trials that it lacks, a step is taken to last as long as those of the same task did, or
    of any.

    Args:
        clock: Seconds from anywhere on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Trial] = {}
        self._expected: dict[str, float] = {}
        self._workers = 1
        self._started: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._took: dict[str, tuple[Trial, float, int]] = {}

    def plan(self, trials: Sequence[Trial]) -> None:
        """Take more trials, which are not planned yet, into account."""
        self._open |= {trial.key: trial for trial in trials}

    def take(self, found: Estimate) -> None:
        """Go by an estimate from now on."""
        self._expected |= found.of_trial
        self._workers = max(self._workers, found.workers)

    def start(self, trial: Trial) -> None:
        """A worker has begun with a trial."""
        self._started[trial.key], self._steps[trial.key] = self._clock(), 0
        self._workers = max(self._workers, len(self._started))

    def progress(self, trial: Trial, steps: int) -> None:
        """So many steps of a trial are done."""
        self._steps[trial.key] = steps
        self._took[trial.key] = (trial, self._clock() - self._started[trial.key], steps)

    def done(self, trial: Trial) -> None:
        """A trial has finished, or was kept from an earlier run."""
        self._open.pop(trial.key, None)
        self._steps.pop(trial.key, None)
        begun = self._started.pop(trial.key, None)
        if begun is not None:
            self._took[trial.key] = (trial, self._clock() - begun, trial.steps)

    def seconds(self) -> float | None:
        """Seconds until the last trial ends; None while nothing tells."""
        rest: dict[str, float] = {}
        pace = self._pace()
        for key, trial in self._open.items():
            whole = self._whole(trial, pace)
            if whole is None:
                return None
            begun = self._started.get(key)
            rest[key] = whole if begun is None else max(0.0, whole * (1 - self._steps[key] / trial.steps))
            if begun is not None and key in self._took:
                rest[key] = max(0.0, rest[key] - (self._clock() - begun - self._took[key][1]))
            elif begun is not None:
                rest[key] = max(0.0, rest[key] - (self._clock() - begun))
        busy = [rest[key] for key in rest if key in self._started]
        return makespan([rest[key] for key in rest if key not in self._started], self._workers, busy)

    def _whole(self, trial: Trial, pace: float) -> float | None:
        if trial.key in self._expected:
            return pace * self._expected[trial.key]
        took = [one for one in self._took.values() if one[2]]
        took = [one for one in took if one[0].task.name == trial.task.name] or took
        steps = sum(done for _, _, done in took)
        return trial.steps * sum(seconds for _, seconds, _ in took) / steps if steps else None

    def _pace(self) -> float:
        """By what the estimates are to be multiplied: what trials took so far over what was expected of them."""
        known = [
            (seconds, self._expected[key] * done / trial.steps)
            for key, (trial, seconds, done) in self._took.items()
            if key in self._expected
        ]
        prior = _TRUST * sum(self._expected.values())
        expected = sum(expected for _, expected in known) + prior
        return (sum(seconds for seconds, _ in known) + prior) / expected if expected else 1.0


def in_words(seconds: float) -> str:
    """A duration, as exact as an estimate is.

    >>> in_words(3.2), in_words(44.0), in_words(171.0), in_words(9000.0)
    ('5 s', '45 s', '2.9 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
