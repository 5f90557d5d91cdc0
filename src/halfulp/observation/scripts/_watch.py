"""Watch the trainings of an unmodified script, and report what they show."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ...sinks import Row, RowFile
from .._finding import Finding, group_causes_as_dicts
from ..findings._kind import rank_by_causes
from ..page import write_page
from ._find import ScriptTraining, find_training, tell_backward_losses

# So many trainings are kept; a search over hyper-parameters may have thousands.
MOST_TRAININGS = 32
_TEXT_LOOSE_PARAMETERS = "an optimizer steps parameters that no module holds: they are not observed"


class ScriptWatch:
    """Observes whatever trains while the context is open.

    An optimizer's first step begins a training of the model that it steps, which is observed from the next step on. An
    optimizer that holds parameters of a model that is observed already ends that training and begins another, with the
    optimizers of before that live on. A training ends with its model: nothing here keeps models or optimizers alive.

    Args:
        lines: a file that gets a line of JSON of each sampled step, with the number of its training, while the script
            runs; a file that is there is begun anew by the first one.

    Attributes:
        trainings: in order; those without a step are left out at the end.
        unseen: sentences that say what could not be observed.
    """

    def __init__(self, interval: int = 50, lines: str | os.PathLike[str] | None = None) -> None:
        self.interval = interval
        self._lines = None if lines is None else RowFile(lines, anew=True)
        if self._lines is not None:
            self._lines.check()
        self._own: int = os.getpid()
        self._numbers = itertools.count(1)
        self.trainings: list[ScriptTraining] = []
        self.unseen: list[str] = []
        self._training_of: weakref.WeakKeyDictionary[Optimizer, ScriptTraining | None] = weakref.WeakKeyDictionary()
        self._used: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._left_out: int = 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> ScriptWatch:
        self._open.enter_context(tell_backward_losses(self._log_loss))
        self._open.callback(register_optimizer_step_post_hook(self.end_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        for training in self.trainings:
            training.end_observation()
        trainings = [training for training in self.trainings if len(training)]
        self.trainings = sorted(trainings, key=lambda one: math.inf if one.number is None else one.number)
        if self._left_out:
            self.unseen.append(
                f"the first {MOST_TRAININGS} trainings are kept: optimizers that began others later, "
                f"{self._left_out} in all, are not observed"
            )

    @property
    def rank(self) -> int:
        """This process's number among those that train together."""
        ranks = [one.summary.record.replica_of[0] for one in self.trainings if one.has_ended]
        return max(ranks, default=0)

    def make_report(self, ended: str | None = None) -> ScriptReport:
        """Return the report of all trainings, after the end."""
        return ScriptReport(self.trainings, list(self.unseen), ended)

    # hooks ----------------------------------------------------------------------------------------------------

    def _log_loss(self, loss: torch.Tensor) -> None:
        """Tell sampled steps their loss: each keeps the last one before its end."""
        for training in self.trainings:
            observation = training.observation
            if observation is not None and observation.recorder.sampling:
                observation.log_loss(loss)

    def end_step(self, optimizer: Optimizer, *_: object) -> None:
        """Begin a training of an optimizer that has stepped, if it has none."""
        if optimizer not in self._training_of:
            self._begin_training(optimizer)

    # beginnings -----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _begin_training(self, optimizer: Optimizer) -> None:
        """Begin a training of an optimizer and those that step the same model, unless there are too many."""
        self._training_of[optimizer] = None
        gc.collect()  # ends trainings whose model is gone
        self.trainings = [one for one in self.trainings if one.observation is not None or len(one)]
        if len(self.trainings) >= MOST_TRAININGS:
            self._left_out += 1
            return
        found = find_training([optimizer], self._used)
        if found is None:
            if _TEXT_LOOSE_PARAMETERS not in self.unseen:
                self.unseen.append(_TEXT_LOOSE_PARAMETERS)
            return
        own = {id(parameter) for parameter in found.model.parameters()}
        optimizers = [*self._end_trainings_of(own), optimizer]
        if len(optimizers) > 1:
            found = find_training(optimizers, self._used) or found
        training = ScriptTraining(found, optimizers, self.interval, None if self._lines is None else self._write_row)
        if found.scaler is not None:
            self._used.add(found.scaler)
        for one in optimizers:
            self._training_of[one] = training
        self.trainings.append(training)

    def _end_trainings_of(self, parameters: set[int]) -> list[Optimizer]:
        """End trainings of some parameters, and return their optimizers that live on."""
        ended = [
            training
            for training in self.trainings
            if (one := training.observation) is not None and any(id(p) in parameters for p in one.model.parameters())
        ]
        for training in ended:
            training.end_observation()
        if ended:
            gc.collect()
        self.trainings = [one for one in self.trainings if one not in ended or len(one)]
        return [optimizer for optimizer, training in self._training_of.items() if training in ended]

    def _write_row(self, training: ScriptTraining, row: Row) -> None:
        """Write a line; not in a process that the script has forked, which would write as if it were this one."""
        if self._lines is None or os.getpid() != self._own:
            return
        if training.number is None:
            training.number = next(self._numbers)
        self._lines.write({"training": training.number, **row})


