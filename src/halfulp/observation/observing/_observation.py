"""Observation: a watched run, its hooks from step to step, and what they found."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...optim import EMA
from ...optim import Optimizer as OwnOptimizer
from ...optim._gradient_release import StepWatcher
from ...optim.parameters._local_tensors import memory
from ...sinks import Sink
from .._finding import Finding, listing, plain_causes
from .._record import Record, StepRecord, plain_record
from .._text import times
from ..findings import findings_of
from ..page import write_page
from ..sampling._candidates import AnyFormat
from ..sampling._sampler import prepare_kernels
from ._averages import WeightAverages
from ._expectations import Asked, Expectations, Formats, Quantized, checked
from ._gradient_hooks import GradientHooks
from ._history import History, LossScales, loss_gap
from ._module_hooks import ModuleHooks
from ._notebook import Notebook, watch, watching
from ._optimizers import Optimizers, Parameters
from ._ranks import Ranks
from ._sinks import Sinks
from ._updates import Updates

# Losses of sampled steps that tell how far neighbouring ones are apart.
RECENT_LOSSES = 256


class Observation(StepWatcher):
    """A watched run; `observe` makes it.

    Use it as a context, or call `start` and `stop`. Reading `record` or `findings` is allowed at any time.

    Attributes:
        model: the model.
        optimizers: its optimizers.
        interval: one step in so many is sampled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        interval: int,
        scaler: torch.amp.GradScaler | None,
        scheduler: Any | None,
        average: EMA | nn.Module | None,
        expect: Asked | None,
        check: bool,
        quantized: Formats | None,
        formats: Sequence[AnyFormat],
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._steps = Optimizers(optimizers)
        self.model: nn.Module = model
        self.optimizers: list[torch.optim.Optimizer] = self._steps.all
        self.interval: int = interval
        self.book: Notebook = Notebook(formats, Quantized(model, quantized))
        self._parameters = Parameters(model, self.optimizers, self.book.record)
        self._scales = LossScales(scaler, scheduler)
        self._history = History(self.book.record.history)
        self._expectations = Expectations(model, checked(expect))
        self._modules = ModuleHooks(self.book, model, self._expectations, check)
        self._averages = WeightAverages(self.book, average, model)
        self._ranks = Ranks(self.book, model, self._parameters.named)
        self._gradients = GradientHooks(self.book, self._parameters.trainable())
        self._updates = {
            id(one): Updates(self.book, one, self._steps.followed(one, self._parameters.names))
            for one in self.optimizers
        }
        self._sinks = Sinks(self.book, sinks) if sinks else None
        self._handles: list[RemovableHandle] = []
        self._logged: float | None = None
        self._losses: deque[float] = deque(maxlen=RECENT_LOSSES)
        self._began: float | None = None
        self._wall: float = 0.0

    # beginning and end ----------------------------------------------------------------------------------------

    def start(self) -> Observation:
        """Attach the hooks; returns itself. The step that runs next is sampled.

        Raises:
            RuntimeError: it runs already.
        """
        if self._began is not None:
            raise RuntimeError("the observation runs already: call stop() before start()")
        prepare_kernels([torch.float32, *(memory(p).dtype for p in self._parameters.named.values())])
        self._began = time.perf_counter()
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if not self.book.record.history:
            watch(self.book, self._parameters.remember)
        watch(self.book, self._scales.begin, self.optimizers)
        watch(self.book, self._ranks.begin, self._next_step())
        watch(self.book, self._begin_step, self._next_step(), True)
        return self

    def stop(self) -> Observation:
        """Remove all hooks; the record stays, and a later `start` goes on with it.

        Of several processes, each compares what it saw with the others, for which it waits five seconds at most.
        """
        return self._stop(patient=True)

    def _stop(self, patient: bool) -> Observation:
        if self._began is None:
            return self
        last = self._steps.unended()
        if last is not None:
            self._end_step(last)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.detach()
        self._gradients.detach()
        watch(self.book, self._ranks.end, patient)
        self._count()
        self._wall += time.perf_counter() - self._began
        self._began, self.book.sampling = None, False
        return self

    def __enter__(self) -> Observation:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(patient=kind is None)  # ranks that wait for this one have no more to say

    # what is asked --------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """All that was counted so far."""
        if self._began is not None:
            self._count()
        self._note_unseen()
        record = self.book.finish()
        record.expectations = self._expectations.compare(record, bool(record.sampled_steps))
        return record

    @property
    def findings(self) -> list[Finding]:
        """What the record shows to be wrong, the worst first."""
        return findings_of("observe", self.record)

    @property
    def overhead(self) -> float | None:
        """Share of the run's time that was spent in watching; None before any time passed."""
        wall = self._wall + (0.0 if self._began is None else time.perf_counter() - self._began)
        own = wall - self.book.seconds
        return self.book.seconds / own if own > 0 else None

    @property
    def loss_scale(self) -> float:
        """What the run's scaler multiplies the loss by now; 1 without one."""
        return self._scales.scale() or 1.0

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Tell the loss of the running step, where no module returns it.

        Args:
            loss: a number, or a tensor with one element.
        """
        if isinstance(loss, torch.Tensor):
            self.book.record.loss_dtype = loss.dtype
            loss = loss.detach()
        self._logged = float(loss)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold: first `findings`, then those of one cause together."""
        findings = self.findings
        return {
            "findings": [finding.to_dict() for finding in findings],
            "causes": plain_causes(findings),
            "steps": len(self),
            "interval": self.interval,
            "overhead": self.overhead,
            "record": plain_record(self.book.record),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all; of several processes rank 0 alone writes.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        if self.record.replica_of[0] == 0:
            write_page("observe", self.to_dict(), path)

    def __len__(self) -> int:
        """How many optimizer steps were seen."""
        return self._next_step()

    def __str__(self) -> str:
        """The findings and what was seen, as a table for a person."""
        record = self.record
        return summary(record, findings_of("observe", record), len(self), self.interval, self.overhead)

    # hooks ----------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook: an optimizer is about to step; with a closure, its gradients come with that."""
        self.begin_step(optimizer)
        if not self.book.sampling:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if not callable(closure):
            self._sample_before(optimizer)
            return None

        def watched() -> Any:
            loss = closure()
            self._sample_before(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    @watching
    def _sample_before(self, optimizer: torch.optim.Optimizer, alone: torch.Tensor | None = None) -> None:
        self._updates[id(optimizer)].before(self._gradients.arrived, alone)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook: it has stepped."""
        if self.book.sampling:
            watch(self.book, self._updates[id(optimizer)].after)
        self.end_step(optimizer)

    # released gradients, which are stepped by one after another ------------------------------------------------

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step."""
        ended = self._steps.begins_step(optimizer)
        if ended is not None:
            self._end_step(ended)
        if self._scales.seeks:
            watch(self.book, self._scales.search)
        if self.book.sampling:
            watch(self.book, self._averages.end)

    @contextlib.contextmanager
    def watch_parameter(self, optimizer: OwnOptimizer, parameter: torch.Tensor) -> Iterator[None]:
        """Compare what a step of one parameter is to change with what it has made of it."""
        if self.book.sampling:
            self._sample_before(optimizer, parameter)
        yield
        if self.book.sampling:
            watch(self.book, self._updates[id(optimizer)].after)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Look at nothing inside."""
        sampling, self.book.sampling = self.book.sampling, False
        try:
            yield
        finally:
            self.book.sampling = sampling

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if self._steps.ends_step(optimizer):
            self._end_step(optimizer)

    @watching
    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        book, record = self.book, self.book.record
        scale, skipped = self._scales.after_step(optimizer, book.sampling)
        record.skipped = self._scales.skipped
        loss = self._loss()
        lr = optimizer.param_groups[0].get("lr")
        step = StepRecord(book.step, book.sampling, None if lr is None else float(lr), scale, skipped)
        step.scheduled, step.loss = self._scales.scheduled(), loss
        try:
            if book.sampling:
                record.sampled_steps.append(book.step)
                self._modules.finish_step()
                self._ranks.note_step(self._rounding_errors())
                record.sites = self._scales.sites()
                exponents = [site["exponent"] for site in record.sites]
                step.exponents = (min(exponents), max(exponents)) if exponents else None
        finally:  # what failed is noted, and steps go on
            self._history.add(step)
            following = book.step + 1
            self._begin_step(following, following % self.interval == 0)
        if step.sampled and self._sinks is not None:
            self._sinks.put(step)

    def _begin_step(self, step: int, sampling: bool) -> None:
        self._modules.end_step()
        self._gradients.end_step()
        self.book.begin_step(step, sampling)
        if sampling:
            self.book.scale = self._scales.scale() or 1.0
            self._modules.attach()
            self._gradients.attach()
            self._modules.begin_step()
            self._averages.begin()
        else:
            self._modules.detach()
            self._gradients.detach()
            for updates in self._updates.values():
                updates.release()

    def _next_step(self) -> int:
        history = self.book.record.history
        return history[-1].step + 1 if history else 0

    def _loss(self) -> float | None:
        """The loss of this step: told, or seen among the model's outputs."""
        seen, told = self._modules.loss, self._logged
        self._logged = None
        if told is None and seen is not None:
            self.book.record.loss_dtype = seen.dtype
            told = float(seen)
        if told is not None and self.book.sampling and math.isfinite(told):
            self._losses.append(told)
            self.book.record.loss_gap = loss_gap(self._losses, self.book.record.loss_dtype)
        return told

    def _rounding_errors(self) -> dict[str, torch.Tensor]:
        """Of stochastic rounding in this step, by parameter."""
        followed = [item for one in self._updates.values() for item in one.rounded.items()]
        return {name: errors for name, one in followed if (errors := one.take_errors()) is not None}

    @watching
    def _count(self) -> None:
        self._read_scales()
        if self.book.record.sampled_steps:
            self._parameters.count_moved()

    def _read_scales(self) -> None:
        """Read what scaler and scheduler did since the last optimizer step, such as skipping all that follow."""
        record = self.book.record
        record.loss_scale, skipped = self._scales.read()
        record.skipped = self._scales.skipped
        if record.history:
            last, scheduled = record.history[-1], self._scales.scheduled()
            last.skipped += skipped
            last.scheduled = last.scheduled if scheduled is None else (last.scheduled or 0) + scheduled

    def _note_unseen(self) -> None:
        record = self.book.record
        if not self.optimizers:
            self.book.missed(
                "no optimizer was given: updates, moments, and which parameters are stepped, are not observed; give it "
                "as hu.observe(model, optimizer)"
            )
            return
        if not record.history:
            if self._wall:
                self.book.missed("no optimizer step was seen: the run never stepped, or steps other optimizers")
            return
        gradients = any(parameter.gradients for parameter in record.parameters.values())
        if gradients and self._modules.expects_calls and not any(role == "activation" for role, _ in self.book.totals):
            self.book.missed(
                "no module of the model was seen to run: it runs compiled, or under another object; activations and "
                "their gradients are not observed"
            )


ROLES = ("activation", "weight", "activation gradient", "weight gradient", "update", "first moment", "second moment")


def summary(record: Record, findings: Sequence[Finding], steps: int, interval: int, overhead: float | None) -> str:
    """Return the lines."""
    return "\n".join([*listing(findings), "", *_seen(record, steps, interval), *_unseen(record), *_cost(overhead)])


def _seen(record: Record, steps: int, interval: int) -> list[str]:
    skipped = f", {record.skipped} skipped by the gradient scaler" if record.skipped else ""
    lines = [f"{steps} steps{skipped}; {len(record.sampled_steps)} sampled (one in {interval})"]
    if not record.tensors:
        return lines
    lines.append(f"{'role':<20} {'tensors':>7} {'largest':>10} {'smallest':>10} {'zeros':>7} {'not finite':>10}")
    for role in ROLES:
        found = [tensor for (of, _), tensor in record.tensors.items() if of == role]
        if found:
            elements = max(1, sum(tensor.elements for tensor in found))
            zeros = sum(tensor.zeros for tensor in found) / elements
            amax, amin = max(t.amax for t in found), min(t.amin for t in found)
            broken = sum(tensor.nonfinite for tensor in found)
            lines.append(f"{role:<20} {len(found):>7} {amax:>10.3g} {amin:>10.3g} {zeros:>7.1%} {broken:>10}")
    seen = sum(p.update.seen for p in record.parameters.values())
    if seen:
        lost = sum(p.update.cancelled for p in record.parameters.values())
        lines.append(f"updates: {lost / seen:.1%} of {seen} sampled nonzero ones left their weight as it was")
    return lines


def _unseen(record: Record) -> list[str]:
    return [f"not observed: {sentence}" for sentence in record.unseen]


def _cost(overhead: float | None) -> list[str]:
    return [] if overhead is None else [f"time spent observing: {times(overhead)} the run's own"]
