"""The recorder of an observation: the record that hooks write to, the step that runs, and rows for sinks."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ... import formats
from ...sinks import Outlet, Sink, outlet
from .._record import Record, Role, StepRecord, TensorRecord
from ._expectations import QuantizedModules
from ._sampler import (
    ObservedTensor,
    StoredNumbers,
    count_sample,
    make_sampling_key,
    measure_amax,
    read_numbers,
    take_sample,
)

WatchedMethod = TypeVar("WatchedMethod", bound=Callable[..., None])


class Recorder:
    """The state that all hooks of an observation share.

    Attributes:
        quantized: formats that tensors go through afterwards.
        step: number of the running step, from 0.
        sampling: whether tensors of the running step are looked at.
        position: how many tensors were looked at in this step.
        scale: the loss scale of the running backward pass.
        seconds: time spent in watching.
        fixed: names that are sampled at the same places in every step, so that directions of rounding can be compared.
    """

    def __init__(self, quantized: QuantizedModules) -> None:
        self.record: Record = Record()
        self.quantized: QuantizedModules = quantized
        self.totals: dict[tuple[Role, str], ObservedTensor] = {}
        self.step: int = 0
        self.sampling: bool = False
        self.position: int = 0
        self.scale: float = 1.0
        self.seconds: float = 0.0
        self._free: list[None] = [None]
        self.fixed: set[str] = set()

    def begin_step(self, step: int, sampling: bool) -> None:
        """Begin a step."""
        self.step, self.sampling, self.position = step, sampling, 0

    def get_sampling_key(self, name: str) -> int:
        """Return the key of the places at which tensors of a name are sampled in this step."""
        return make_sampling_key(0 if name in self.fixed else self.step, name)

    def note_unseen(self, sentence: str) -> None:
        """Note in words what could not be observed, once."""
        if sentence not in self.record.unseen:
            self.record.unseen.append(sentence)

    def count_tensor(
        self, role: Role, name: str, kind: str, tensor: torch.Tensor, scale: float = 1.0
    ) -> TensorRecord | None:
        """Count a tensor under a role and a name; None where its numbers cannot be read."""
        found = read_numbers(tensor)
        if found is None:
            return None
        if scale != 1.0:
            found = found._replace(scale=found.scale * scale)
        return self.count_numbers(role, name, kind, found, take_sample(found.flat, self.get_sampling_key(name)))

    def count_numbers(
        self, role: Role, name: str, kind: str, numbers: StoredNumbers, sample: torch.Tensor
    ) -> TensorRecord:
        """Count all elements of a tensor and its sample, and note the first that are not finite."""
        totals = self.totals.get((role, name))
        if totals is None:
            record = TensorRecord(role, name, kind, numbers.dtype, order=self.position)
            totals = self.totals[role, name] = ObservedTensor(record)
            self.record.tensors[role, name] = record
        record = totals.record
        record.dtype, record.scale = numbers.dtype, numbers.scale
        was_broken = totals.step == self.step and totals.step_nonfinite > 0
        measure_amax(numbers, totals, self.step)
        if totals.step_nonfinite and not was_broken:
            record.first_nonfinite = record.first_nonfinite or (self.step, self.position)
            record.nonfinite_steps += 1
        self.position += 1
        count_sample(sample, record)
        if self.quantized.formats:
            wide = numbers.flat.dtype == torch.float64  # which block formats round in float64
            self.quantized.note_quantization(record, sample if wide else sample.float())
        return record


def make_safe_method(function: WatchedMethod) -> WatchedMethod:
    """Make a method of an object with a `recorder` a hook that takes its time and never disturbs the run.

    Modes that round or watch functions (`hu.emulate`, an AdaptiveGradScaler) do not see what it does, and an error is
    noted in the record instead of ending the training.
    """

    @functools.wraps(function)
    def hook(self: Any, *arguments: Any) -> None:
        run_safely(self.recorder, function, self, *arguments)

    return hook  # type: ignore[return-value]


def run_safely(recorder: Recorder, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function as a method of `make_safe_method` is called."""
    if torch.compiler.is_compiling():
        return
    try:
        recorder._free.pop()  # one operation, which no other thread divides: hooks of several share memory
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
        recorder.note_unseen(f"{function.__name__.strip('_').replace('_', ' ')}: it raised {type(error).__name__}")
    finally:
        torch._C._set_grad_enabled(records_gradients)
        recorder._free.append(None)
        recorder.seconds += time.perf_counter() - begin


def find_float_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a nested tuple, list, or mapping, such as a model's output."""
    if isinstance(value, torch.Tensor):
        if value.dtype.is_floating_point:
            yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from find_float_tensors(item)


ROW_COLUMNS = (
    "step",
    "loss",
    "lr",
    "loss_scale",
    "skipped",
    "smallest_exponent",
    "largest_exponent",
    "nonfinite_tensors",
    "updates_lost",
    "movement_kept",
    "gradient_underflow",
)


class RowWriter:
    """Gives each sink a row of every sampled step.

    A row holds `ROW_COLUMNS`: numbers of the run, then three shares over all parameters: of the changes wanted in this
    step, those that left their element as it was; of the wanted movement, what took place; of the nonzero gradients,
    about how many became zero in their dtype. None stands for what is not known. Gradients of iterations that a scaler
    skipped before the step count in it.

    Raises:
        TypeError: a sink that can take no rows.
        ValueError: a path that cannot be written.
    """

    def __init__(self, recorder: Recorder, sinks: Sequence[Sink]) -> None:
        self._recorder, self._record = recorder, recorder.record
        self._before: list[float] = self._sum_counts()
        # Of several processes the others may see another disk.
        self._outlets: list[Outlet] = [outlet(sink, check=is_first_process()) for sink in sinks]

    def write_row(self, step: StepRecord) -> None:
        """Give a sampled step that has ended to all sinks that still take rows."""
        if not self._outlets or not is_first_process():
            return
        row = self._make_row(step)
        for one in self._outlets:
            one.put(row)
            if one.said is not None:
                self._recorder.note_unseen(f"rows of the steps: {one.said}")
        self._outlets = [one for one in self._outlets if not one.closed]

    def _make_row(self, step: StepRecord) -> dict[str, Any]:
        """Return the row of a sampled step; counts are those since the row before."""
        sums = self._sum_counts()
        skipped, seen, lost, wanted, kept, nonzero, vanished = (b - a for a, b in zip(self._before, sums))
        self._before = sums
        least, most = step.exponents or (None, None)
        broken = sum(one.step == step.step and one.step_nonfinite > 0 for one in self._recorder.totals.values())
        shares = (
            lost / seen if seen else None,
            kept / wanted if wanted else None,
            vanished / (nonzero + vanished) if nonzero else None,
        )
        run = (step.step, step.loss, step.lr, step.loss_scale, int(skipped), least, most, broken)
        return dict(zip(ROW_COLUMNS, (*run, *shares), strict=True))

    def _sum_counts(self) -> list[float]:
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
            # As `findings` estimates it: half as many as are left at the smallest number became zero.
            sum(0.5 * one.histogram.get(_find_smallest_exponent(one.dtype), 0) for one in gradients),
        ]


@functools.cache
def _find_smallest_exponent(dtype: torch.dtype) -> int:
    """Return the power of two of a dtype's smallest number."""
    return math.frexp(formats.get(dtype).smallest_subnormal)[1] - 1


def is_first_process() -> bool:
    """Return whether this process is the first of those that train together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")
