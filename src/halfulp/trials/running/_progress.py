"""What a person sees while trials run."""

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ._plan import Trial

Clock = Callable[[], float]


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

    Both say about how long the rest takes, by the speed of the steps so far.
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
        self._add_work(sum(one.steps for one in new.values()))

    def _reused(self, trial: Trial, result: Any) -> None:
        if trial.key not in self.ended:
            self._add_work(-trial.steps)
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

    def _add_work(self, steps: int) -> None:
        self.bars.update(self.overall, total=self._find_bar(self.overall).total + steps)

    def _advance(self, trial: Trial, step: int) -> None:
        """Move the bars of a trial and of all to a step, and write the time left beside them."""
        bar = self._find_bar(self.running[trial.key])
        self.bars.advance(self.overall, step - bar.completed)
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
        left = self._find_bar(self.overall).time_remaining
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
