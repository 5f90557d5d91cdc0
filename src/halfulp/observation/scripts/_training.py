"""One training of a script: an observation while its model lives, and its record afterwards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...sinks import Outlet, Row
from .._finding import Finding, plain_causes
from .._record import Record, plain_record
from .._text import of_model
from ..findings import findings_of
from ..observing._observation import Observation, summary
from ..observing._observe import observe
from ._find import Found, Together


class Training:
    """Observes optimizers and the model that they step, without keeping them alive.

    The hooks alone hold the observation, and the optimizers the hooks: where the script lets go of its model and
    optimizers, the three go together, and what was counted until then stays here.

    Args:
        found: the model, scaler, scheduler and average.
        optimizers: its optimizers.
        interval: one step in so many is sampled.
        rows: what takes a row of each sampled step.

    Attributes:
        number: in the order of their first rows, where rows are taken; None before one.
        model: name of the model's class.
        together: whether it is of several models.
        compiled: whether some of the model runs compiled.
        optimizers: weak references.
        kinds: names of the optimizers' classes.
        span: the first and the last of the script's optimizer steps that were its own, counted over all; None before.
        record: what was counted, once it has ended.
    """

    def __init__(
        self,
        found: Found,
        optimizers: Sequence[torch.optim.Optimizer],
        interval: int,
        rows: Callable[[Training, Row], None] | None = None,
    ) -> None:
        self.number: int | None = None
        self.model: str = found.name
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = [weakref.ref(one) for one in optimizers]
        self.together: bool = isinstance(found.model, Together)
        self.compiled: bool = found.compiled
        self.kinds: list[str] = list(dict.fromkeys(type(one).__name__ for one in optimizers))
        self.interval: int = interval
        self.span: tuple[int, int] | None = None
        self.record: Record | None = None
        self._steps: int = 0
        self._overhead: float | None = None
        sinks = [] if rows is None else [Outlet("the file of JSON lines", functools.partial(rows, self))]
        observation = observe(
            found.model,
            optimizers,
            interval=interval,
            scaler=found.scaler,
            scheduler=found.scheduler,
            average=found.average,
            sinks=sinks,
        )
        observation.start()
        # Found by the garbage collector together with the observation, whose record it saves.
        vars(observation)["_guard"] = _Guard(self, observation)
        self._observation = weakref.ref(observation)

    @property
    def observation(self) -> Observation | None:
        """The observation that runs; None after the end."""
        return None if self.record is not None else self._observation()

    def end(self, observation: Observation | None = None) -> None:
        """Stop observing and keep the record alone.

        Args:
            observation: its own, where weak references to it are gone already.
        """
        observation = observation or self.observation
        if observation is None or self.record is not None:
            return
        observation.stop()
        self._steps, self._overhead = len(observation), observation.overhead
        self.record = observation.record
        vars(observation).pop("_guard", None)

    def sample_next(self) -> None:
        """Sample the next step too: the one before had begun when it was first seen."""
        observation = self.observation
        if observation is not None:
            observation.stop()
            observation.start()

    def models(self) -> list[nn.Module]:
        """Return the models that are trained together, or the one; none after the end."""
        observation = self.observation
        if observation is None:
            return []
        return list(observation.model.children()) if isinstance(observation.model, Together) else [observation.model]

    def parameters(self) -> set[int]:
        """Return the ids of its model's parameters while it runs."""
        observation = self.observation
        return set() if observation is None else {id(one) for one in observation.model.parameters()}

    def stepped(self, at: int) -> None:
        """Note a step of one of its optimizers."""
        self.span = (at if self.span is None else self.span[0], at)

    def overlaps(self, other: Training) -> bool:
        """Whether steps of both lie between each other."""
        if self.span is None or other.span is None:
            return False
        return self.span[0] < other.span[1] and other.span[0] < self.span[1]

    def __len__(self) -> int:
        observation = self.observation
        return self._steps if observation is None else len(observation)

    @property
    def findings(self) -> list[Finding]:
        """What its record shows to be wrong, the worst first; none while it runs."""
        found = [] if self.record is None else findings_of("observe", self.record)
        return [_of_named_model(one) for one in found] if self.together else found

    def to_dict(self) -> dict[str, Any]:
        """Return plain data as `Observation.to_dict` does, once it has ended."""
        assert self.record is not None
        findings = self.findings
        return {
            "findings": [finding.to_dict() for finding in findings],
            "causes": plain_causes(findings),
            "steps": len(self),
            "interval": self.interval,
            "overhead": self._overhead,
            "record": plain_record(self.record),
        }

    def __str__(self) -> str:
        assert self.record is not None
        return summary(self.record, self.findings, len(self), self.interval, self._overhead)


def _of_named_model(finding: Finding) -> Finding:
    """A finding whose code names the model that it is of, where it is of one among several."""
    names = {name.partition(".")[0] for name in finding.where}
    return replace(finding, write=of_model(finding.write, names.pop())) if len(names) == 1 else finding


class _Guard:
    """Ends a training when its observation is garbage."""

    def __init__(self, training: Training, observation: Observation) -> None:
        self._training, self._observation = training, observation

    def __del__(self) -> None:
        self._training.end(self._observation)
