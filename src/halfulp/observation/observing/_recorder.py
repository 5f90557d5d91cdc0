"""The recorder of an observation: the record that hooks write to, the step that runs, and rows for sinks."""

from __future__ import annotations

import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ... import formats
from ..._qualified_names import make_name_pattern
from ...sinks import Outlet, Sink, outlet
from .._record import ParameterRecord, Record, Role, StepRecord, TensorRecord
from ..sampling._sampler import (
    LOWEST_EXPONENT,
    SAMPLE_SIZE,
    CandidateFormats,
    FormatLike,
    PackedSamples,
    StoredNumbers,
    TensorTotals,
    count_samples,
    draw_runs,
    find_format,
    make_place_key,
    measure_extremes,
    read_numbers,
    take_sample,
    take_samples,
)
from ._expectations import QuantizedModules

# Samples that wait until they are counted together, of 32 KiB at most.
MOST_QUEUED_SAMPLES = 64
WatchedMethod = TypeVar("WatchedMethod", bound=Callable[..., None])


class Recorder:
    """The state that all hooks of an observation share.

    Attributes:
        quantized: formats that tensors go through afterwards; their block formats are counted too.
        candidates: the formats that samples are counted in.
        step: number of the running step, from 0.
        sampling: whether tensors of the running step are looked at.
        position: how many tensors were looked at in this step.
        scale: the loss scale of the running backward pass.
        seconds: time spent in watching.
        fixed: names that are sampled at the same places in every step, so that directions of rounding can be compared.
        uses: who took and who handed on what.
    """

    def __init__(self, formats: Sequence[FormatLike], quantized: QuantizedModules | None = None) -> None:
        self.record: Record = Record()
        self.quantized: QuantizedModules | None = quantized
        also = {} if quantized is None else {format.name: format for format in quantized.formats.values()}
        counted = [find_format(format) for format in formats]
        for format in counted:
            also.pop(format.name, None)
        self.candidates: CandidateFormats = CandidateFormats([*counted, *also.values()])
        self.totals: dict[tuple[Role, str], TensorTotals] = {}
        self.step: int = 0
        self.sampling: bool = False
        self.position: int = 0
        self.scale: float = 1.0
        self.seconds: float = 0.0
        self._free: list[None] = [None]
        self.fixed: set[str] = set()
        self.uses: TensorUses = TensorUses()
        self._keys: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._broken: dict[int, int] = {}
        self._waiting: list[tuple[torch.Tensor, TensorTotals]] = []

    def begin_step(self, step: int, sampling: bool) -> None:
        """Begin a step."""
        self.step, self.sampling, self.position = step, sampling, 0
        self._keys.clear()
        if sampling and self._sizes:
            draw_runs([(self.place_key(name), elements) for name, elements in self._sizes.items()])

    def place_key(self, name: str) -> int:
        """Return the key of the places at which tensors of a name are sampled in this step."""
        if name in self.fixed:
            return make_place_key(0, name)
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = make_place_key(self.step, name)
        return key

    def note_unseen(self, sentence: str) -> None:
        """Note in words what could not be observed, once."""
        if sentence not in self.record.unseen:
            self.record.unseen.append(sentence)

    def get_totals(self, role: Role, name: str, kind: str, found: StoredNumbers) -> TensorTotals:
        """Return the running counts of a role at a name, made anew at its first tensor."""
        totals = self.totals.get((role, name))
        if totals is None:
            record = TensorRecord(role, name, kind, found.dtype, order=self.position)
            totals = self.totals[role, name] = TensorTotals(record, self.candidates)
        record = totals.record
        record.dtype, record.scale = found.dtype, found.scale
        if found.flat.numel() > SAMPLE_SIZE:
            self._sizes[name] = found.flat.numel()
        return totals

    def count_tensor(
        self, role: Role, name: str, kind: str, tensor: torch.Tensor, scale: float = 1.0
    ) -> TensorTotals | None:
        """Count a tensor under a role and a name; None where its numbers cannot be read."""
        found = read_numbers(tensor)
        if found is None:
            return None
        (totals,) = self._measure_tensors(
            role, [(name, kind)], [found if scale == 1.0 else found._replace(scale=found.scale * scale)]
        )
        sample = take_sample(found.flat, self.place_key(name))
        self._queue_samples([(sample, totals)])
        if self.quantized is not None and self.quantized.formats:
            self.quantized.note_quantization(totals.record, sample)
        return totals

    def count_tensors(
        self, role: Role, named: Sequence[tuple[str, str]], numbers: Sequence[StoredNumbers]
    ) -> PackedSamples:
        """Count tensors of some names and kinds under a role, and return their samples."""
        totals = self._measure_tensors(role, named, numbers)
        samples = take_samples(numbers, [self.place_key(name) for name, _ in named])
        self._queue_samples(zip(samples.packed.split(samples.counts), totals))
        return samples

    def count_sampled_tensors(
        self, role: Role, named: Sequence[tuple[str, str]], numbers: Sequence[StoredNumbers]
    ) -> None:
        """Count tensors that are samples, and that nobody changes, under some names and kinds and a role."""
        self._queue_samples(zip([one.flat for one in numbers], self._measure_tensors(role, named, numbers)))

    def _queue_samples(self, samples: Iterable[tuple[torch.Tensor, TensorTotals]]) -> None:
        self._waiting += samples
        if len(self._waiting) >= MOST_QUEUED_SAMPLES:
            self.count_queued_samples()

    def count_queued_samples(self) -> None:
        """Count the samples that were taken since the last call."""
        waiting, self._waiting = self._waiting, []
        count_samples(waiting, self.candidates)

    def _measure_tensors(
        self, role: Role, named: Sequence[tuple[str, str]], numbers: Sequence[StoredNumbers]
    ) -> list[TensorTotals]:
        """Count all elements of tensors, and note the first that are not finite."""
        found = [self.get_totals(role, *own, one) for own, one in zip(named, numbers)]
        measure_extremes(numbers, found, self.candidates, self.step)
        for totals in found:
            if totals.step_nonfinite:
                record = totals.record
                if record.first_nonfinite is None:
                    record.first_nonfinite = (self.step, self.position)
                if self._broken.get(id(record)) != self.step:
                    self._broken[id(record)] = self.step
                    record.nonfinite_steps += 1
            self.position += 1
        return found

    def finish_record(self) -> Record:
        """Return the record with all counts so far."""
        record = self.record
        record.tensors = {key: totals.finish_record(self.candidates) for key, totals in self.totals.items()}
        for (role, name), tensor in record.tensors.items():
            if role == "activation gradient":
                tensor.sources = self.uses.find_consumers(name)
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


