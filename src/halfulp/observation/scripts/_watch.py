"""Watch the training of an unmodified script, and report what it shows."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ...sinks import Outlet, Row, RowFile
from ..observing._observation import Observation, RunSummary
from ..observing._observe import observe
from ..page import write_page
from ._find import find_scaler, find_trained_model, listen_to_backward_losses


class ScriptWatch:
    """Observes what trains while the context is open, as one run.

    The models of all optimizers that make their first step before one of them makes its second are observed together,
    from the second step on. They live until the end of the watch. A .jsonl file, begun anew, gets a line of JSON of
    each sampled step.
    """

    def __init__(self, interval: int = 50, lines: str | os.PathLike[str] | None = None) -> None:
        self.interval = interval
        # None before the first step.
        self.observation: Observation | None = None
        # Sentences that say what could not be observed.
        self.unseen: list[str] = []
        self._lines = None if lines is None else RowFile(lines, anew=True)
        if self._lines is not None:
            self._lines.check()
        self._own: int = os.getpid()
        self._observed: list[Optimizer] = []
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> ScriptWatch:
        self._open.enter_context(listen_to_backward_losses(self._log_loss))
        self._open.callback(register_optimizer_step_post_hook(self._end_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self.observation is not None:
            self.observation.stop()

    @property
    def rank(self) -> int:
        """This process's number among those that train together."""
        return 0 if self.observation is None else self.observation.record.replica_of[0]

    def make_report(self, ended: str | None = None) -> ScriptReport | None:
        """Return the report, after the end; None where no step was observed."""
        if self.observation is None or not len(self.observation):
            return None
        return ScriptReport(self.observation.summarize(), list(self.unseen), ended)

    def _log_loss(self, loss: torch.Tensor) -> None:
        """Tell a sampled step its loss: it keeps the last one before its end."""
        if self.observation is not None and self.observation.recorder.sampling:
            self.observation.log_loss(loss)

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._known:
            self._known.add(optimizer)
            why_not = self._add_optimizer(optimizer)
            if why_not is not None and why_not not in self.unseen:
                self.unseen.append(why_not)

    @torch.compiler.disable
    def _add_optimizer(self, optimizer: Optimizer) -> str | None:
        """Begin the observation anew with one more optimizer; return why not, where it is too late or has no model."""
        if self.observation is not None and len(self.observation):
            return (
                f"{type(optimizer).__name__} made its first step when others had made two: what it steps is not "
                "observed; put `with hu.observe(model, optimizer) as seen:` around that training in the script"
            )
        model = find_trained_model([*self._observed, optimizer])
        if model is None:
            return "an optimizer steps parameters that no module holds: they are not observed"
        self._observed.append(optimizer)
        if self.observation is not None:
            self.observation.stop()
        sinks = [] if self._lines is None else [Outlet("the file of JSON lines", self._write_row)]
        observed = observe(model, self._observed, interval=self.interval, scaler=find_scaler(), sinks=sinks)
        self.observation = observed.start()
        return None

    def _write_row(self, row: Row) -> None:
        """Write a line; not in a process that the script has forked, which would write as if it were this one."""
        if self._lines is not None and os.getpid() == self._own:
            self._lines.write(row)


class ScriptReport(NamedTuple):
    """What was observed of a script's training, in sentences what was not, and how the script ended, if known."""

    summary: RunSummary
    unseen: list[str]
    ended: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: that of an observation, and how the script ended."""
        found = self.summary.to_dict()
        found["record"]["unseen"] = [*self.unseen, *found["record"]["unseen"]]
        return {**found, "ended": self.ended}

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all."""
        write_page("observe", self.to_dict(), path)

    def __str__(self) -> str:
        return "\n".join([str(self.summary), *(f"not observed: {said}" for said in self.unseen)])
