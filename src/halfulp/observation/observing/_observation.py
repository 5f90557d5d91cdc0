"""Observation: a watched run, its hooks from step to step, its optimizers, losses and scales, and what they found."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from ..._messages import name_type
from ...gradients import AdaptiveGradScaler
from ...optim import EMA
from ...optim._optimizer import unwrap_optimizer
from ...optim._wrap import is_wrappable
from ...optim.parameters._local_tensors import get_local, get_payload
from ...optim.parameters._narrow_groups import walk_group_parameters
from ...optim.parameters._random_identity import strip_wrapper_prefixes
from ...sinks import Sink
from .._finding import Finding, format_findings, group_causes_as_dicts
from .._record import ParameterRecord, Record, StepRecord, record_to_plain_data
from .._text import format_multiple
from ..findings import collect_findings
from ..page import write_page
from ._expectations import (
    ExpectedFormats,
    FormatsByPattern,
    compare_expected_dtypes,
    map_module_names_to_formats,
    parse_expected_formats,
)
from ._hooks import GradientHooks, ModuleHooks
from ._ranks import RankComparison
from ._recorder import Recorder, RowWriter, make_safe_hook_method, run_safely
from ._sampler import make_sampling_key, read_numbers, take_sample
from ._updates import (
    UpdateWatcher,
    WeightAverageWatcher,
    is_in_step_of_subclass,
    run_before_update,
    set_optimizer_of_record,
)


def observe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    interval: int = 50,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any | None = None,
    average: EMA | nn.Module | None = None,
    expect: ExpectedFormats | None = None,
    check: bool = False,
    quantized: FormatsByPattern | None = None,
    sinks: Iterable[Sink] = (),
) -> Observation:
    """Watch a run of any model and any torch optimizer, unmodified, and say what is wrong with its numbers.

    Every `interval`-th optimizer step, from the first on, hooks look at activations, weights, both kinds of gradients,
    updates and moments: exact extremes of whole tensors, and powers of two in a sample of 32 aligned runs of 128
    elements (all elements of smaller tensors) at places chosen by a counter. Updates are compared with those that the
    optimizer's own class makes of float64 copies of the sample. Between sampled steps only the count of steps is kept.
    Nothing that training computes changes, not one bit, and no random number is drawn. Of several processes all should
    observe, from the same step on: where they stop they compare what they saw through the process group's store,
    without a collective.

    Args:
        model: its modules are named in what is found.
        optimizer: one or several torch optimizers. None watches activations and gradients alone: where one
            step ends is not known then, and all that runs between start and stop counts as one sampled step.
        interval: one step in so many is sampled.
        scaler: the run's GradScaler or AdaptiveGradScaler; without one it is looked for where an optimizer is stepped.
        scheduler: the learning-rate scheduler, whose steps are counted beside the optimizer's; without one, a torch
            LRScheduler that was made for one of the optimizers before is found.
        average: an average of the weights that is updated between steps: `hu.optim.EMA`, torch's AveragedModel, or a
            module of averaged parameters.
        expect: dtypes that parameters and outputs should have, by patterns over the names of modules and
            parameters: ``{"*.norm": torch.float32, "lm_head": "bf16"}``.
        check: whether compiled modules are run a second time in eager mode in sampled steps, and what checkpointed
            modules give when they run again is compared with the first time (not under `use_reentrant=True`). Copies
            of the module and its inputs run; modules that draw random numbers are not compared, and `record.unseen`
            says so.
        quantized: formats that outputs of modules and their gradients are rounded to after they were made, by patterns
            over the names of modules: ``{"layers.*": "mxfp8_e4m3"}``.
        sinks: what gets a row of numbers of each sampled step while the run goes on, from rank 0 alone: a path that
            ends in .jsonl, whose rows go behind those that are there; TensorBoard's SummaryWriter, or what else
            has `add_scalar`; a wandb run, or what else has `log` or `log_metrics` and takes a dict; a function of a
            dict. Loggers get names after "halfulp/". One that raises gets no more, with a warning, and `record.unseen`
            says so.

    Returns:
        An Observation: a context manager, with `start` and `stop` for other programs.

    Raises:
        TypeError: no module, or an optimizer that is not torch's; another kind of scaler, average, expectation,
            or formats that tensors are quantized to; a sink that can take no rows.
        ValueError: an interval below 1, a model without parameters, an unknown format, another model's average, a
            sink's path that cannot be written or has another ending.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(4, 2).bfloat16()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> with hu.observe(model, optimizer, interval=2) as seen:
    ...     for _ in range(4):
    ...         model(torch.ones(3, 4, dtype=torch.bfloat16)).square().sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> len(seen), seen.record.sampled_steps
    (4, [0, 2])
    >>> seen.record.parameters["weight"].update.seen
    16
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"observe takes a torch.nn.Module, got {name_type(model)}: give the model that is trained")
    while "_forward_module" in model._modules:  # Fabric's wrapper, whose outputs and names are the model's
        model = model._forward_module  # type: ignore[assignment]
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise ValueError(f"interval is a number of steps, 1 or more; got {interval!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler= takes a torch.amp.GradScaler or hu.AdaptiveGradScaler, got {name_type(scaler)}")
    if isinstance(sinks, str | os.PathLike) or not isinstance(sinks, Iterable):
        raise TypeError(f"sinks= takes a list of sinks, got {name_type(sinks)}: put it into a list, sinks=[...]")
    optimizers = unwrap_optimizers(optimizer)
    if not any(True for _ in model.parameters()) and not any(
        group["params"] for one in optimizers for group in one.param_groups
    ):
        raise ValueError(
            f"{type(model).__name__} has no parameters, and no optimizer has any: there is nothing to observe; give "
            "the model that is trained"
        )
    if scheduler is None:
        scheduler = find_scheduler(optimizers)
    return Observation(model, optimizers, interval, scaler, scheduler, average, expect, check, quantized, list(sinks))


