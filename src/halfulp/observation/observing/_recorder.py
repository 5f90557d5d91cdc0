"""The recorder of an observation: the record that hooks write to, the step that runs, and rows for sinks."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ... import formats
from ...formats import BlockFormat, Format
from ...sinks import GuardedSink, Sink, make_guarded_sink
from .._record import Record, Role, StepRecord, TensorRecord
from ..findings._ranges import estimate_vanished_count
from ._expectations import QUANTIZED_ROLES, record_quantization_error
from ._sampler import (
    StoredNumbers,
    add_sample_to_histogram,
    make_sampling_key,
    read_numbers,
    record_amax_and_count_nonfinite,
    take_sample,
)

HookMethod = TypeVar("HookMethod", bound=Callable[..., None])


class Recorder:
    """The state that all hooks of an observation share."""

    def __init__(self, format_by_module: dict[str, Format | BlockFormat]) -> None:
        self.record: Record = Record()
        self.format_by_module = format_by_module
        # Tensors that were seen in the running step, and those of them that held NaN or infinity.
        self.seen_tensors: set[tuple[Role, str]] = set()
        self.nonfinite_tensors: set[tuple[Role, str]] = set()
        self.step: int = 0
        # Whether tensors of the running step are observed, and how many were.
        self.is_sampling: bool = False
        self.tensor_position: int = 0
        # Of the loss in the running backward pass.
        self.loss_scale: float = 1.0
        # Spent in observing.
        self.observing_seconds: float = 0.0
        self._reentry_token: list[None] = [None]
        # Handles of the hooks of sampled steps.
        self.handles: list[RemovableHandle] = []
        # Names sampled at the same places in every step, so that directions of rounding can be compared.
        self.fixed_sample_names: set[str] = set()

    def begin_step(self, step: int, sampling: bool) -> None:
        """Begin a step, or go on with the one in which observing stopped."""
        if step != self.step:
            self.seen_tensors.clear()
            self.nonfinite_tensors.clear()
        self.step, self.is_sampling, self.tensor_position = step, sampling, 0

    def remove_hooks(self) -> None:
        """Remove the hooks of sampled steps."""
        while self.handles:
            self.handles.pop().remove()

    def get_sampling_key(self, name: str) -> int:
        """Return the key of the places at which tensors of a name are sampled in this step."""
        return make_sampling_key(0 if name in self.fixed_sample_names else self.step, name)

    def note_unobserved(self, sentence: str) -> None:
        """Note in words what could not be observed, once."""
        if sentence not in self.record.unseen:
            self.record.unseen.append(sentence)

    def record_tensor(
        self, role: Role, name: str, kind: str, tensor: torch.Tensor, loss_scale: float = 1.0
    ) -> TensorRecord | None:
        """Count a tensor under a role and a name; None where its numbers cannot be read.

        Its record's scale is its own times the loss scale, by which nothing is divided here.
        """
        if (found := read_numbers(tensor)) is None:
            return None
        if loss_scale != 1.0:
            found = found._replace(scale=found.scale * loss_scale)
        return self.record_numbers(role, name, kind, found, take_sample(found.values, self.get_sampling_key(name)))

    def record_numbers(
        self, role: Role, name: str, kind: str, numbers: StoredNumbers, sample: torch.Tensor
    ) -> TensorRecord:
        """Count all elements of a tensor and its sample, and note the first that are not finite."""
        key, tensors = (role, name), self.record.tensors
        record = tensors.get(key)
        if record is None:
            record = tensors[key] = TensorRecord(role, name, kind, numbers.dtype, order=self.tensor_position)
        record.dtype, record.scale = numbers.dtype, numbers.scale
        if key not in self.seen_tensors:
            self.seen_tensors.add(key)
            record.steps += 1
            record.last_amax = 0.0
        if record_amax_and_count_nonfinite(numbers, record) and key not in self.nonfinite_tensors:
            self.nonfinite_tensors.add(key)
            record.first_nonfinite = record.first_nonfinite or (self.step, self.tensor_position)
            record.nonfinite_steps += 1
        self.tensor_position += 1
        add_sample_to_histogram(sample, record)
        format = self.format_by_module.get(name) if role in QUANTIZED_ROLES else None
        if format is not None and len(sample):
            wide = numbers.values.dtype == torch.float64  # which block formats round in float64
            record_quantization_error(record, format, sample if wide else sample.float())
        return record


def make_safe_hook_method(function: HookMethod) -> HookMethod:
    """Make a method of an object with a `recorder` a hook that runs as by `run_safely`."""

    @functools.wraps(function)
    def run_hook_safely(self: Any, *arguments: Any) -> None:
        run_safely(self.recorder, function, self, *arguments)

    return run_hook_safely  # type: ignore[return-value]


def run_safely(recorder: Recorder, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function that never disturbs the run, and note its time.

    Modes that round or watch functions (`hu.emulate`, an AdaptiveGradScaler) do not see what it does, and an error is
    noted in the record instead of ending the training.
    """
    if torch.compiler.is_compiling():
        return
    try:
        recorder._reentry_token.pop()  # one operation, which no other thread divides: hooks of several share memory
    except IndexError:
        return
    begin = time.perf_counter()
    records_gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # torch.no_grad() takes as long as a look at a small tensor
    try:
        with torch._C.DisableTorchFunction():
            if torch._C._len_torch_dispatch_stack():
                with _disable_current_modes():
                    function(*arguments)
            else:
                function(*arguments)
    except Exception as error:
        # Its words may hold paths, hosts or values, which neither page nor JSON is to hold.
        doing = function.__name__.strip("_").replace("_", " ")
        recorder.note_unobserved(f"could not {doing}: it raised {type(error).__name__}")
    finally:
        torch._C._set_grad_enabled(records_gradients)
        recorder._reentry_token.append(None)
        recorder.observing_seconds += time.perf_counter() - begin