MOST_OUTPUT_TENSORS = 16


def find_float_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a nested tuple, list, or mapping, such as a model's output."""
    stack, count = [value], 0
    while stack and count < MOST_OUTPUT_TENSORS:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if item.dtype.is_floating_point:
                count += 1
                yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, tuple | list):
            stack.extend(reversed(item))


# Outputs of many forward passes without an optimizer's step, before those that are gone are looked for.
MOST_TRACKED_TENSORS = 10_000


class TensorUses:
    """Follows tensors by identity from the module that made them to those that take them; keeps none alive."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._takers: dict[str, dict[str, None]] = {}
        self._outermost: dict[str, str] = {}

    def forget_tensors(self) -> None:
        """Forget the tensors of a step; what was learned of names stays."""
        self._made.clear()

    def note_module_run(self, name: str, inputs: Iterable[Any], output: Any) -> None:
        """Note that a module has run; modules inside it have been noted before.

        Args:
            inputs: what it was given.
            output: what it returned, a tensor or a container of tensors.
        """
        made = self._made
        for one in inputs:
            known = made.get(id(one))
            # What hands its input on makes nothing of the gradient either.
            if known is not None and one is not output and known[0]() is one:
                self._takers.setdefault(known[1], {})[name] = None
        if isinstance(output, torch.Tensor):
            self._note_maker(name, output)
        elif isinstance(output, tuple | list | Mapping):
            for one in output.values() if isinstance(output, Mapping) else output:
                if isinstance(one, torch.Tensor):
                    self._note_maker(name, one)

    def _note_maker(self, name: str, tensor: torch.Tensor) -> None:
        made = self._made
        known = made.get(id(tensor))
        if known is not None and known[0]() is tensor:
            self._outermost[known[1]] = name
            return
        if len(made) > MOST_TRACKED_TENSORS:
            self._made = made = {key: pair for key, pair in made.items() if pair[0]() is not None}
        made[id(tensor)] = weakref.ref(tensor), name

    def find_consumers(self, name: str) -> tuple[str, ...]:
        """Return the innermost modules that took a module's output, else the one whose own code did, if any."""
        takers = self._takers.get(name, {})
        innermost = [
            one for one in takers if not any(o != one and (not one or o.startswith(f"{one}.")) for o in takers)
        ]
        if innermost:
            return tuple(innermost)
        outermost = self._outermost.get(name, name)
        return (outermost.rpartition(".")[0],) if outermost else ()