def unwrap_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return one or several torch optimizers out of the wrappers of trainers."""
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Mapping | str | torch.Tensor)
    found = []
    for given in optimizer if several else [optimizer]:
        one = unwrap_optimizer(given)
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"observe takes torch optimizers, got {name_type(one)}: give subclasses of torch.optim.Optimizer, "
                "whose step has hooks, or leave it out (optimizer=None) to observe activations and gradients alone"
            )
        found.append(one)
    return found


def find_living_objects(kind: Any) -> list[Any]:
    """Return all living objects of a class, or of one of several."""
    # Proxies answer isinstance for what they stand for, and may raise when they are asked.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def find_scheduler(optimizers: Sequence[torch.optim.Optimizer]) -> LRScheduler | None:
    """Return the scheduler of optimizers, None without one."""
    # torch's schedulers mark the `step` of their optimizer, but leave no way from there to themselves.
    if not any(hasattr(one.step, "_wrapped_by_lr_sched") for one in optimizers):
        return None
    living = find_living_objects(LRScheduler)
    found = [one for one in living if any(getattr(one, "optimizer", None) is stepped for stepped in optimizers)]
    # Those that another one steps are not asked.
    inner = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    outer = [one for one in found if id(one) not in inner]
    return outer[-1] if outer else None


# Losses of sampled steps that tell how far neighbouring ones are apart.
MOST_COMPARED_LOSSES = 256


class Observation:
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
        expect: ExpectedFormats | None,
        check: bool,
        quantized: FormatsByPattern | None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._steps = RunStepTracker(optimizers)
        self.model: nn.Module = model
        self.optimizers: list[torch.optim.Optimizer] = self._steps.optimizers
        self.interval: int = interval
        self.recorder: Recorder = Recorder(map_module_names_to_formats(model, quantized))
        self._parameters = ObservedParameters(model, self.optimizers, self.recorder.record)
        self._scales = ScalerAndSchedulerTracker(self.recorder.record, scaler, scheduler)
        self._expected = parse_expected_formats(expect)
        self._modules = ModuleHooks(self.recorder, model, check)
        self._averages = None if average is None else WeightAverageWatcher(self.recorder, average, model)
        self._ranks = RankComparison(self.recorder, model, self._parameters.parameter_by_name)
        self._gradients = GradientHooks(self.recorder, self._parameters.parameter_by_name)
        self._updates = {
            id(one): UpdateWatcher(self.recorder, one, self._parameters.name_by_id) for one in self.optimizers
        }
        self._sinks = RowWriter(self.recorder, sinks)
        self._handles: list[RemovableHandle] = []
        self._logged_loss: float | None = None
        self._sampled_losses: deque[float] = deque(maxlen=MOST_COMPARED_LOSSES)
        self._start_time: float | None = None
        self._observed_seconds: float = 0.0

    # beginning and end ----------------------------------------------------------------------------------------

    def start(self) -> Observation:
        """Attach the hooks; returns itself. The step that runs next is sampled.

        Raises:
            RuntimeError: it runs already.
        """
        if self._start_time is not None:
            raise RuntimeError("the observation runs already: call stop() before start()")
        self._start_time = time.perf_counter()
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._handle_step_begin))
            self._handles.append(optimizer.register_step_post_hook(self._handle_step_end))
        if not self.recorder.record.history:
            run_safely(self.recorder, self._parameters.record_shares_moved_since_start)
        run_safely(self.recorder, self._scales.begin_counting_skips)
        run_safely(self.recorder, self._ranks.announce_observing_to_ranks, len(self))
        run_safely(self.recorder, self._begin_run_step, len(self), True)
        return self

    def stop(self) -> Observation:
        """Remove all hooks; the record stays, and a later `start` goes on with it.

        Of several processes, each compares what it saw with the others, for which it waits five seconds at most.
        """
        if self._start_time is None:
            return self
        if (last := self._steps.end_first_run_step()) is not None:
            self._end_run_step(last)
        while self._handles:
            self._handles.pop().remove()
        self._modules.clear_step_state()
        self._gradients.clear_step_state()
        self.recorder.remove_hooks()
        run_safely(self.recorder, self._ranks.compare_ranks)
        self._complete_record()
        self._observed_seconds += time.perf_counter() - self._start_time
        self._start_time, self.recorder.is_sampling = None, False
        return self

    def __enter__(self) -> Observation:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # what is asked --------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """All that was counted so far."""
        if self._start_time is not None:
            self._complete_record()
        self._note_missing_observations()
        record = self.recorder.record
        record.expectations = compare_expected_dtypes(self.model, self._expected, record)
        return record

    @property
    def findings(self) -> list[Finding]:
        """The problems that the record shows, the worst first."""
        return self.summarize().findings

    @property
    def overhead(self) -> float | None:
        """Share of the run's time that was spent in watching; None before any time passed."""
        wall = self._observed_seconds + (0.0 if self._start_time is None else time.perf_counter() - self._start_time)
        own = wall - self.recorder.observing_seconds
        return self.recorder.observing_seconds / own if own > 0 else None

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Set the loss of the running step, where no module returns it.

        Args:
            loss: a number, or a tensor with one element.
        """
        if isinstance(loss, torch.Tensor):
            self.recorder.record.loss_dtype = loss.dtype
            loss = loss.detach()
        self._logged_loss = float(loss)

    def summarize(self) -> RunSummary:
        """Return a summary of the run so far, which needs no model."""
        return RunSummary(self.record, len(self), self.interval, self.overhead)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold: first `findings`, then those of one cause together."""
        return self.summarize().to_dict()

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all; of several processes rank 0 alone writes.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        if self.record.replica_of[0] == 0:
            write_page("observe", self.to_dict(), path)

    def __len__(self) -> int:
        """Return how many optimizer steps were observed."""
        history = self.recorder.record.history
        return history[-1].step + 1 if history else 0

    def __str__(self) -> str:
        """The findings and what was seen, as a table for a person."""
        return str(self.summarize())

    # hooks ----------------------------------------------------------------------------------------------------

    def _handle_step_begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Sample before an optimizer's update; with a closure, behind its first call, which computes the gradients."""
        if is_in_step_of_subclass(optimizer):
            return None
        if (ended := self._steps.end_run_step_if_stepped_again(optimizer)) is not None:
            self._end_run_step(ended)
        if self._scales.searches_left:
            run_safely(self.recorder, self._scales.search_callers_for_scaler)
        if not self.recorder.is_sampling:
            return None
        if self._averages is not None:
            run_safely(self.recorder, self._averages.compare_averages)
        return run_before_update(functools.partial(self._sample_before_update, optimizer), args, kwargs)

    @make_safe_hook_method
    def _sample_before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._updates[id(optimizer)].sample_before_step(self._gradients.arrived_names)

    def _handle_step_end(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare what an optimizer's step did with what was wanted."""
        if is_in_step_of_subclass(optimizer):
            return
        if self.recorder.is_sampling:
            run_safely(self.recorder, self._updates[id(optimizer)].compare_after_step)
        if self._steps.note_step_end(optimizer):
            self._end_run_step(optimizer)

    @make_safe_hook_method
    def _end_run_step(self, optimizer: torch.optim.Optimizer) -> None:
        recorder, record = self.recorder, self.recorder.record
        scale, skipped = self._scales.read_scale_and_skips_at_step(recorder.is_sampling)
        loss = self._read_step_loss()
        lr = optimizer.param_groups[0].get("lr")
        scheduled = self._scales.count_new_scheduler_steps()
        lr = None if lr is None else float(lr)
        step = StepRecord(recorder.step, recorder.is_sampling, lr, scale, skipped, scheduled, loss)
        broken = len(recorder.nonfinite_tensors)
        try:
            if recorder.is_sampling:
                record.sampled_steps.append(recorder.step)
                record.sites = self._scales.list_site_exponents()
                exponents = [site["exponent"] for site in record.sites]
                step.exponents = (min(exponents), max(exponents)) if exponents else None
                if self._ranks.other_ranks:
                    self._ranks.hash_replicas_after_step()
        finally:  # what failed is noted, and steps go on
            record.history.append(step)
            if len(record.history) > MOST_HISTORY_STEPS:
                record.history[:] = thin_history(record.history)
            following = recorder.step + 1
            self._begin_run_step(following, following % self.interval == 0)
        if step.sampled:
            self._sinks.write_row(step, broken)

    def _begin_run_step(self, step: int, sampling: bool) -> None:
        self._modules.clear_step_state()
        self._gradients.clear_step_state()
        recorder = self.recorder
        recorder.begin_step(step, sampling)
        if sampling:
            recorder.loss_scale = self._scales.get_loss_scale() or 1.0
            if not recorder.handles:
                self._modules.attach()
                self._gradients.attach()
            if self._averages is not None:
                self._averages.sample_averages()
        else:
            recorder.remove_hooks()

    def _read_step_loss(self) -> float | None:
        """Return the loss of this step: the logged one, or one among the model's outputs."""
        seen, told = self._modules.loss, self._logged_loss
        self._logged_loss = None
        if told is None and seen is not None:
            self.recorder.record.loss_dtype = seen.dtype
            told = float(seen)
        if told is not None and self.recorder.is_sampling and math.isfinite(told):
            self._sampled_losses.append(told)
            self.recorder.record.loss_gap = compute_spacing_per_loss_change(
                self._sampled_losses, self.recorder.record.loss_dtype
            )
        return told

    @make_safe_hook_method
    def _complete_record(self) -> None:
        record = self.recorder.record
        # What scaler and scheduler did since the last optimizer step, such as skipping all that follow.
        record.loss_scale, skipped = self._scales.read_scale_and_skips()
        if record.history:
            last, scheduled = record.history[-1], self._scales.count_new_scheduler_steps()
            last.skipped += skipped
            last.scheduled = last.scheduled if scheduled is None else (last.scheduled or 0) + scheduled
        if record.sampled_steps:
            self._parameters.record_shares_moved_since_start()

    def _note_missing_observations(self) -> None:
        record = self.recorder.record
        if not self.optimizers:
            self.recorder.note_unobserved(
                "no optimizer was given: updates, moments, and which parameters are stepped, are not observed; give it "
                "as hu.observe(model, optimizer)"
            )
        elif not record.history:
            if self._observed_seconds:
                self.recorder.note_unobserved(
                    "no optimizer step was seen: the run never stepped, or steps other optimizers"
                )
        elif (
            self._modules.expects_calls
            and any(parameter.gradients for parameter in record.parameters.values())
            and not any(role == "activation" for role, _ in record.tensors)
        ):
            self.recorder.note_unobserved(
                "no module of the model was seen to run: it runs compiled, or under another object; activations and "
                "their gradients are not observed"
            )


@dataclass(frozen=True)
class RunSummary:
    """The record of a run with its observed steps, and the share of its time that observing took, without the model.

    `ended` says how the script ended that `halfulp observe` ran.
    """

    record: Record
    steps: int
    interval: int
    overhead: float | None
    ended: str | None = None

    @functools.cached_property
    def findings(self) -> list[Finding]:
        """The problems that the record shows, the worst first."""
        return collect_findings("observe", self.record)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold: first `findings`, then those of one cause together."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "causes": group_causes_as_dicts(self.findings),
            "steps": self.steps,
            "interval": self.interval,
            "overhead": self.overhead,
            "record": record_to_plain_data(self.record),
            **({} if self.ended is None else {"ended": self.ended}),
        }

    def __str__(self) -> str:
        """The findings, what was seen and what it cost, as lines for a person."""
        skipped = f", {self.record.skipped} skipped by the gradient scaler" if self.record.skipped else ""
        sampled = len(self.record.sampled_steps)
        told = [f"{self.steps} steps{skipped}; {sampled} sampled (one in {self.interval})"]
        updates = [parameter.update for parameter in self.record.parameters.values()]
        if seen := sum(update.seen for update in updates):
            lost = sum(update.cancelled for update in updates) / seen
            told.append(f"updates: {lost:.1%} of {seen} sampled nonzero ones left their weight as it was")
        told += [f"not observed: {sentence}" for sentence in self.record.unseen]
        if self.overhead is not None:
            told.append(f"time spent observing: {format_multiple(self.overhead)} the run's own")
        return "\n".join([*format_findings(self.findings), "", *told])


