"""What a person sees while trials run, and how long they will take by a few timed steps of each kind."""

import dataclasses
import heapq
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..tasks import Data
from ._plan import Trial

# The first steps of a process import and compile: they are run before the clock starts.
_WARM, _TIMED = 2, 36
# Of a short trial no more than this part is timed, but never less than tells a median.
_PART, _FEWEST = 4, 3
# Shorter trials take about as long as it takes to time them.
_SHORTEST = 10
_CHUNK = 256
# What two recipes may differ in and still take about as long.
_ALIKE = ("name", "description", "weight_update", "perturb", "gradient_scale", "gradient_rounding")

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time a trial takes on one worker: seconds per step, and seconds before the first and after the last one."""

    step: float
    rest: float


def name_cost_class(trial: Trial) -> str:
    """Return a key of trials of about the same cost: the task, the steps, dtypes and arithmetic."""
    recipe = {name: value for name, value in trial.recipe.to_dict().items() if name not in _ALIKE}
    return json.dumps([trial.task.settings(), trial.steps, recipe], default=repr, sort_keys=True)


def choose_timed(trials: Sequence[Trial]) -> list[Trial]:
    """Return one trial per class of cost; none below ten steps, or that run in the asking process."""
    first: dict[str, Trial] = {}
    for trial in trials:
        if trial.steps >= _SHORTEST and not trial.task.in_process:
            first.setdefault(name_cost_class(trial), trial)
    return list(first.values())


def measure_cost(trial: Trial, data: Data, clock: Clock = time.perf_counter) -> Cost | None:
    """Time a short run of a trial by its reports, and a part of its evaluation; return None where that fails.

    An error is left to the trial itself, which meets it too and says more.
    """
    from ._trial import run

    inputs, targets = data.validation
    part = dataclasses.replace(data, validation=(inputs[:_CHUNK], targets[:_CHUNK]))
    steps = min(_TIMED, max(_FEWEST, trial.steps // _PART))
    marks: list[float] = []
    try:
        run(trial.task, trial.recipe, trial.seed, _WARM, part)
        begun = clock()
        run(trial.task, trial.recipe, trial.seed, steps, part, lambda step, loss: marks.append(clock()))
        ended = clock()
    except Exception:
        return None
    if len(marks) < _FEWEST:  # it diverged
        return None
    step = statistics.median(later - earlier for earlier, later in itertools.pairwise(marks))
    before = max(0.0, marks[0] - begun - step)
    return Cost(step, before + _compare_evaluations(trial, data) * max(0.0, ended - marks[-1]))


def _compare_evaluations(trial: Trial, data: Data) -> float:
    """Return the time of a trial's evaluations (twice all, perhaps the training data) over that of a timed run's."""
    if hasattr(trial.task, "trial"):  # a loop of its own evaluates what it likes
        return 1.0
    whole = max(1.0, len(data.validation[0]) / _CHUNK)
    train = len(data.train[0]) / _CHUNK if trial.task.judged_by == "train_loss" else 0.0
    return (2 * whole + train) / (2 + train)


# What was measured while training counts as much as the probes once it covers this share of the whole.
_TRUST = 0.05


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated duration of a comparison on this machine, in all and by trial.

    Attributes:
        seconds: From start to end of the training, the timing of a few steps included, of the trials that were timed;
            None where there are none.
        untimed: How many trials were not timed: the whole takes longer by them.
        of_trial: Seconds of each timed trial on its worker, by key.
        of_task: Seconds of the trials of each task, were they alone.
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
    """Add up the trials' costs by class over the workers, as each takes the next trial as soon as it is free.

    The costs are those of as many busy workers as trials were timed; more workers than cores share these. The seconds
    spent until now count as well.
    """
    timed = sum(cost is not None for cost in costs.values())
    crowding = max(1.0, workers / cores) / max(1.0, min(workers, timed or 1) / cores)
    of_trial = {}
    for trial in trials:
        cost = costs.get(name_cost_class(trial))
        if cost is not None:
            of_trial[trial.key] = crowding * (cost.rest + trial.steps * cost.step)
    of_task = {
        name: makespan([of_trial[t.key] for t in trials if t.task.name == name and t.key in of_trial], workers)
        for name in dict.fromkeys(trial.task.name for trial in trials)
    }
    known = [of_trial[trial.key] for trial in trials if trial.key in of_trial]
    seconds = spent + makespan(known, workers) if known else None
    tasks = {name: s for name, s in of_task.items() if s}
    return Estimate(seconds, len(trials) - len(known), of_trial, tasks, workers, processor)


def makespan(seconds: Iterable[float], workers: int, busy: Sequence[float] = ()) -> float:
    """Return how long workers, some busy for a while, take for jobs that are handed out in order.

    >>> makespan([3.0, 1.0, 1.0, 2.0], 2), makespan([1.0], 2, busy=[5.0, 2.0]), makespan([], 2)
    (4.0, 5.0, 0.0)
    """
    free = [*busy, *([0.0] * (workers - len(busy)))]
    heapq.heapify(free)
    for job in seconds:
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free, default=0.0)


class TimeLeft:
    """A running estimate of the time that unfinished trials still take, corrected by those that finished.

    Without an estimate, or for trials that it lacks, a step is taken to last as long as those of the same task did, or
    of any.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Trial] = {}
        self._expected: dict[str, float] = {}
        self._workers = 1
        self._started: dict[str, float] = {}
        # Of each trial that was begun, the seconds until its latest report and the steps done by then.
        self._took: dict[str, tuple[Trial, float, int]] = {}

    def plan(self, trials: Sequence[Trial]) -> None:
        """Add more trials to the plan."""
        self._open |= {trial.key: trial for trial in trials}

    def take(self, found: Estimate) -> None:
        """Use an estimate from now on."""
        self._expected |= found.of_trial
        self._workers = max(self._workers, found.workers)

    def start(self, trial: Trial) -> None:
        """Note that a worker has begun with a trial."""
        self._started[trial.key] = self._clock()
        self._took[trial.key] = (trial, 0.0, 0)
        self._workers = max(self._workers, len(self._started))

    def progress(self, trial: Trial, steps: int) -> None:
        """Note that so many steps of a trial are done."""
        self._took[trial.key] = (trial, self._clock() - self._started[trial.key], steps)

    def done(self, trial: Trial) -> None:
        """Note that a trial has finished, or was kept from an earlier run."""
        self._open.pop(trial.key, None)
        begun = self._started.pop(trial.key, None)
        if begun is not None:
            self._took[trial.key] = (trial, self._clock() - begun, trial.steps)

    def seconds(self) -> float | None:
        """Return the seconds until the last trial ends; None before anything was measured."""
        waiting, busy, pace = [], [], self._measure_pace()
        for key, trial in self._open.items():
            whole = self._estimate_trial(trial, pace)
            if whole is None:
                return None
            if key not in self._started:
                waiting.append(whole)
                continue
            _, seconds, steps = self._took[key]
            silent = self._clock() - self._started[key] - seconds
            busy.append(max(0.0, whole * (1 - steps / trial.steps) - silent))
        return makespan(waiting, self._workers, busy)

    def _estimate_trial(self, trial: Trial, pace: float) -> float | None:
        """Return the seconds of a whole trial; None before anything was measured."""
        if trial.key in self._expected:
            return pace * self._expected[trial.key]
        took = [one for one in self._took.values() if one[2]]
        took = [one for one in took if one[0].task.name == trial.task.name] or took
        steps = sum(done for _, _, done in took)
        return trial.steps * sum(seconds for _, seconds, _ in took) / steps if steps else None

    def _measure_pace(self) -> float:
        """Return the factor of the estimates: the time that trials took over the time expected."""
        known = [
            (seconds, self._expected[key] * done / trial.steps)
            for key, (trial, seconds, done) in self._took.items()
            if key in self._expected
        ]
        prior = _TRUST * sum(self._expected.values())
        expected = sum(expected for _, expected in known) + prior
        return (sum(seconds for seconds, _ in known) + prior) / expected if expected else 1.0