MOST_PARAMETER_GROUPS = 24
OTHER_GROUPS_NAME = "others"
RUN_COLUMNS = (
    "step",
    "loss",
    "lr",
    "loss_scale",
    "skipped",
    "smallest_exponent",
    "largest_exponent",
    "nonfinite_tensors",
)
SHARE_COLUMNS = ("updates_lost", "movement_kept", "gradient_underflow")
GRADIENT_ROLES = ("weight gradient", "activation gradient")
# Of a group's sums: changes that were wanted, those that were lost; movement that was wanted, what of it took place;
# nonzero elements of weight gradients, about how many became zero.
_SUMS_PER_GROUP = 6


class RowWriter:
    """Gives each sink a row of every sampled step.

    A row holds numbers of the run (`RUN_COLUMNS`), then three shares over all parameters and over each group of them,
    such as "updates_lost" and "updates_lost/layers.*.norm.weight": of the changes wanted in this step, those that left
    their element as it was; of the wanted movement, what took place; of the nonzero gradients, about how many became
    zero in their dtype (over all: those of activations too). None stands for what is not known. A group is the
    parameters whose names differ in numbers alone; the smallest beyond 24 are together "others". Gradients of
    iterations that a scaler skipped before the step count in it.

    Raises:
        TypeError: a sink that can take no rows.
        ValueError: a path that cannot be written.
    """

    def __init__(self, recorder: Recorder, sinks: Sequence[Sink]) -> None:
        self._recorder, self._record = recorder, recorder.record
        parameters = self._record.parameters.values()
        self._group_of = group_parameters(p for p in parameters if p.requires_grad and p.numel)
        self._groups: list[str] = list(dict.fromkeys(self._group_of.values()))
        self._index = {name: self._groups.index(group) for name, group in self._group_of.items()}
        each = ["", *(f"/{group}" for group in self._groups)]
        self._columns = [*RUN_COLUMNS, *(f"{share}{group}" for group in each for share in SHARE_COLUMNS)]
        self._skipped: int = 0
        self._before: np.ndarray = self._sum_updates()
        self._counts: dict[tuple[int, torch.dtype], np.ndarray] = {}
        # Of several processes the others may see another disk.
        self._outlets: list[Outlet] = [outlet(sink, check=is_first_process()) for sink in sinks]

    def write_row(self, step: StepRecord) -> None:
        """Give a sampled step that has ended to all sinks that still take rows."""
        if not self._outlets or not is_first_process():
            return
        row = self._make_row(step, self._recorder.totals)
        for one in self._outlets:
            one.put(row)
            if one.said is not None:
                self._recorder.note_unseen(f"rows of the steps: {one.said}")
        self._outlets = [one for one in self._outlets if not one.closed]

    def _make_row(self, step: StepRecord, totals: Mapping[tuple[Any, str], TensorTotals]) -> dict[str, Any]:
        """Return the row of a sampled step; shares are those since the row before."""
        skipped, self._skipped = self._record.skipped - self._skipped, self._record.skipped
        least, most = step.exponents or (None, None)
        broken = sum(int(one.step == step.step and one.step_nonfinite > 0) for one in totals.values())
        run = (step.step, step.loss, step.lr, step.loss_scale, skipped, least, most, broken)
        sums, whole = self._sum_updates(), self._count_underflow(totals)
        since, self._before = sums - self._before, sums
        since[:, 4:] = whole[:-1]
        total = since.sum(0)
        total[4:] = whole.sum(0)
        shares: list[float | None] = []
        for seen, lost, wanted, kept, nonzero, vanished in np.array([total, *since]).tolist():
            shares += lost / seen if seen else None, kept / wanted if wanted else None
            shares.append(vanished / (nonzero + vanished) if nonzero else None)
        return dict(zip(self._columns, (*run, *shares), strict=True))

    def _sum_updates(self) -> np.ndarray:
        """Return sums over each group's parameters since the observation began."""
        found = [[0.0] * _SUMS_PER_GROUP for _ in self._groups]
        parameters = self._record.parameters
        for name, k in self._index.items():
            update, own = parameters[name].update, found[k]
            own[0] += update.seen
            own[1] += update.cancelled
            if update.known:
                own[2] += update.wanted
                own[3] += update.kept
        return np.array(found, np.float64).reshape(-1, _SUMS_PER_GROUP)

    def _count_underflow(self, totals: Mapping[tuple[Any, str], TensorTotals]) -> np.ndarray:
        """Count this step's nonzero gradients, and about how many became zero: per group, then of activations."""
        found = np.zeros((len(self._groups) + 1, 2))
        for (role, name), one in totals.items():
            if role in GRADIENT_ROLES:
                key, bins = (id(one), one.record.dtype), one.histogram
                # As `findings` estimates it: half as many as are left at the smallest number became zero.
                counts = np.array([bins.sum(), 0.5 * bins[: _count_smallest_bins(one.record.dtype)].sum()])
                place = self._index.get(name, -1) if role == GRADIENT_ROLES[0] else -1
                found[place] += counts - self._counts.get(key, 0.0)
                self._counts[key] = counts
        return found