class RunStepTracker:
    """Finds with which optimizer's step a step of the run ends.

    That one leads: the last one to step before another steps again. Where one steps again while the lead does not, it
    leads from then on.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        given = list({id(part): part for one in given for part in list_contained_optimizers(one)}.values())
        held = {id(part) for one in given for part in vars(one).values() if isinstance(part, torch.optim.Optimizer)}
        self.optimizers: list[torch.optim.Optimizer] = [one for one in given if id(one) not in held]
        self._lead_optimizer: torch.optim.Optimizer | None = self.optimizers[0] if len(self.optimizers) == 1 else None
        self._stepped_optimizers: list[torch.optim.Optimizer] = []

    def note_step_end(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer has stepped; return whether the run's step ends with it."""
        self._stepped_optimizers.append(optimizer)
        is_end = optimizer is self._lead_optimizer
        if is_end:
            self._stepped_optimizers.clear()
        return is_end

    def end_run_step_if_stepped_again(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """Note that an optimizer begins to step; return the one that ended the step before, if it shows only now."""
        if not any(one is optimizer for one in self._stepped_optimizers):
            return None
        last = self._stepped_optimizers[-1]
        self._lead_optimizer = last if self._lead_optimizer is None else optimizer
        self._stepped_optimizers.clear()
        return last

    def end_first_run_step(self) -> torch.optim.Optimizer | None:
        """End the run's first step, if none has ended yet; return the optimizer that stepped last, else None."""
        if self._lead_optimizer is not None or not self._stepped_optimizers:
            return None
        self._lead_optimizer = self._stepped_optimizers[-1]
        self._stepped_optimizers.clear()
        return self._lead_optimizer


def list_contained_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a container that steps nothing but their parameters, as torchtitan's, or itself."""
    parts = vars(optimizer).get("optimizers")
    if not isinstance(parts, list | tuple) or not all(isinstance(one, torch.optim.Optimizer) for one in parts):
        return [optimizer]
    inside, own = ({id(p) for one in some for _, _, p in walk_group_parameters(one)} for some in (parts, [optimizer]))
    return list(parts) if own <= inside else [optimizer]


class ObservedParameters:
    """Names, records and first values of a model's and its optimizers' parameters."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], record: Record) -> None:
        self._record = record
        self.parameter_by_name: dict[str, torch.Tensor] = {}
        # By the parameter's id, and by that of the copy that an optimizer steps for it.
        self.name_by_id: dict[int, str] = {}
        self._first_samples: dict[str, torch.Tensor] = {}
        kinds: dict[int, str] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                kinds.setdefault(id(parameter), type(module).__name__)  # a tied one is of the first, as its name is
        named = dict(model.named_parameters())
        for name, parameter in zip(
            strip_wrapper_prefixes(named, strips_data_parallel=False), named.values(), strict=True
        ):
            self._add_parameter(name, parameter, kinds.get(id(parameter), ""))
        for number, optimizer in enumerate(optimizers):
            self._add_stepped_parameters(f"optimizer.{number}" if len(optimizers) > 1 else "optimizer", optimizer)

    def _add_parameter(self, name: str, parameter: torch.Tensor, kind: str) -> None:
        self.parameter_by_name[name], self.name_by_id[id(parameter)] = parameter, name
        local, dtype = get_local(parameter), get_payload(parameter).dtype
        trains = parameter.requires_grad
        self._record.parameters[name] = ParameterRecord(name, kind, dtype, tuple(local.shape), local.numel(), trains)

    def _add_stepped_parameters(self, prefix: str, optimizer: torch.optim.Optimizer) -> None:
        numbers = {id(group): k for k, group in enumerate(optimizer.param_groups)}
        wrappable = is_wrappable(optimizer)
        for group, position, parameter in walk_group_parameters(optimizer):
            name, given = self.name_by_id.get(id(parameter)), group.get("param_names")
            if name is None:
                name = f"{prefix}.{given[position]}" if given else f"{prefix}.{numbers[id(group)]}.{position}"
                self._add_parameter(name, parameter, "")
            self.name_by_id[id(group["params"][position])] = name
            record = self._record.parameters[name]
            set_optimizer_of_record(record, optimizer, wrappable)
            record.options = {key: group[key] for key in ("lr", "weight_decay", "eps") if key in group}

    def record_shares_moved_since_start(self) -> None:
        """Record which share of each parameter's sample has changed since the first call, before the first step."""
        samples = {}
        for name, parameter in self.parameter_by_name.items():
            numbers = read_numbers(parameter)
            if numbers is not None:
                samples[name] = take_sample(numbers.values, make_sampling_key(0, name)).mul_(numbers.scale)
        self._first_samples = self._first_samples or samples
        for name, now in samples.items():
            before = self._first_samples.get(name)
            if before is not None and len(before) == len(now) and len(now):
                self._record.parameters[name].moved = float((before != now).cpu().double().mean())


_MOST_SCALER_SEARCHES = 3
_MOST_CALLER_FRAMES = 14


class ScalerAndSchedulerTracker:
    """Follows a gradient scaler and a learning-rate scheduler; counts falls of the scale as skipped steps."""

    def __init__(self, record: Record, scaler: torch.amp.GradScaler | None, scheduler: Any | None) -> None:
        self._record, self.scaler, self.scheduler = record, scaler, scheduler
        self._last_scale: float | None = None
        self.searches_left: int = 0 if scaler is not None else _MOST_SCALER_SEARCHES
        self._last_epoch: int | None = None if scheduler is None else int(getattr(scheduler, "last_epoch", 0))

    def search_callers_for_scaler(self) -> None:
        """Look for the scaler among the callers of an optimizer's step."""
        self.searches_left -= 1
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_MOST_CALLER_FRAMES):
            frame = frame.f_back if frame is not None else None
            if frame is None:
                return
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(owner, torch.amp.GradScaler):
                self.scaler, self.searches_left = owner, 0
                self.begin_counting_skips()
                return

    def begin_counting_skips(self) -> None:
        """Count skips from here on."""
        self._last_scale = self.get_loss_scale()

    def get_loss_scale(self) -> float | None:
        """Return the loss scale, None without an enabled scaler."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        if isinstance(scaler, AdaptiveGradScaler):
            return scaler._compute_global_scale()
        return float(scaler.get_scale())

    def read_scale_and_skips_at_step(self, sampled: bool) -> tuple[float | None, int]:
        """Return what `read_scale_and_skips` does, or (None, 0) where reading would wait for a device to no end."""
        return self.read_scale_and_skips() if sampled or self._is_scale_on_host() else (None, 0)

    def read_scale_and_skips(self) -> tuple[float | None, int]:
        """Return the scale now, and how many steps were skipped since it was read last, none where reading begins."""
        before, now = self._last_scale, self.get_loss_scale()
        self._last_scale = now
        if now is None or not before or self.scaler is None or isinstance(self.scaler, AdaptiveGradScaler):
            return now, 0
        factor = float(self.scaler.get_backoff_factor())
        fell = 0 < factor < 1 and now < before
        skipped = (max(1, round(math.log(now / before) / math.log(factor))) if now > 0 else 1) if fell else 0
        self._record.skipped += skipped
        return now, skipped

    def _is_scale_on_host(self) -> bool:
        scale = getattr(self.scaler, "_scale", None)
        return isinstance(self.scaler, AdaptiveGradScaler) or scale is None or bool(scale.is_cpu)

    def count_new_scheduler_steps(self) -> int | None:
        """Return how many steps the scheduler took since the last call; None without one."""
        if self.scheduler is None or self._last_epoch is None:
            return None
        before, self._last_epoch = self._last_epoch, int(getattr(self.scheduler, "last_epoch", 0))
        return self._last_epoch - before

    def list_site_exponents(self) -> list[dict[str, Any]]:
        """Return an AdaptiveGradScaler's gradient exponents per site."""
        if not isinstance(self.scaler, AdaptiveGradScaler) or not self.scaler.is_enabled():
            return []
        return [
            {
                "site": site.key,
                "exponent": site.exponent,
                "overflows": site.overflow_count,
                "format": None if site.format is None else site.format.name,
            }
            for site in self.scaler._controller.sites.values()
        ]