@dataclass
class ScriptReport:
    """The ended trainings of a script.

    Attributes:
        trainings: in order, each with at least one step.
        unseen: sentences that say what could not be observed.
        ended: how the script ended, if somebody has said so.
    """

    trainings: Sequence[ScriptTraining]
    unseen: list[str] = field(default_factory=list)
    ended: str | None = None

    @property
    def findings(self) -> list[Finding]:
        """The findings of all trainings, the worst first."""
        return rank_by_causes(finding for training in self.trainings for finding in training.summary.findings)

    @property
    def steps(self) -> int:
        """Optimizer steps that were seen."""
        return sum(map(len, self.trainings))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: the findings of all trainings, and the longest one whole.

        Under `trainings` stands each: number, names of its model and optimizers, steps, its findings, and, but for the
        one that the rest is of, its record.
        """
        longest = max(self.trainings, key=len)
        of_each = [[finding.to_dict() for finding in training.summary.findings] for training in self.trainings]
        found = longest.summary.to_dict()
        findings = self.findings
        found["findings"] = [finding.to_dict() for finding in findings]
        found["causes"] = group_causes_as_dicts(findings)
        found["ended"] = self.ended
        found["trainings"] = [
            self._make_entry(number, training, findings, training is longest)
            for number, (training, findings) in enumerate(zip(self.trainings, of_each), 1)
        ]
        found["record"]["unseen"] = [*self.unseen, *found["record"].get("unseen", ())]
        return found

    def _make_entry(
        self, number: int, training: ScriptTraining, findings: list[dict[str, Any]], shown: bool
    ) -> dict[str, Any]:
        entry = {
            "number": number,
            "model": training.model,
            "optimizers": training.optimizer_names,
            "steps": len(training),
            "shown": shown,
            "findings": findings,
        }
        if not shown:
            full = training.summary.to_dict()
            entry |= {key: full[key] for key in ("interval", "overhead", "record")}
        return entry

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all."""
        write_page("observe", self.to_dict(), path)

    def __str__(self) -> str:
        unseen = [f"not observed: {said}" for said in self.unseen]
        if len(self.trainings) == 1:
            return "\n".join([str(self.trainings[0].summary), *unseen])
        return "\n\n".join([*self._describe_trainings(), *unseen])

    def _describe_trainings(self) -> list[str]:
        """Return each training's findings under a heading; shortened where they repeat an earlier one's."""
        said: list[str] = []
        before: dict[tuple[Any, ...], int] = {}
        for number, training in enumerate(self.trainings, 1):
            names = ", ".join(training.optimizer_names)
            head = f"training {number} of {len(self.trainings)}: {training.model}, {names}"
            key = (training.model, *((one.code, one.severity, one.where) for one in training.summary.findings))
            first = before.setdefault(key, number)
            alike = f"{head}; {len(training)} steps, whose findings are those of training {first}"
            said.append(f"{head}\n{training.summary}" if first == number else alike)
        return said