def group_parameters(parameters: Iterable[ParameterRecord]) -> dict[str, str]:
    """Return the group of each parameter, by name: those whose names differ in numbers alone share one.

    There are at most 24: the smallest beyond that are "others".

    >>> import torch
    >>> names = ["0.weight", "3.weight", "3.bias"]
    >>> group_parameters(ParameterRecord(name, "Linear", torch.float32, (2,), 2, True) for name in names)
    {'0.weight': '*.weight', '3.weight': '*.weight', '3.bias': '3.bias'}
    """
    members: dict[str, list[ParameterRecord]] = {}
    for one in parameters:
        members.setdefault(make_name_pattern(one.name), []).append(one)
    largest = sorted(members, key=lambda pattern: -sum(one.numel for one in members[pattern]))
    kept = largest if len(largest) <= MOST_PARAMETER_GROUPS else largest[: MOST_PARAMETER_GROUPS - 1]
    named = {pattern: pattern if len(members[pattern]) > 1 else members[pattern][0].name for pattern in kept}
    return {one.name: named.get(pattern, OTHER_GROUPS_NAME) for pattern, own in members.items() for one in own}


@functools.cache
def _count_smallest_bins(dtype: torch.dtype) -> int:
    """Return how many of a histogram's first bins hold a dtype's smallest numbers."""
    try:
        return max(0, math.frexp(formats.get(dtype).smallest_subnormal)[1] - LOWEST_EXPONENT)
    except ValueError:  # integers, whose gradients are none
        return 0


def is_first_process() -> bool:
    """Return whether this process is the first of those that train together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")
