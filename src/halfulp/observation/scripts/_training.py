"""A training that a script runs: its observation, and the losses that its backward passes begin with."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...kernels import in_float64
from ...sinks import Outlet, Row
from .._finding import Finding, plain_causes
from .._record import Record, plain_record
from .._text import of_model
from ..findings import findings_of
from ..observing._observation import Observation, write_summary
from ..observing._observe import observe
from ._find import SCALERS, Found, Together


class Training:
    """Observes optimizers and the model that they step, without keeping them alive.

    The hooks alone hold the observation, and the optimizers the hooks: where the script lets go of its model and
    optimizers, the three go together, and what was counted until then stays here.

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
        """Return whether steps of both lie between each other."""
        if self.span is None or other.span is None:
            return False
        return self.span[0] < other.span[1] and other.span[0] < self.span[1]

    def __len__(self) -> int:
        observation = self.observation
        return self._steps if observation is None else len(observation)

    @property
    def findings(self) -> list[Finding]:
        """The problems that its record shows, the worst first; none while it runs."""
        found = [] if self.record is None else findings_of("observe", self.record)
        return [_name_model(one) for one in found] if self.together else found

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
        return write_summary(self.record, self.findings, len(self), self.interval, self._overhead)


def _name_model(finding: Finding) -> Finding:
    """Return a finding whose code uses the name of its model, where a training has several models."""
    names = {name.partition(".")[0] for name in finding.where}
    return replace(finding, write=of_model(finding.write, names.pop())) if len(names) == 1 else finding


class _Guard:
    """Ends a training when its observation is garbage."""

    def __init__(self, training: Training, observation: Observation) -> None:
        self._training, self._observation = training, observation

    def __del__(self) -> None:
        self._training.end(self._observation)


class BackwardLosses:
    """Tells a listener each loss of one element that a backward pass begins with, while the context is open.

    `torch.autograd.backward` and the scalers' `scale` are wrapped for that time. What a scaler was given is the loss;
    of what was computed from a scaled loss (a share of it, a sum), the factor between the two is taken off.

    Args:
        listener: called with the loss, detached, before its backward pass.
    """

    def __init__(self, listener: Callable[[torch.Tensor], None]) -> None:
        self._listener = listener
        self._backward: Any = None
        self._scales: dict[type, Any] = {}
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor] | None = None

    def __enter__(self) -> BackwardLosses:
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._tell_losses(self._backward)
        for kind in SCALERS:
            self._scales[kind] = kind.scale
            kind.scale = self._note_scales(kind.scale)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.autograd.backward = self._backward
        for scaler, scale in self._scales.items():
            scaler.scale = scale  # type: ignore[attr-defined]
        self._scaled = None

    def _tell_losses(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def note_and_run(tensors: Any, *args: Any, **options: Any) -> Any:
            single = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
            if isinstance(single, torch.Tensor) and single.numel() == 1:
                self._listener(self._undo_scale(single))
            return backward(tensors, *args, **options)

        return note_and_run

    def _note_scales(self, scale: Any) -> Any:
        @functools.wraps(scale)
        def noted(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                self._scaled = weakref.ref(result), result.detach(), outputs.detach()
            return result

        return noted

    def _undo_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a loss without the factor of the scaler that made it."""
        if self._scaled is None:
            return tensor.detach()
        (result, scaled, loss), self._scaled = self._scaled, None
        if result() is tensor:
            return loss
        factor = in_float64(scaled) / in_float64(loss)
        known = bool(factor.isfinite()) and bool(factor)
        return (tensor.detach() / factor.item()).to(tensor.dtype) if known else tensor.detach()
