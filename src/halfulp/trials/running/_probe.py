"""Probe: a few steps of a trial, timed, from which the seconds of all trials like it follow."""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..tasks import Batch, Data
from ._plan import Trial

# The first steps of a process import and compile: they are run before the clock starts.
_WARM, _TIMED = 2, 12
# Of a short trial no more than this part is timed, but never less than tells a median.
_PART, _FEWEST = 4, 3
# A loop of a task's own has no batches to cut off: it is run with so few steps.
_OWN_LOOP = 60
# Shorter trials take about as long as it takes to time them.
_SHORTEST = 10
_CHUNK = 256
# What two recipes may differ in and still take about as long.
_ALIKE = ("name", "description", "weight_update", "perturb", "gradient_scale", "gradient_rounding")

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a trial takes on one worker: seconds per step, and seconds before the first and after the last one."""

    step: float
    rest: float

    def seconds(self, steps: int) -> float:
        """Seconds of a whole trial.

        >>> Cost(step=0.01, rest=2.0).seconds(300)
        5.0
        """
        return self.rest + steps * self.step


@dataclasses.dataclass(frozen=True)
class Probe:
    """The order to time a trial in place of training it."""

    trial: Trial


def cost_class(trial: Trial) -> str:
    """Return what trials of about the same cost have in common: the task, the steps, dtypes and arithmetic."""
    recipe = {name: value for name, value in trial.recipe.to_dict().items() if name not in _ALIKE}
    return json.dumps([trial.task.settings(), trial.steps, recipe], default=repr, sort_keys=True)


def probes(trials: Sequence[Trial]) -> list[Probe]:
    """One probe per class of cost; none of trials below ten steps, or that run in the process that asks for them."""
    first: dict[str, Trial] = {}
    for trial in trials:
        if trial.steps >= _SHORTEST and not trial.task.in_process:
            first.setdefault(cost_class(trial), trial)
    return [Probe(trial) for trial in first.values()]


def measure(trial: Trial, data: Data, clock: Clock = time.perf_counter) -> Cost | None:
    """Run a few steps of a trial and a part of its evaluation; None where that is no measurement.

    An error is left to the trial itself, which meets it too and says more.
    """
    try:
        if hasattr(trial.task, "trial"):
            return _own_loop(trial, data, clock)
        _run(trial, data, _WARM, clock)
        begun = clock()
        marks = _run(trial, data, min(_TIMED, max(_FEWEST, trial.steps // _PART)), clock)
        return _cost(begun, marks, clock(), _evaluated(trial, data))
    except Exception:
        return None


def _run(trial: Trial, data: Data, steps: int, clock: Clock) -> list[float]:
    """Train so many steps of a trial and judge the first examples; the times at which steps began, and the end."""
    from ._trial import run

    marks: list[float] = []

    def timed(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in itertools.islice(batches, steps):
            marks.append(clock())
            yield batch
        marks.append(clock())

    inputs, targets = data.validation
    part = dataclasses.replace(data, validation=(inputs[:_CHUNK], targets[:_CHUNK]))
    run(trial.task, trial.recipe, trial.seed, trial.steps, part, take=timed)
    return marks


def _evaluated(trial: Trial, data: Data) -> float:
    """How many times as long as a probe a trial evaluates: all examples, twice, and perhaps those it trained on."""
    whole = max(1.0, len(data.validation[0]) / _CHUNK)
    train = len(data.train[0]) / _CHUNK if trial.task.judged_by == "train_loss" else 0.0
    return (2 * whole + train) / (2 + train)


def _own_loop(trial: Trial, data: Data, clock: Clock) -> Cost | None:
    marks: list[float] = []

    def report(step: int, loss: float) -> None:
        marks.append(clock())

    steps = min(_OWN_LOOP, max(_FEWEST, trial.steps // 20))
    own: Any = trial.task
    begun = clock()
    own.trial(trial.recipe, trial.seed, steps, data, report)
    return _cost(begun, marks, clock(), 1.0)


def _cost(begun: float, marks: Sequence[float], ended: float, evaluations: float) -> Cost | None:
    """The cost by the times at which steps began or ended, so that the first and the last bound all that were timed.

    >>> _cost(0.0, [1.0, 1.5, 2.0, 2.5], 3.5, 3.0)
    Cost(step=0.5, rest=4.0)
    """
    if len(marks) < 3:
        return None
    step = statistics.median(later - earlier for earlier, later in itertools.pairwise(marks))
    return Cost(step, max(0.0, marks[0] - begun) + evaluations * max(0.0, ended - marks[-1]))