MOST_HISTORY_STEPS = 2000


def thin_history(steps: list[StepRecord]) -> list[StepRecord]:
    """Return every second step, with the skipped and scheduled steps of the one before it added to its own.

    >>> one = StepRecord(0, True, 0.1, skipped=2, scheduled=1)
    >>> thin_history([one, StepRecord(1, False, 0.1, scheduled=1)])[0].skipped
    2
    """
    kept = []
    for first, second in zip(steps[::2], steps[1::2]):
        scheduled = None if second.scheduled is None else (first.scheduled or 0) + second.scheduled
        loss = first.loss if second.loss is None else second.loss
        kept.append(replace(second, skipped=first.skipped + second.skipped, scheduled=scheduled, loss=loss))
    return kept + (steps[-1:] if len(steps) % 2 else [])


def compute_spacing_per_loss_change(losses: Iterable[float], dtype: torch.dtype | None) -> float | None:
    """Return the median ratio, over successive losses, of a dtype's spacing there to their change."""
    losses = list(losses)
    if dtype is None or not dtype.is_floating_point or len(losses) < 2:
        return None
    kind = torch.finfo(dtype)
    gaps = []
    for a, b in itertools.pairwise(losses):
        exponent = math.frexp(max(abs(a), abs(b), kind.smallest_normal))[1] - 1
        gaps.append(math.ldexp(kind.eps, exponent) / abs(b - a) if a != b else math.inf)
    found = statistics.median(gaps)
    if math.isinf(found):  # most are one number: of a wide dtype that is a run that stands still
        return math.inf if kind.bits <= 16 and losses[-1] else None
    return found
