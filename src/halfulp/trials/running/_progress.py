"""What a person sees while trials run."""

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ._plan import Trial


def describe_duration(seconds: float) -> str:
    """Return a duration in words, rounded as coarsely as an estimate deserves.

    >>> describe_duration(3.2), describe_duration(44.0), describe_duration(171.0), describe_duration(9000.0)
    ('5 s', '45 s', '2.9 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class TrialProgress:
    """A listener for ``compare`` and a context manager: a bar of all steps on a terminal, and a line per ended trial.

    Both say about how long the rest takes, by the speed of the steps so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.console = Console(file=sys.stderr, highlight=False)
        self.is_live = self.console.is_terminal
        self._clock = clock
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
            speed_estimate_period=math.inf,
            get_time=clock,
            disable=not self.is_live,
        )
        self._bars.add_task("", total=0, left="")
        self.bar = self._bars.tasks[0]
        self._trials: dict[str, Trial] = {}
        self._steps: dict[str, int] = {}
        self._begun: dict[str, float] = {}
        self._ended: set[str] = set()
        self.kept_count = 0

    def __enter__(self) -> "TrialProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, kind: str, trial: Trial | None, content: Any) -> None:
        """Show one event of ``compare``."""
        if trial is None:  # the plan
            new = {one.key: one for one in content if one.key not in self._trials}
            self._trials |= new
            total = (self.bar.total or 0) + sum(one.steps for one in new.values())
            self._bars.update(self.bar.id, description=f"{self.trial_count} trials", total=total)
        elif kind == "start":
            self._begun[trial.key] = self._clock()
            self._advance_bar(trial, 0)
        elif kind == "progress":
            self._advance_bar(trial, content[0])
        elif trial.key not in self._ended:
            self._end_trial(kind, trial, content)

    @property
    def trial_count(self) -> int:
        """How many trials are planned."""
        return len(self._trials)

    def _end_trial(self, kind: str, trial: Trial, content: Any) -> None:
        """Print the line of a trial that was trained, failed or was kept; its remaining steps count as done."""
        self._ended.add(trial.key)
        if kind == "reused":
            self._bars.update(self.bar.id, total=(self.bar.total or 0) - trial.steps)
        else:
            self._advance_bar(trial, trial.steps)
        how = ["kept" if kind == "reused" else f"{self._clock() - self._begun[trial.key]:.1f} s"]
        if kind == "failed":
            said = content
        else:
            self.kept_count += 1
            loss = content["float32"]["validation"]["loss"]
            said = f"validation loss {loss:.4f}" if loss is not None else f"diverged at step {content['diverged_at']}"
            how += [] if self.is_live else filter(None, [self._describe_time_left()])
        count = f"{len(self._ended):>{len(str(self.trial_count))}}/{self.trial_count}"
        line = f"{count}  {trial!s:<38} {said}  {', '.join(how)}"
        self.console.print(line, style="red" if kind == "failed" else None, markup=False, soft_wrap=True)

    def _advance_bar(self, trial: Trial, step: int) -> None:
        """Move the bar by a trial's steps, and write the time left beside it."""
        self._bars.advance(self.bar.id, step - self._steps.get(trial.key, 0))
        self._steps[trial.key] = step
        self._bars.update(self.bar.id, left=self._describe_time_left())

    def _describe_time_left(self) -> str:
        """Return about how long the rest takes, by the speed so far; nothing before there is one, and at the end."""
        left = self.bar.time_remaining
        return f"about {describe_duration(left)} left" if left and len(self._ended) < self.trial_count else ""