def describe_duration(seconds: float) -> str:
    """Return a duration in words, rounded as coarsely as an estimate deserves.

    >>> describe_duration(3.2), describe_duration(44.0), describe_duration(171.0), describe_duration(9000.0)
    ('5 s', '45 s', '2.9 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """A listener for ``compare`` and a context manager; live bars on a terminal, a line per trial elsewhere.

    Both say about how long the rest takes.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.console = Console(file=sys.stderr, highlight=False)
        self.live = self.console.is_terminal
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.running: dict[str, Any] = {}
        self.started: dict[str, float] = {}
        self.planned: set[str] = set()
        self.ended: set[str] = set()
        self.total = self.steps = 0
        self.finished = self.kept = 0
        self.overall: Any = None
        self.left = TimeLeft()

    def __enter__(self) -> "Progress":
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, kind: str, trial: Trial | None, content: Any) -> None:
        """Show one event of ``compare``."""
        getattr(self, f"_{kind}")(trial, content)

    def _plan(self, trial: None, trials: list[Trial]) -> None:
        new = [one for one in trials if one.key not in self.planned]
        self.left.plan(new)
        self.planned |= {one.key for one in new}
        self.total, self.steps = len(self.planned), self.steps + sum(one.steps for one in new)
        if self.overall is None:
            self.overall = self.bars.add_task("", total=self.steps, said="")
        self.bars.update(self.overall, description=f"[bold]{self.total} trials", total=self.steps)

    def _timing(self, trial: None, kinds: int) -> None:
        said = f"timing a few steps of {kinds} kind{'' if kinds == 1 else 's'} of trial"
        self.bars.update(self.overall, said=said)

    def _estimate(self, trial: None, found: Estimate) -> None:
        self.left.take(found)
        self.bars.update(self.overall, said="")
        if found.seconds is None:
            self.console.print("How long it takes is not known: no trial could be timed.", soft_wrap=True)
            return
        workers = f"{found.workers} worker{'' if found.workers == 1 else 's'} of one thread"
        each = ", ".join(f"{task} {describe_duration(seconds)}" for task, seconds in found.of_task.items())
        each = f" ({each})" if len(found.of_task) > 1 else ""
        about = "At least" if found.untimed else "About"
        total = found.untimed + len(found.of_trial)
        rest = f"; {found.untimed} of {total} trials were not timed" if found.untimed else ""
        said = f"{about} {describe_duration(found.seconds)}{each} by {workers} on {found.processor}{rest}."
        self.console.print(said, soft_wrap=True)
        self._show_left()

    def _show_left(self) -> None:
        """Write the time left beside the bar of all trials."""
        left = self.left.seconds() if self.live else None
        if left is not None:
            self.bars.update(self.overall, said=f"about {describe_duration(left)} left")

    def _reused(self, trial: Trial, result: Any) -> None:
        if trial.key in self.ended:
            return
        self._end(trial)
        self.kept += 1
        self._print_result(trial, result, "kept")

    def _start(self, trial: Trial, content: None) -> None:
        self.running[trial.key] = self.bars.add_task(f"  {trial}", total=trial.steps, said="")
        self.left.start(trial)
        self.started[trial.key] = time.monotonic()

    def _progress(self, trial: Trial, content: tuple[int, float]) -> None:
        step, loss = content
        task = self.running[trial.key]
        done = self._find_bar(task).completed
        self.left.progress(trial, step)
        self.bars.update(task, completed=step, said=f"loss {loss:.4f}")
        self.bars.advance(self.overall, step - done)
        self._show_left()

    def _done(self, trial: Trial, result: Any) -> None:
        self._end(trial)
        self.kept += 1
        self._print_result(trial, result, f"{time.monotonic() - self.started[trial.key]:.1f} s")

    def _failed(self, trial: Trial, line: str) -> None:
        from rich.markup import escape

        self._end(trial)
        self._print_end(trial, f"[red]{escape(line)}[/red]")

    def _end(self, trial: Trial) -> None:
        """Take away the bar of a trial, whose remaining steps count as done."""
        self.ended.add(trial.key)
        self.finished += 1
        self.left.done(trial)
        task = self.running.pop(trial.key, None)
        done = 0.0
        if task is not None:
            done = self._find_bar(task).completed
            self.bars.remove_task(task)
        self.bars.advance(self.overall, trial.steps - done)
        self._show_left()

    def _find_bar(self, task: Any) -> Any:
        """Return the bar that rich knows by a number."""
        return self.bars.tasks[self.bars.task_ids.index(task)]

    def _print_result(self, trial: Trial, result: Any, how: str) -> None:
        loss = result["float32"]["validation"]["loss"]
        said = f"validation loss {loss:.4f}" if loss is not None else f"diverged at step {result['diverged_at']}"
        left = self.left.seconds()
        rest = f", about {describe_duration(left)} left" if left and not self.live else ""
        self._print_end(trial, f"{said}  [dim]{how}{rest}[/dim]")

    def _print_end(self, trial: Trial, said: str) -> None:
        count = f"{self.finished:>{len(str(self.total))}}/{self.total}"
        self.console.print(f"[dim]{count}[/dim]  {trial!s:<38} {said}", soft_wrap=True)
