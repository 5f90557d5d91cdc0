"""Progress of trials on stderr: live bars on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

from ._estimate import Estimate, TimeLeft, describe_duration
from ._plan import Trial


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
        self.estimated = False

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
        self.estimated = not found.untimed
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
        """Write the time left beside the bar of all trials, which it moves where it was estimated from the start."""
        left = self.left.seconds() if self.live else None
        if left is None:
            return
        self.bars.update(self.overall, said=f"about {describe_duration(left)} left")
        if self.estimated:
            spent = self._find_bar(self.overall).elapsed or 0.0
            self.bars.update(self.overall, total=spent + left, completed=spent)

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
