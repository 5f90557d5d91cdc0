"""What a person sees while trials run, and how long they will take by a few timed steps of each kind."""

import dataclasses
import heapq
import itertools
import json
import math
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


def measure_cost(trial: Trial, data: Data, clock: Clock = time.perf_counter) -> float | None:
    """Return the seconds of a trial on one worker, by a short run and a part of its evaluation; None where that fails.

    An error is left to the trial itself, which meets it too and says more.
    """
    from ._trial import run

    inputs, targets = data.validation
    part = dataclasses.replace(data, validation=(inputs[:_CHUNK], targets[:_CHUNK]))
    steps = min(_TIMED, max(_FEWEST, trial.steps // _PART))
    marks: list[float] = []
    try:
        run(dataclasses.replace(trial, steps=_WARM), part)
        begun = clock()
        run(dataclasses.replace(trial, steps=steps), part, lambda step, loss: marks.append(clock()))
        ended = clock()
    except Exception:
        return None
    if len(marks) < _FEWEST:  # it diverged
        return None
    step = statistics.median(later - earlier for earlier, later in itertools.pairwise(marks))
    before = max(0.0, marks[0] - begun - step)
    return before + trial.steps * step + _compare_evaluations(trial, data) * max(0.0, ended - marks[-1])


def _compare_evaluations(trial: Trial, data: Data) -> float:
    """Return the time of a trial's evaluations (twice all, perhaps the training data) over that of a timed run's."""
    if hasattr(trial.task, "trial"):  # a loop of its own evaluates what it likes
        return 1.0
    whole = max(1.0, len(data.validation[0]) / _CHUNK)
    train = len(data.train[0]) / _CHUNK if trial.task.judged_by == "train_loss" else 0.0
    return (2 * whole + train) / (2 + train)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated duration of a comparison on this machine, in all and by trial.

    Attributes:
        seconds: From start to end of the training, the timing of a few steps included, of the trials that were timed;
            None where there are none.
        untimed: How many trials were not timed: the whole takes longer by them.
        of_trial: Seconds of each timed trial on its worker, by key.
    """

    seconds: float | None
    untimed: int
    of_trial: Mapping[str, float]
    workers: int
    processor: str


def estimate(
    trials: Sequence[Trial],
    costs: Mapping[str, float | None],
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
            of_trial[trial.key] = crowding * cost
    seconds = spent + makespan(of_trial.values(), workers) if of_trial else None
    return Estimate(seconds, len(trials) - len(of_trial), of_trial, workers, processor)


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Return how long workers take for jobs that are handed out in order.

    >>> makespan([3.0, 1.0, 1.0, 2.0], 2), makespan([], 2)
    (4.0, 0.0)
    """
    free = [0.0] * workers
    for job in seconds:
        heapq.heapreplace(free, free[0] + job)
    return max(free, default=0.0)


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

    Both say about how long the rest takes. The bar of all trials counts seconds if all were estimated, else steps.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
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
            speed_estimate_period=math.inf,
            get_time=clock,
            disable=not self.live,
        )
        self.overall = self.bars.add_task("", total=0, said="")
        self.trials: dict[str, Trial] = {}
        self.running: dict[str, Any] = {}
        self.ended: set[str] = set()
        self.kept = 0
        self.sizes: Mapping[str, float] = {}

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

    @property
    def total(self) -> int:
        """How many trials are planned."""
        return len(self.trials)

    def _plan(self, trial: None, trials: list[Trial]) -> None:
        new = {one.key: one for one in trials if one.key not in self.trials}
        self.trials |= new
        self.bars.update(self.overall, description=f"[bold]{self.total} trials")
        self._add_work(sum(map(self._size, new.values())))

    def _timing(self, trial: None, kinds: int) -> None:
        said = f"timing a few steps of {kinds} kind{'' if kinds == 1 else 's'} of trial"
        self.bars.update(self.overall, said=said)

    def _estimate(self, trial: None, found: Estimate) -> None:
        self.bars.update(self.overall, said="")
        if found.seconds is None:
            self.console.print("How long it takes is not known: no trial could be timed.", soft_wrap=True)
            return
        if not found.untimed:
            self.sizes = found.of_trial
            self.bars.update(self.overall, total=sum(found.of_trial.values()))
        workers = f"{found.workers} worker{'' if found.workers == 1 else 's'} of one thread"
        about = "At least" if found.untimed else "About"
        total = found.untimed + len(found.of_trial)
        rest = f"; {found.untimed} of {total} trials were not timed" if found.untimed else ""
        said = f"{about} {describe_duration(found.seconds)} by {workers} on {found.processor}{rest}."
        self.console.print(said, soft_wrap=True)

    def _reused(self, trial: Trial, result: Any) -> None:
        if trial.key not in self.ended:
            self._add_work(-self._size(trial))
            self.ended.add(trial.key)
            self.kept += 1
            self._print_result(trial, result, "kept")

    def _start(self, trial: Trial, content: None) -> None:
        self.running[trial.key] = self.bars.add_task(f"  {trial}", total=trial.steps, said="")
        self._advance(trial, 0)

    def _progress(self, trial: Trial, content: tuple[int, float]) -> None:
        step, loss = content
        self._advance(trial, step)
        self.bars.update(self.running[trial.key], said=f"loss {loss:.4f}")

    def _done(self, trial: Trial, result: Any) -> None:
        seconds = self._end(trial)
        self.kept += 1
        self._print_result(trial, result, f"{seconds:.1f} s")

    def _failed(self, trial: Trial, line: str) -> None:
        from rich.markup import escape

        self._end(trial)
        self._print_end(trial, f"[red]{escape(line)}[/red]")

    def _size(self, trial: Trial) -> float:
        return self.sizes.get(trial.key, trial.steps)

    def _add_work(self, size: float) -> None:
        self.bars.update(self.overall, total=self._find_bar(self.overall).total + size)

    def _advance(self, trial: Trial, step: int) -> None:
        """Move the bars of a trial and of all to a step, and write the time left beside them."""
        bar = self._find_bar(self.running[trial.key])
        self.bars.advance(self.overall, self._size(trial) * (step - bar.completed) / trial.steps)
        self.bars.update(bar.id, completed=step)
        if self.live:
            self.bars.update(self.overall, said=self._describe_left())

    def _end(self, trial: Trial) -> float:
        """Take away the bar of a trial, whose remaining steps count as done; return the seconds that it took."""
        self.ended.add(trial.key)
        self._advance(trial, trial.steps)
        bar = self._find_bar(self.running.pop(trial.key))
        self.bars.remove_task(bar.id)
        return float(bar.elapsed or 0.0)

    def _describe_left(self) -> str:
        """Return about how long the rest takes, by the speed so far; nothing before there is one, and at the end."""
        left = self._find_bar(self.overall).time_remaining  # of a sum that rounding may leave just below the total
        return f"about {describe_duration(left)} left" if left and len(self.ended) < self.total else ""

    def _find_bar(self, task: Any) -> Any:
        """Return the bar that rich knows by a number."""
        return self.bars.tasks[self.bars.task_ids.index(task)]

    def _print_result(self, trial: Trial, result: Any, how: str) -> None:
        loss = result["float32"]["validation"]["loss"]
        said = f"validation loss {loss:.4f}" if loss is not None else f"diverged at step {result['diverged_at']}"
        left = "" if self.live else self._describe_left()
        self._print_end(trial, f"{said}  [dim]{', '.join(filter(None, (how, left)))}[/dim]")

    def _print_end(self, trial: Trial, said: str) -> None:
        count = f"{len(self.ended):>{len(str(self.total))}}/{self.total}"
        self.console.print(f"[dim]{count}[/dim]  {trial!s:<38} {said}", soft_wrap=True)