def find_float_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a nested tuple, list, or mapping, such as a model's output."""
    if isinstance(value, torch.Tensor):
        if value.dtype.is_floating_point:
            yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from find_float_tensors(item)


class RowWriter:
    """Gives each sink a row of every sampled step, in which None stands for what is not known."""

    def __init__(self, recorder: Recorder, sinks: Sequence[Sink]) -> None:
        self._recorder, self._record = recorder, recorder.record
        self._last_counts: list[float] = self._sum_counts_since_start()
        # Of several processes the others may see another disk.
        self._open_sinks: list[GuardedSink] = [make_guarded_sink(sink, check=is_first_process()) for sink in sinks]

    def write_row(self, step: StepRecord, nonfinite_count: int) -> None:
        """Give a sampled step that has ended, with so many tensors not finite, to all sinks that still take rows."""
        if not self._open_sinks or not is_first_process():
            return
        row = self._make_row(step, nonfinite_count)
        for one in self._open_sinks:
            one.put(row)
            if one.failure is not None:
                self._recorder.note_unobserved(f"rows of the steps: {one.failure}")
        self._open_sinks = [one for one in self._open_sinks if one.failure is None]

    def _make_row(self, step: StepRecord, nonfinite_count: int) -> dict[str, Any]:
        """Return the row of a sampled step, whose counts and shares are of all since the row before."""
        sums = self._sum_counts_since_start()
        skipped, seen, lost, wanted, kept, nonzero, vanished = (b - a for a, b in zip(self._last_counts, sums))
        self._last_counts = sums
        smallest, largest = step.exponents or (None, None)
        return {
            "step": step.step,
            "loss": step.loss,
            "lr": step.lr,
            "loss_scale": step.loss_scale,
            "skipped": int(skipped),
            "smallest_exponent": smallest,
            "largest_exponent": largest,
            "nonfinite_tensors": nonfinite_count,
            "updates_lost": lost / seen if seen else None,
            "movement_kept": kept / wanted if wanted else None,
            "gradient_underflow": vanished / (nonzero + vanished) if nonzero else None,
        }

    def _sum_counts_since_start(self) -> list[float]:
        """Return the sums that a row tells the growth of, over all parameters and gradients."""
        updates = [parameter.update for parameter in self._record.parameters.values()]
        known = [update for update in updates if update.known]
        gradients = [one for (role, _), one in self._record.tensors.items() if role.endswith("gradient")]
        return [
            self._record.skipped,
            sum(update.seen for update in updates),
            sum(update.cancelled for update in updates),
            sum(update.wanted for update in known),
            sum(update.kept for update in known),
            sum(sum(one.histogram.values()) for one in gradients),
            sum(estimate_vanished_count(one, formats.get(one.dtype)) for one in gradients),
        ]


def is_first_process() -> bool:
    """Return whether this process is the first of those that train together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")
