"""Updates: samples of weights, gradients and states around an optimizer's step, beside what was wanted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...kernels import address, address_of, run_chunks, select_engine
from ...kernels._table import CHUNK
from ...optim import Optimizer
from ...optim._float32_weights import read_weights
from ...optim.parameters._parameter_plan import ParameterPlan
from ...optim.states._codec import Plain
from ...optim.step._kernel import change_by_rule
from .._record import ParameterRecord, Realised, Role, RoundingRecord
from ..sampling._device_functions import changes_table
from ..sampling._sampler import Look, Stored, compiled, look, sampled, stored
from ._elementwise import ELEMENTWISE, WHOLE, Shadow, decay_factor
from ._notebook import Notebook

_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


@dataclass(slots=True)
class Stepped:
    """One parameter around a step.

    Attributes:
        weight, gradient: float64 samples before the step.
        states: of halfulp's optimizers: samples of its states before the step.
        change: the wanted change where the optimizer computes it in a way of its own.
        wanted_states: samples of the states that it wants then.
        unplanned: whether the optimizer has yet to lay out this parameter's states, so that nothing is known.
    """

    record: ParameterRecord
    parameter: torch.Tensor
    options: dict[str, Any]
    elements: int
    weight: torch.Tensor = _NOTHING
    gradient: torch.Tensor = _NOTHING
    states: dict[str, Any] = field(default_factory=dict)
    change: torch.Tensor | None = None
    wanted_states: dict[str, torch.Tensor] = field(default_factory=dict)
    unplanned: bool = False


class Layout:
    """The samples of parameters that step together, one after another in float64.

    Attributes:
        ends: where the parameters' samples begin and end.
    """

    def __init__(self, book: Notebook, named: Sequence[tuple[str, str]]) -> None:
        self.book, self.named = book, list(named)
        self.ends: list[int] = [0]

    def look(self, tensors: Sequence[torch.Tensor], role: Role | None = None) -> torch.Tensor:
        """Return samples of one tensor per parameter, float64; under a role count the tensors too."""
        found = [_numbers(tensor) for tensor in tensors]
        if role is not None:
            samples = self.book.look_all(role, [(*named, one) for named, one in zip(self.named, found)])
        else:
            samples = look([Look(one.flat, self.book.key(own)) for one, (own, _) in zip(found, self.named)])
        self.ends = [0, *itertools.accumulate(map(len, samples))]
        packed = torch.cat(samples).double()
        if any(one.scale != 1.0 for one in found):
            packed *= torch.from_numpy(np.repeat([one.scale for one in found], np.diff(self.ends)))
        return packed

    def look_at_changes(
        self,
        records: Sequence[Realised],
        before: torch.Tensor,
        after: torch.Tensor,
        wanted: torch.Tensor,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Count how wanted values and the changes to them were stored, under the role of updates.

        Args:
            records: one per parameter.
            before, after, wanted: float64, in this layout.
            dtypes: of the parameters that are changed.
        """
        add_changes(records, before, after, wanted, self.ends, as_values=True)
        changes = wanted - before
        changes = changes if torch.float64 in dtypes else changes.float()
        parts = zip(self.named, self.parts(changes), dtypes)
        self.book.look_all("update", [(*named, Stored(part, dtype)) for named, part, dtype in parts])

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the sample of each parameter among packed ones."""
        return list(packed.split(np.diff(self.ends).tolist()))


def _numbers(tensor: torch.Tensor) -> Stored:
    found = stored(tensor)
    assert found is not None, "asked for count_readable first"
    return found


def count_readable(tensor: torch.Tensor) -> int:
    """Return how many numbers a tensor holds, -1 if they cannot be read."""
    found = stored(tensor)
    return -1 if found is None else found.flat.numel()


def count_changes(
    values: Sequence[torch.Tensor], ends: Sequence[int], as_values: bool, decreases: bool
) -> list[list[float]]:
    """Return the sums of `changes_table` of each tensor; the arguments are those of `add_changes`."""
    if select_engine("cpu") != "llvm":
        return _count_by_numpy(values, ends, as_values, decreases)
    count = len(ends) - 1
    chunks, pointers, rows = np.zeros((count, CHUNK), np.int64), np.zeros(3, np.int64), np.zeros(count, np.int64)
    chunks[:, 1], chunks[:, 2], pointers[:] = ends[:-1], np.diff(ends), [address(one) for one in values]
    constants, sums = np.array([as_values, 0.0 if decreases else np.inf]), np.zeros((count, CHUNK))
    given = (*map(address_of, (chunks, pointers, rows, constants)), 0, address_of(sums), 0)
    run_chunks(compiled(changes_table()), chunks[:, 2], *given)
    found: list[list[float]] = sums.tolist()
    return found


def _count_by_numpy(
    values: Sequence[torch.Tensor], ends: Sequence[int], as_values: bool, decreases: bool
) -> list[list[float]]:
    """Return the same without kernels."""
    found = []
    for start, end in itertools.pairwise(ends):
        b, a, w = (one.numpy()[start:end] for one in values)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            w = w - b if as_values else w
            w, change = np.minimum(w, 0) if decreases else w, a - b
            counts = (w != 0) & np.isfinite(w) & np.isfinite(change)
            same = counts & (b.view(np.int64) == a.view(np.int64))
            w, change = w[counts], change[counts]
            found.append([float(x.sum()) for x in (counts, same, w**2, w * change)])
    return found


def add_changes(
    records: Sequence[Realised],
    before: torch.Tensor,
    after: torch.Tensor,
    wanted: torch.Tensor,
    ends: Sequence[int] | None = None,
    *,
    known: bool = True,
    decreases: bool = False,
    as_values: bool = False,
) -> None:
    """Add to each record the changes of its part of three flat tensors.

    Args:
        records: one per tensor.
        before, after: sampled values, one tensor's after the other's.
        wanted: the changes that were wanted; where they are not known, the gradients, whose zeros want none.
        ends: where the tensors' parts begin and end: one more than there are tensors; None for a single one.
        known: whether `wanted` is what was wanted.
        decreases: whether wanted decreases alone are counted.
        as_values: whether `wanted` holds the values that were wanted, and not the changes.
    """
    values = [_convert_to_float64(one) for one in (before, after, wanted)]
    sums = count_changes(values, ends or [0, len(before)], as_values, decreases)
    for record, (seen, cancelled, square, kept) in zip(records, sums, strict=True):
        record.seen += int(seen)
        record.cancelled += int(cancelled)
        if not known:
            record.known = False
        elif record.known:
            # Each step's share counts by its elements, not by the size of its learning rate.
            share = kept / square if square else 0.0
            record.wanted += int(seen) if square else 0
            record.kept += int(seen) * share


def _convert_to_float64(values: torch.Tensor) -> torch.Tensor:
    """Return values as contiguous float64 on the CPU."""
    if values.dtype is torch.float64 and values.is_cpu and values.is_contiguous():
        return values
    return values.detach().to("cpu", torch.float64).contiguous()


# Roles of states, by their names in torch.optim and here.
MOMENTS: dict[str, Role] = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "prev"), "first moment"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq", "exp_inf", "acc_delta"), "second moment"),
}
# Averages of squares: what holds them too coarsely loses their decay and keeps their growth, so that decay alone tells.
AVERAGED_SQUARES = ("exp_avg_sq", "square_avg", "acc_delta")


@dataclass(slots=True)
class Batch:
    """Parameters that step together.

    Attributes:
        weight, gradient: float64 samples before the step.
        states: samples of their states, and numbers of whole tensors, before the step; None where they are not known.
    """

    layout: Layout
    stepped: list[Stepped]
    weight: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, Any] | None


class Updates:
    """Watches the steps of one optimizer.

    Args:
        names: of its parameters, by id.
    """

    def __init__(self, book: Notebook, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self.book, self.optimizer, self._names = book, optimizer, names
        self._batches: list[Batch] = []
        self._shadows: dict[int, Shadow] = {}
        self._options: dict[int, tuple[str, dict[str, Any]]] = {}
        self.rounded: dict[str, RoundingDecisions] = {}

    def before(self, arrived: set[str], alone: torch.Tensor | None = None) -> None:
        """Sample what the step is about to change.

        Args:
            arrived: names whose gradients were looked at when they arrived.
            alone: the parameter that steps, if it is one.
        """
        self._batches = []
        groups = self._groups(alone)
        late = [one for _, stepped in groups.values() for one in stepped if one.record.name not in arrived]
        if late:
            self._look_at_late(late)
        self._batches = [self._batch(states, stepped) for states, stepped in groups.values()]
        for batch in self._batches if isinstance(self.optimizer, Optimizer) else ():
            for one in batch.stepped:
                self._represent(one)

    def _groups(self, alone: torch.Tensor | None) -> dict[tuple, tuple[dict[str, Any] | None, list[Stepped]]]:
        """Group parameters with gradients, and their states, by what makes them step together."""
        groups: dict[tuple, tuple[dict[str, Any] | None, list[Stepped]]] = {}
        for group in self.optimizer.param_groups:
            kind, options = self._options_of(group)
            for parameter in group["params"]:
                if alone is not None and parameter is not alone:
                    continue
                name = self._names.get(id(parameter))
                if name is None or parameter.grad is None:
                    continue
                one = self._stepped(name, parameter, group, options)
                if one is not None:
                    states, together = self._states_of(one)
                    key = (kind, parameter.dtype, parameter.grad.dtype, *together)
                    groups.setdefault(key, (states, []))[1].append(one)
        return groups

    def _options_of(self, group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return a group's options as plain data, and words that tell them from others."""
        options = {key: _plain_option(value) for key, value in group.items() if _is_option(key, value)}
        known = self._options.get(id(group))
        if known is None or known[1] != options:
            known = self._options[id(group)] = repr(options), options
        return known

    def _stepped(
        self, name: str, parameter: torch.Tensor, group: dict[str, Any], options: dict[str, Any]
    ) -> Stepped | None:
        record = self.book.record.parameters[name]
        gradient = parameter.grad
        assert gradient is not None
        record.gradients += 1
        record.gradient_dtype, record.options = gradient.dtype, options
        if isinstance(self.optimizer, Optimizer):
            chosen = group.get("weight_update")
            record.weight_update = str(getattr(chosen, "name", chosen) or record.weight_update)
        count = count_readable(parameter)
        if count < 0 or count_readable(gradient) != count:
            self.book.missed(f"{name}: a parameter or gradient whose numbers cannot be read")
            return None
        if draws(self.optimizer, parameter):
            self.book.fixed.add(name)
        return Stepped(record, parameter, group, count) if count else None

    def _states_of(self, one: Stepped) -> tuple[dict[str, Any] | None, tuple]:
        """Return a parameter's states for a shadow step, and what others must share to step with it."""
        if type(self.optimizer) not in ELEMENTWISE:
            return None, ()
        states: dict[str, Any] = {}
        whole: list[tuple[str, float]] = []
        for key, value in self._state_of(one.parameter).items():
            states[key] = value
            if key in WHOLE or not isinstance(value, torch.Tensor):
                whole.append((key, _number(value, 0.0)))
                continue
            if not value.dtype.is_floating_point or count_readable(value) != one.elements:
                return None, ("unknown",)
        return states, (*whole, *((key, getattr(value, "dtype", None)) for key, value in states.items()))

    def _batch(self, states: dict[str, Any] | None, stepped: list[Stepped]) -> Batch:
        """Sample weights, gradients and states of parameters that step together."""
        layout = self._layout(stepped)
        weight = layout.look([one.parameter for one in stepped], "weight")
        gradient = layout.look([_gradient(one.parameter) for one in stepped])
        divisor = _number(getattr(self.optimizer, "grad_scale", None), 1.0)
        if divisor != 1.0:
            gradient /= divisor
        for one, slope in zip(stepped, layout.parts(gradient)):
            one.record.nonzero_gradients += int(slope.count_nonzero())
        if not self._is_elementwise():
            for one, own, slope in zip(stepped, layout.parts(weight), layout.parts(gradient)):
                one.weight, one.gradient = own, slope
        sampled: dict[str, Any] = {}
        for name, value in (states or {}).items():
            if name in WHOLE or not isinstance(value, torch.Tensor):
                sampled[name] = value.clone() if isinstance(value, torch.Tensor) else value
            else:
                tensors = [self._state_of(one.parameter)[name] for one in stepped]
                sampled[name] = layout.look(tensors)
        return Batch(layout, stepped, weight, gradient, None if states is None else sampled)

    def _layout(self, stepped: list[Stepped]) -> Layout:
        return Layout(self.book, [(one.record.name, one.record.kind) for one in stepped])

    def _look_at_late(self, late: list[Stepped]) -> None:
        """Count gradients that no hook has seen."""
        found = [(one.record.name, one.record.kind, stored(_gradient(one.parameter))) for one in late]
        self.book.look_all("weight gradient", [(name, kind, one) for name, kind, one in found if one is not None])

    def _is_elementwise(self) -> bool:
        return type(self.optimizer) in ELEMENTWISE

    def _represent(self, one: Stepped) -> None:
        """Set the float32 weight behind a parameter of halfulp's optimizers, and the change that its rule wants."""
        if isinstance(self.optimizer, Optimizer):
            key = self.book.key(one.record.name)
            one.unplanned = self.optimizer._plans.get(one.parameter) is None
            shown = represented(self.optimizer, one.parameter, key)
            one.weight = one.weight if shown is None else shown
            found = halfulp_change(self.optimizer, one.parameter, one.options, one.gradient, one.weight, key)
            if found is not None:
                one.change, one.wanted_states, one.states = found

    def after(self) -> None:
        """Compare with what the step has made of it."""
        batches, self._batches = self._batches, []
        if not batches or _number(getattr(self.optimizer, "found_inf", None), 0.0):
            return
        for batch in batches:
            now = batch.layout.look([one.parameter for one in batch.stepped])
            states = self._count_states(batch)
            if batch.states is not None:
                self._compare(batch, now, states)
            else:
                self._count_unknown(batch, now)

    def _compare(self, batch: Batch, now: torch.Tensor, states_now: dict[str, torch.Tensor]) -> None:
        """Step a shadow of some parameters, and count what was wanted against what took place."""
        assert batch.states is not None
        stepped, layout, weight = batch.stepped, batch.layout, batch.weight
        options = stepped[0].options
        states = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in batch.states.items()}
        shadow = self._shadows.get(id(options))
        if shadow is None:
            shadow = self._shadows[id(options)] = Shadow(self.optimizer)
        moved, wanted_states = shadow.step(weight, batch.gradient, states, options)
        for one, wanted, there in self._drawn(batch, moved, now):
            self._follow_directions(one, wanted, there)
        dtypes = [_stored_dtype(one.record.dtype) for one in stepped]
        layout.look_at_changes([one.record.update for one in stepped], weight, now, moved, dtypes)
        for key, value in wanted_states.items():
            if key not in WHOLE and isinstance(value, torch.Tensor) and value.shape == weight.shape:
                self._compare_state(key, batch, value, states_now.get(key))
        self._compare_decay(batch)

    def _drawn(
        self, batch: Batch, wanted: torch.Tensor, now: torch.Tensor
    ) -> list[tuple[Stepped, torch.Tensor, torch.Tensor]]:
        """Return the stochastically rounded parameters, with their wanted and their stored values."""
        if not any(one.record.name in self.book.fixed for one in batch.stepped):
            return []
        parts = zip(batch.stepped, batch.layout.parts(wanted), batch.layout.parts(now))
        return [one for one in parts if one[0].record.name in self.book.fixed]

    def _compare_state(self, key: str, batch: Batch, wanted: torch.Tensor, now: torch.Tensor | None) -> None:
        if now is None:
            return
        assert batch.states is not None
        before = batch.states.get(key)
        before = torch.zeros_like(wanted) if before is None else before
        records = [one.record.states.setdefault(key, Realised()) for one in batch.stepped]
        squares = key in AVERAGED_SQUARES
        add_changes(records, before, now, wanted, batch.layout.ends, decreases=squares, as_values=True)

    def _compare_decay(self, batch: Batch) -> None:
        """Compare decoupled decay, which torch's loop rounds by itself."""
        factor = decay_factor(self.optimizer, batch.stepped[0].options)
        if factor is None:
            return
        records = []
        for one in batch.stepped:
            if one.record.decay is None:
                one.record.decay = Realised()
            records.append(one.record.decay)
        decayed = (batch.weight.to(batch.stepped[0].parameter.dtype) * factor).double()
        add_changes(records, batch.weight, decayed, batch.weight * (factor - 1), batch.layout.ends)

    def _count_unknown(self, batch: Batch, now: torch.Tensor) -> None:
        """Count lost updates that no shadow steps: of halfulp's optimizers, or of no known formula."""
        for one, plain in zip(batch.stepped, batch.layout.parts(now)):
            if one.unplanned:
                continue
            after, known = self._shown(one, plain), one.change is not None
            self._compare_own_states(one)
            wanted = one.gradient if one.change is None else one.change
            add_changes([one.record.update], one.weight, after, wanted, known=known)
            if one.change is not None:
                self._follow_directions(one, one.weight.double() + one.change.double(), after.double())
            self._look_at_update(one, one.change if one.change is not None else after.double() - one.weight.double())

    def _shown(self, one: Stepped, plain: torch.Tensor) -> torch.Tensor:
        """Return the value that a parameter represents after the step."""
        if not isinstance(self.optimizer, Optimizer):
            return plain
        shown = represented(self.optimizer, one.parameter, self.book.key(one.record.name))
        return plain if shown is None else shown

    def _follow_directions(self, one: Stepped, wanted: torch.Tensor, after: torch.Tensor) -> None:
        """Count the directions of stochastic rounding."""
        if one.record.name in self.book.fixed:
            decisions = self.rounded.setdefault(one.record.name, RoundingDecisions())
            decisions.add(one.record, one.record.dtype, wanted, after)

    def _compare_own_states(self, one: Stepped) -> None:
        """Compare the states of halfulp's optimizers, decoded from their storage."""
        if not one.wanted_states:
            return
        assert isinstance(self.optimizer, Optimizer)
        records = one.record.states
        after = decoded_states(self.optimizer._plans[one.parameter], self.book.key(one.record.name))
        for key, wanted in one.wanted_states.items():
            before = one.states[key]
            change = wanted.double() - before.double()
            record, squares = records.setdefault(key, Realised()), key in AVERAGED_SQUARES
            add_changes([record], before, after[key], change, decreases=squares)

    def _look_at_update(self, one: Stepped, change: torch.Tensor) -> None:
        flat = change if one.record.dtype == torch.float64 else change.float()
        found = Stored(flat.contiguous(), _stored_dtype(one.record.dtype))
        self.book.look_all("update", [(one.record.name, one.record.kind, found)])

    def _count_states(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Count the states after the step, and return samples of those that all parameters of a batch have."""
        found: dict[str, list[tuple[Stepped, torch.Tensor]]] = {}
        for one in batch.stepped:
            for key, value in self._state_of(one.parameter).items():
                if key in WHOLE or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
                    continue
                one.record.state_dtypes[key] = value.dtype
                if count_readable(value) == one.elements:
                    found.setdefault(key, []).append((one, value))
        samples = {}
        for key, held in found.items():
            all_have_it = len(held) == len(batch.stepped)
            layout = batch.layout if all_have_it else self._layout([one for one, _ in held])
            taken = layout.look([value for _, value in held], MOMENTS.get(key))
            if all_have_it:
                samples[key] = taken
        return samples

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        # Indexing a defaultdict would make an entry that the optimizer takes for a started one.
        return self.optimizer.state.get(parameter, {})


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient


def _number(value: Any, otherwise: float) -> float:
    if value is None:
        return otherwise
    return float(value) if isinstance(value, int | float | torch.Tensor) else otherwise


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32


_OPTIONS = (bool, int, float, str, tuple)
_LEFT_OUT = frozenset({"params", "param_names", "identities", "random_stream"})


def _is_option(key: str, value: Any) -> bool:
    if key in _LEFT_OUT:
        return False
    return isinstance(value, _OPTIONS) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain_option(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_option, value))
    return value.item() if isinstance(value, torch.Tensor) else value


FEWEST = 64
_WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def draws(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer rounds updates of a parameter stochastically, as far as it says so."""
    if isinstance(optimizer, Optimizer):
        plan = optimizer._plans.get(parameter)
        if plan is None or plan.spec.scaled or plan.spec.in_parameter or plan.spec.auxiliary_names:
            return False
        return plan.spec.store.dtype in _WORDS and bool(plan.spec.update.draws(plan.spec.store))
    return parameter.dtype in _WORDS and bool(getattr(optimizer, "bf16_stochastic_round", False))


class RoundingDecisions:
    """Follows the directions in which one parameter's sampled elements are rounded, at the same places every time.

    Attributes:
        errors: of the last step, float64: 1 where an element was rounded away from zero, 0 where towards it, less the
            probability of going away from it, since random bits are added to magnitudes; NaN where nothing was rounded.
    """

    __slots__ = ("_before", "errors")

    def __init__(self) -> None:
        self.errors: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def take_errors(self) -> torch.Tensor | None:
        """Return the errors of the last step, once."""
        errors, self.errors = self.errors, None
        return errors

    def add(self, record: ParameterRecord, dtype: torch.dtype, wanted: torch.Tensor, after: torch.Tensor) -> None:
        """Count the directions of one step.

        Args:
            dtype: that the wanted values were rounded to.
            wanted, after: float64 values before rounding, and what was stored.
        """
        low, high = neighbours(wanted, dtype)
        up = after == high
        probability = (wanted - low) / (high - low)
        decided = (low < wanted) & (wanted < high) & (up | (after == low)) & (high - low).isfinite()
        p, went_up = probability[decided], up[decided].double()
        rounding = record.rounding = record.rounding or RoundingRecord()
        rounding.seen += len(p)
        rounding.excess += float((went_up - p).sum())
        rounding.variance += float((p * (1 - p)).sum())
        errors = torch.where(decided, up.double() - probability, torch.nan)
        self.errors = errors * wanted.sign()
        surprise = errors / (probability * (1 - probability)).sqrt()
        if self._before is not None and len(self._before) == len(surprise):
            products = self._before * surprise
            products = products[products.isfinite()]
            if len(products) >= FEWEST:
                correlation = float(products.mean())
                rounding.repeated = correlation if rounding.repeated is None else max(rounding.repeated, correlation)
        self._before = surprise


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest numbers of a 16-bit dtype at or below and above float64 values, as float64.

    >>> low, high = neighbours(torch.tensor([1.001, -1.001], dtype=torch.float64), torch.bfloat16)
    >>> low.tolist(), high.tolist()
    ([1.0, -1.0078125], [1.0078125, -1.0])
    """
    near = x.to(dtype)
    below = torch.where(near.double() > x, _next(near, -1), near).double()
    return below, _next(below.to(dtype), 1).double()


def _next(x: torch.Tensor, direction: int) -> torch.Tensor:
    """Return the neighbouring number upwards (1) or downwards (-1), by its bits in order."""
    bits = x.view(torch.int16).to(torch.int32)
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits) + direction
    return torch.where(ordered < 0, -ordered | 0x8000, ordered).to(torch.int16).view(x.dtype)


def represented(optimizer: Optimizer, parameter: torch.Tensor, key: int) -> torch.Tensor | None:
    """Return the sample of the float32 weight that a parameter and its auxiliary tensors stand for.

    None before the parameter's first step, and where the weight is a ScaledTensor's or an MCTensor's.
    """
    plan = optimizer._plans.get(parameter)
    if plan is None or plan.spec.scaled or plan.spec.in_parameter or not plan.spec.auxiliary_names:
        return None
    return sampled(read_weights([plan])[0], key)


def halfulp_change(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    group: dict[str, Any],
    gradient: torch.Tensor,
    weight: torch.Tensor,
    key: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Return the change that the float32 rule makes to sampled weights, the states that it wants, and those before.

    None where it is not computed from such numbers: before the first step, under `wrap` or scaled parameters, and where
    the rule looks at whole tensors first.
    """
    plan = optimizer._plans.get(parameter)
    rule = optimizer.rule(group)
    if plan is None or plan.spec.scaled or rule.assigns or rule.is_late:
        return None
    states = decoded_states(plan, key)
    step = plan.state["step"] + 1
    change, new = change_by_rule(rule, weight, gradient, states.values(), rule.values(group, step))
    return change, dict(zip(states, new)), states


def decoded_states(plan: ParameterPlan, key: int) -> dict[str, torch.Tensor]:
    """Return samples of a parameter's states as float32 values, whatever they are stored as."""
    found = {}
    for slot, codec, tensors in zip(plan.spec.rule.states, plan.spec.codecs, plan.states):
        # What stores numbers as they are need not be decoded where no sample looks.
        values = tensors[0] if type(codec) is Plain else codec.decode(tensors)
        found[slot.name] = sampled(values.reshape(-1), key)
    return found
