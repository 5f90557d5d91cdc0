"""What a person sees while trials run."""

import sys
from typing import Any

from ._plan import Trial


class TrialProgress:
    """A listener for ``compare`` and a context manager: a bar on a terminal, and a line per ended trial."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.console = Console(file=sys.stderr, highlight=False)
        self._bars = Progress(console=self.console, transient=True, disable=not self.console.is_terminal)
        self._bar = self._bars.add_task("")
        self._planned_steps: dict[str, int] = {}
        self._done_steps: dict[str, int] = {}
        self._ended_trial_keys: set[str] = set()

    @property
    def trial_count(self) -> int:
        """How many trials are planned."""
        return len(self._planned_steps)

    @property
    def finished_trial_count(self) -> int:
        """How many of them have ended."""
        return len(self._ended_trial_keys)

    def __enter__(self) -> "TrialProgress":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, kind: str, trial: Trial | None, content: Any) -> None:
        """Show one event of ``compare``."""
        if trial is None:  # the plan
            self._planned_steps |= {one.key: one.steps for one in content}
        elif kind == "progress":
            self._done_steps[trial.key] = content[0]
        elif kind != "start" and trial.key not in self._ended_trial_keys:
            self._ended_trial_keys.add(trial.key)
            self._done_steps[trial.key] = trial.steps
            loss = content["float32"]["validation"]["loss"]
            said = f"validation loss {loss:.4f}" if loss is not None else f"diverged at step {content['diverged_at']}"
            count = f"{self.finished_trial_count:>{len(str(self.trial_count))}}/{self.trial_count}"
            how = "  kept" if kind == "reused" else ""
            self.console.print(f"{count}  {trial!s:<38} {said}{how}", markup=False, soft_wrap=True)
        total, done = sum(self._planned_steps.values()), sum(self._done_steps.values())
        self._bars.update(self._bar, description=f"{self.trial_count} trials", total=total, completed=done)
