"""What a person sees while trials run."""

import math
import sys
import time
from collections.abc import Callable
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
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.console = Console(file=sys.stderr, highlight=False)
        self._clock = clock
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            *(BarColumn(bar_width=28), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
            console=self.console,
            transient=True,
            speed_estimate_period=math.inf,
            get_time=clock,
            disable=not self.console.is_terminal,
        )
        self._bars.add_task("", total=0)
        self.bar = self._bars.tasks[0]
        self._steps: dict[str, int] = {}
        self._begun: dict[str, float] = {}
        self._ended: set[str] = set()
        self.trial_count = self.kept_count = 0

    def __enter__(self) -> "TrialProgress":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, kind: str, trial: Trial | None, content: Any) -> None:
        """Show one event of ``compare``."""
        if trial is None:  # the plan
            new = [one for one in content if one.key not in self._steps]
            self._steps |= {one.key: 0 for one in new}
            self.trial_count = len(self._steps)
            total = (self.bar.total or 0) + sum(one.steps for one in new)
            self._bars.update(self.bar.id, description=f"{self.trial_count} trials", total=total)
        elif kind == "start":
            self._begun[trial.key] = self._clock()
            self._advance_bar(trial, 0)
        elif kind == "progress":
            self._advance_bar(trial, content[0])
        elif trial.key not in self._ended:
            self._end_trial(kind, trial, content)

    def _end_trial(self, kind: str, trial: Trial, content: Any) -> None:
        """Print the line of a trial that was trained, failed or was kept; its remaining steps count as done."""
        self._ended.add(trial.key)
        if kind == "reused":
            how = "kept"
            self._bars.update(self.bar.id, total=(self.bar.total or 0) - trial.steps)
        else:
            self._advance_bar(trial, trial.steps)
            how = f"{self._clock() - self._begun[trial.key]:.1f} s"
        if kind == "failed":
            said = content
        else:
            self.kept_count += 1
            loss = content["float32"]["validation"]["loss"]
            said = f"validation loss {loss:.4f}" if loss is not None else f"diverged at step {content['diverged_at']}"
        left = self.bar.time_remaining if len(self._ended) < self.trial_count else None
        how += f", about {describe_duration(left)} left" if left else ""
        count = f"{len(self._ended):>{len(str(self.trial_count))}}/{self.trial_count}"
        style = "red" if kind == "failed" else None
        self.console.print(f"{count}  {trial!s:<38} {said}  {how}", style=style, markup=False, soft_wrap=True)

    def _advance_bar(self, trial: Trial, step: int) -> None:
        """Move the bar by a trial's steps."""
        self._bars.advance(self.bar.id, step - self._steps[trial.key])
        self._steps[trial.key] = step
