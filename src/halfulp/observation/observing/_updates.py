"""Updates: samples of weights, gradients, states and averages around a step, beside what was wanted."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..._messages import name_type
from ...kernels import keeping_subnormals
from ...optim import EMA, Optimizer
from ...optim._ema import compute_ema_decay
from ...optim._float32 import read_float32_weights
from ...optim._wrap import is_wrappable
from ...optim.parameters._parameter_plan import ParameterPlan
from ...optim.rules._update_rule import UpdateRule
from ...optim.states._codec import PlainCodec
from ...optim.step._kernel import compute_rule_change
from ...rounding import quantize
from .._record import AverageRecord, ParameterRecord, RealisedChanges, Role, RoundingDirectionRecord
from ._recorder import Recorder
from ._sampler import SIXTEEN_BIT_DTYPES, StoredNumbers, read_numbers, take_sample

GroupOptions = Mapping[str, Any]
# Whether weight decay multiplies the weight by 1 - lr wd, rounded by itself, before the update is subtracted.
DECOUPLES_DECAY_BY_OPTIMIZER_CLASS: dict[type[torch.optim.Optimizer], Callable[[GroupOptions], bool]] = {}
# State entries that belong to a whole tensor, whatever its shape.
WHOLE_TENSOR_STATE_NAMES = frozenset({"step", "mu_product", "eta", "mu"})
_STEP_DECORATOR_MODULES = ("torch.optim.optimizer", "torch.utils._contextlib")


def register_elementwise(
    kind: type[torch.optim.Optimizer], decouples: Callable[[GroupOptions], bool] | bool = False
) -> None:
    """Let observations compute the updates of an optimizer class by running it on shadows of sampled elements.

    Args:
        kind: the class. The update of an element must depend on that element's weight, gradient and states, and on
            the group's options, alone; its constructor takes (params, **options).
        decouples: whether it multiplies the weight by 1 - lr * weight_decay, apart from the gradient; or a function of
            a group's options that says so.

    Raises:
        TypeError: it is no optimizer class.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"register_elementwise takes a subclass of torch.optim.Optimizer, got {name_type(kind)}")
    DECOUPLES_DECAY_BY_OPTIMIZER_CLASS[kind] = decouples if callable(decouples) else lambda options: decouples


for _name in ("SGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD"):
    register_elementwise(getattr(torch.optim, _name))
for _name in ("Adam", "NAdam", "RAdam"):
    register_elementwise(getattr(torch.optim, _name), lambda options: bool(options.get("decoupled_weight_decay")))
register_elementwise(torch.optim.AdamW, True)


class ShadowOptimizer:
    """An optimizer's own class, run on float64 copies of samples."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind: type[torch.optim.Optimizer] = type(optimizer)
        parameters = inspect.signature(self.kind.__init__).parameters
        self._accepted_options: set[str] = set(parameters) - {"self", "params"}
        fused = True if self.kind in (torch.optim.Adam, torch.optim.AdamW) else None
        self._implementation_options = {"foreach": False, "capturable": False, "differentiable": False, "fused": fused}
        self._instance: torch.optim.Optimizer | None = None
        self._weight: torch.nn.Parameter | None = None

    def step(
        self, weights: torch.Tensor, gradients: torch.Tensor, states: dict[str, Any], options: GroupOptions
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return flat float64 weights and states after one step without hooks, which the next one overwrites."""
        weight = self._weight
        if weight is None or weight.numel() != weights.numel():
            weight = self._weight = torch.nn.Parameter(weights.clone())
        else:
            weight.copy_(weights)
        weight.grad = gradients
        plain: dict[str, Any] = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in {**options, **self._implementation_options}.items()
            if key in self._accepted_options
        }
        if self._instance is None:
            self._instance = self.kind([weight], **plain)
        one = self._instance
        group = one.param_groups[0]
        group.update(plain)
        group["params"] = [weight]
        if states or not isinstance(one, torch.optim.Adagrad):
            one.state = defaultdict(dict, {weight: states} if states else {})
        # Without torch's wrappers around it: hooks, a profiler's range, the mode of gradients.
        step: Any = type(one).step
        step = getattr(step, "__wrapped__", step)
        while (
            hasattr(step, "__wrapped__") and getattr(step, "__globals__", {}).get("__name__") in _STEP_DECORATOR_MODULES
        ):
            step = step.__wrapped__
        step(one)
        return weight.detach(), one.state[weight]


def set_optimizer_of_record(record: ParameterRecord, optimizer: torch.optim.Optimizer, wrappable: bool) -> None:
    """Note which optimizer steps a parameter, and whether `wrap` takes it."""
    record.optimizer, record.optimizer_module = type(optimizer).__name__, type(optimizer).__module__
    record.is_wrappable = wrappable
    if isinstance(optimizer, Optimizer):
        record.weight_update = "none"


_HOOKED_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def is_in_step_of_subclass(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a base class's step, within that of its subclass, calls a hook: torch calls hooks in both."""
    if sum(hasattr(vars(kind).get("step"), "hooked") for kind in type(optimizer).__mro__) < 2:
        return False
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        steps += frame.f_code is _HOOKED_STEP_CODE and frame.f_locals["args"][0] is optimizer
    return steps > 1


def run_before_update(
    action: Callable[[], object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Run an action, in a pre-hook of a step, where the gradients are there: now, or behind the closure's first call.

    Return the arguments to step with in place of these; None where they stay.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
    if not callable(closure):
        action()
        return None
    is_first_call = True

    def call_closure_and_run() -> Any:
        nonlocal is_first_call
        result = closure()
        # At further calls of one step, as LBFGS makes, the weights have moved already.
        if is_first_call:
            is_first_call = False
            action()
        return result

    if len(args) > 1:
        return (args[0], call_closure_and_run, *args[2:]), kwargs
    return args, {**kwargs, "closure": call_closure_and_run}


def read_scaler_attributes(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return what a GradScaler leaves to a fused step: the divisor of its gradients, and whether it is skipped."""
    divisor = _convert_number_to_float(getattr(optimizer, "grad_scale", None), 1.0)
    return divisor, bool(_convert_number_to_float(getattr(optimizer, "found_inf", None), 0.0))


class ParameterBeforeStep(NamedTuple):
    """A parameter that is about to step, and its numbers, held until they have been sampled."""

    record: ParameterRecord
    parameter: torch.Tensor
    weight: StoredNumbers
    gradient: StoredNumbers
    # Of torch's optimizers of known formula, tensors of the parameter's elements as StoredNumbers; None of others.
    states: dict[str, Any] | None


def sample_tensors(
    recorder: Recorder, records: Sequence[ParameterRecord], numbers: Sequence[StoredNumbers], role: Role | None = None
) -> list[torch.Tensor]:
    """Return float64 samples of one tensor per parameter; with a role, record the tensors' numbers under it."""
    samples = []
    for record, one in zip(records, numbers, strict=True):
        sample = take_sample(one.values, recorder.get_sampling_key(record.name))
        if role is not None:
            recorder.record_numbers(role, record.name, record.kind, one, sample)
        samples.append(sample if one.scale == 1.0 else sample * one.scale)
    return samples


@keeping_subnormals()
def record_realised_changes(
    record: RealisedChanges,
    before: torch.Tensor,
    after: torch.Tensor,
    wanted: torch.Tensor,
    *,
    is_wanted_known: bool = True,
    decreases_only: bool = False,
) -> None:
    """Add to a record what of the wanted changes of a tensor's sample took place.

    Where these are not known, `wanted` is the gradients, whose zeros want none.
    """
    old, new, aim = (x.detach().to("cpu", torch.float64).contiguous().numpy() for x in (before, after, wanted))
    with np.errstate(invalid="ignore", over="ignore"):
        change, aim = new - old, np.minimum(aim, 0.0) if decreases_only else aim
        counts, square, kept = aim != 0, float(aim @ aim), float(aim @ change)
        if not math.isfinite(square + kept):
            counts &= np.isfinite(change) & np.isfinite(aim)
            square, kept = float(aim[counts] @ aim[counts]), float(aim[counts] @ change[counts])
    seen = int(np.count_nonzero(counts))
    record.seen += seen
    record.cancelled += int(np.count_nonzero(counts & (old.view(np.int64) == new.view(np.int64))))
    if not is_wanted_known:
        record.known = False
    elif record.known:
        # Each step's share counts by its elements, not by the size of its learning rate.
        record.wanted += seen if square else 0
        record.kept += seen * kept / square if square else 0.0


# Roles of states, by their names in torch.optim and here.
ROLE_BY_STATE_NAME: dict[str, Role] = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "prev"), "first moment"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq", "exp_inf", "acc_delta"), "second moment"),
}
# Averages of squares: what holds them too coarsely loses their decay and keeps their growth, so that decay alone tells.
SQUARE_AVERAGE_STATE_NAMES = ("exp_avg_sq", "square_avg", "acc_delta")


# The change of packed samples of weights that an optimizer wants, and their states after it by name, in float64.
WantedUpdate = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(slots=True)
class ParameterBatch:
    """Parameters that step together, their samples before the step one after another in float64."""

    records: list[ParameterRecord]
    parameters: list[torch.Tensor]
    # Elements of each parameter, and sampled ones.
    element_counts: list[int]
    sample_counts: list[int]
    weight: torch.Tensor
    gradient: torch.Tensor
    # Samples, and numbers of whole tensors.
    states: dict[str, Any] = field(default_factory=dict)
    # None where no formula is known.
    compute_wanted_update: Callable[[ParameterBatch], WantedUpdate] | None = None
    # Whether halfulp's optimizer has yet to lay out their states, so that nothing is known.
    is_unplanned: bool = False

    def split_samples(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the sample of each parameter among packed ones."""
        return list(packed.split(self.sample_counts))

    def record_realised_changes(self, records: Sequence[RealisedChanges], *packed: torch.Tensor, **how: Any) -> None:
        """Call `record_realised_changes` for each parameter's record and its part of packed samples."""
        for record, *samples in zip(records, *map(self.split_samples, packed), strict=True):
            record_realised_changes(record, *samples, **how)


class UpdateWatcher:
    """Watches the steps of one optimizer, whose parameters have names by id."""

    def __init__(self, recorder: Recorder, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self.recorder, self.optimizer, self._names = recorder, optimizer, names
        self._batches: list[ParameterBatch] = []
        self._shadow = ShadowOptimizer(optimizer) if type(optimizer) in DECOUPLES_DECAY_BY_OPTIMIZER_CLASS else None
        # Directions of rounding in the step before less their probabilities, in standard deviations, by parameter.
        self._last_surprises: dict[str, torch.Tensor] = {}

    def sample_before_step(self, arrived: set[str]) -> None:
        """Sample weights, gradients and states before a step; `arrived` names gradients that were counted already."""
        self._batches = []
        batches = self._group_parameters()
        for one in itertools.chain.from_iterable(members for _, members in batches):
            if one.record.name not in arrived:  # its gradient met no hook
                sample_tensors(self.recorder, [one.record], [one.gradient], "weight gradient")
        self._batches = [self._sample_batch(group, members) for group, members in batches]

    def _group_parameters(self) -> list[tuple[dict[str, Any], list[ParameterBeforeStep]]]:
        """Return parameters with gradients by what makes them step together, with their param groups."""
        batches: dict[tuple[Any, ...], tuple[dict[str, Any], list[ParameterBeforeStep]]] = {}
        for group in self.optimizer.param_groups:
            plain = {
                key: _convert_to_plain_option(value) for key, value in group.items() if key not in _IGNORED_GROUP_KEYS
            }
            options = {key: value for key, value in plain.items() if value is not None}
            kind = tuple(options.items())
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    self.recorder.note_unobserved(
                        "the optimizer got parameters after observing began that the model did not have: they are not "
                        "observed; begin the observation when they are there"
                    )
                    continue
                record = self.recorder.record.parameters[name]
                if record.optimizer is None:  # added by add_param_group, as what is unfrozen in the middle of a run
                    set_optimizer_of_record(record, self.optimizer, is_wrappable(self.optimizer))
                    record.requires_grad = parameter.requires_grad
                if parameter.grad is None:
                    continue
                record.gradients += 1
                record.gradient_dtype, record.options = parameter.grad.dtype, options
                if isinstance(self.optimizer, Optimizer):
                    chosen = group.get("weight_update")
                    record.weight_update = str(getattr(chosen, "name", chosen) or record.weight_update)
                if (one := self._read_parameter(record, parameter, parameter.grad)) is not None:
                    key = (kind, parameter.dtype, parameter.grad.dtype, *self._get_batch_key(one, group))
                    batches.setdefault(key, (group, []))[1].append(one)
        return list(batches.values())

    def _read_parameter(
        self, record: ParameterRecord, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> ParameterBeforeStep | None:
        """Return a parameter that is about to step; None where it has no numbers that can be read."""
        weight, slope = read_numbers(parameter), read_numbers(gradient)
        if weight is None or slope is None or weight.values.numel() != slope.values.numel():
            self.recorder.note_unobserved(f"{record.name}: a parameter or gradient whose numbers cannot be read")
            return None
        if is_rounded_stochastically(self.optimizer, parameter):
            self.recorder.fixed_sample_names.add(record.name)
        size = weight.values.numel()
        if not size:
            return None
        states = _read_numbers_of_states(self._get_state(parameter), size) if self._shadow is not None else None
        return ParameterBeforeStep(record, parameter, weight, slope, states)

    def _get_batch_key(self, one: ParameterBeforeStep, group: dict[str, Any]) -> tuple[Any, ...]:
        """Return the properties that parameters must share, beyond dtypes and options, to step with this one."""
        if isinstance(self.optimizer, Optimizer):
            plan = self.optimizer._plans.get(one.parameter)
            if plan is None:
                return (None,)
            names = [slot.name for slot in plan.spec.rule.states]
            elementwise = has_elementwise_rule(plan, self.optimizer.rule(group))
            return (id(group), plan.state.get("step"), has_float32_weight(plan), elementwise, *names)
        if one.states is None:
            return (None,)
        return tuple(
            (key, value.values.dtype if isinstance(value, StoredNumbers) else _convert_number_to_float(value, 0.0))
            for key, value in one.states.items()
        )

    def _sample_batch(self, group: dict[str, Any], members: list[ParameterBeforeStep]) -> ParameterBatch:
        """Sample weights, gradients and states of parameters that step together."""
        records, parameters, weights, gradients, all_states = map(list, zip(*members))
        samples = sample_tensors(self.recorder, records, weights, "weight")
        weight, gradient = torch.cat(samples), torch.cat(sample_tensors(self.recorder, records, gradients))
        divisor, _ = read_scaler_attributes(self.optimizer)
        if divisor != 1.0:
            gradient = gradient / divisor
        sizes = [numbers.values.numel() for numbers in weights]
        batch = ParameterBatch(records, parameters, sizes, list(map(len, samples)), weight, gradient)
        for record, slope in zip(records, batch.split_samples(gradient)):
            record.nonzero_gradients += int(slope.count_nonzero())
        if isinstance(self.optimizer, Optimizer):
            plan = self.optimizer._plans.get(parameters[0])
            batch.is_unplanned = plan is None
            if plan is not None:
                batch.weight = self._sample_float32_weights(batch, weight)
                rule = self.optimizer.rule(group)
                if has_elementwise_rule(plan, rule):
                    batch.states = self._sample_decoded_states(batch)
                    constants = rule.values(group, plan.state["step"] + 1)

                    def compute_by_rule(batch: ParameterBatch) -> WantedUpdate:
                        states = [state.float() for state in batch.states.values()]
                        change, new = compute_rule_change(rule, batch.weight, batch.gradient, states, constants)
                        return change.double(), {key: one.double() for key, one in zip(batch.states, new)}

                    batch.compute_wanted_update = compute_by_rule
        elif all_states[0] is not None:
            for key, value in all_states[0].items():
                if isinstance(value, StoredNumbers):
                    held = [states[key] for states in all_states]
                    batch.states[key] = torch.cat(sample_tensors(self.recorder, records, held))
                else:
                    batch.states[key] = value.clone() if isinstance(value, torch.Tensor) else value
            batch.compute_wanted_update = self._compute_wanted_update_by_shadow
        return batch

    def _sample_float32_weights(self, batch: ParameterBatch, stored_weights: torch.Tensor) -> torch.Tensor:
        """Return samples of the float32 weights behind the parameters of halfulp's optimizers."""
        plans = self._get_plans(batch)
        if not has_float32_weight(plans[0]):
            return stored_weights
        weights = [StoredNumbers(weight, weight.dtype) for weight in read_float32_weights(plans)]
        return torch.cat(sample_tensors(self.recorder, batch.records, weights))

    def _get_plans(self, batch: ParameterBatch) -> list[ParameterPlan]:
        assert isinstance(self.optimizer, Optimizer)
        return [self.optimizer._plans[parameter] for parameter in batch.parameters]

    def _sample_decoded_states(self, batch: ParameterBatch) -> dict[str, torch.Tensor]:
        """Return samples of the states of halfulp's optimizers, whatever they are stored as."""
        plans, found = self._get_plans(batch), {}
        for k, slot in enumerate(plans[0].spec.rule.states):
            numbers = []
            for plan in plans:
                codec, tensors = plan.spec.codecs[k], plan.states[k]
                # What stores numbers as they are need not be decoded where no sample looks.
                values = tensors[0] if type(codec) is PlainCodec else codec.decode(tensors)
                numbers.append(StoredNumbers(values.contiguous(), values.dtype))
            found[slot.name] = torch.cat(sample_tensors(self.recorder, batch.records, numbers))
        return found

    def compare_after_step(self) -> None:
        """Compare the changes and states that the step wanted with those that it made."""
        batches, self._batches = self._batches, []
        _, is_skipped = read_scaler_attributes(self.optimizer)
        if not batches or is_skipped:
            return
        for batch in batches:
            numbers = [one for parameter in batch.parameters if (one := read_numbers(parameter)) is not None]
            now = torch.cat(sample_tensors(self.recorder, batch.records, numbers))
            states_now = self._record_states_after_step(batch)
            if batch.is_unplanned:
                continue
            if isinstance(self.optimizer, Optimizer):
                now = self._sample_float32_weights(batch, now)
                states_now = self._sample_decoded_states(batch) if batch.states else {}
            if batch.compute_wanted_update is None:
                change = now - batch.weight
                updates = [record.update for record in batch.records]
                batch.record_realised_changes(updates, batch.weight, now, batch.gradient, is_wanted_known=False)
            else:
                change, states = batch.compute_wanted_update(batch)
                self._record_realised_updates(batch, (change, states), now, states_now)
            for record, part in zip(batch.records, batch.split_samples(change)):
                dtype = record.dtype if record.dtype.is_floating_point else torch.float32
                self.recorder.record_numbers("update", record.name, record.kind, StoredNumbers(part, dtype), part)

    def _record_realised_updates(
        self, batch: ParameterBatch, wanted: WantedUpdate, now: torch.Tensor, states_now: Mapping[str, torch.Tensor]
    ) -> None:
        change, states = wanted
        for record, *pair in zip(batch.records, batch.split_samples(batch.weight + change), batch.split_samples(now)):
            if record.name in self.recorder.fixed_sample_names:
                self._record_rounding_directions(record, *pair)
        batch.record_realised_changes([one.update for one in batch.records], batch.weight, now, change)
        for key, state in states.items():
            if key in states_now:
                before = batch.states.get(key)
                before = torch.zeros_like(state) if before is None else before
                changes = [record.states.setdefault(key, RealisedChanges()) for record in batch.records]
                falls = key in SQUARE_AVERAGE_STATE_NAMES
                batch.record_realised_changes(changes, before, states_now[key], state - before, decreases_only=falls)
        decouples, options = DECOUPLES_DECAY_BY_OPTIMIZER_CLASS.get(type(self.optimizer)), batch.records[0].options
        decay = options.get("weight_decay")
        # torch's loop rounds decoupled decay into the weight by itself, as a factor.
        if decouples is not None and decay and not options.get("fused") and decouples(options):
            factor = 1 - float(options["lr"]) * float(decay)
            for record in batch.records:
                record.decay = record.decay or RealisedChanges()
            changes = [record.decay for record in batch.records if record.decay is not None]
            decayed = (batch.weight.to(batch.parameters[0].dtype) * factor).double()
            batch.record_realised_changes(changes, batch.weight, decayed, batch.weight * (factor - 1))

    def _compute_wanted_update_by_shadow(self, batch: ParameterBatch) -> WantedUpdate:
        """Return the update of samples by the optimizer's own class, in float64."""
        states = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in batch.states.items()}
        assert self._shadow is not None, "known by its class"
        values, found = self._shadow.step(batch.weight, batch.gradient, states, batch.records[0].options)
        own = {
            key: value
            for key, value in found.items()
            if key not in WHOLE_TENSOR_STATE_NAMES and getattr(value, "shape", None) == batch.weight.shape
        }
        return values - batch.weight, own

    def _record_rounding_directions(self, record: ParameterRecord, wanted: torch.Tensor, after: torch.Tensor) -> None:
        """Count the directions in which float64 samples at the same places in each step were rounded to stored ones."""
        low, high = (quantize(wanted, record.dtype, rounding) for rounding in ("down", "up"))
        up = after == high
        probability = (wanted - low) / (high - low)
        decided = (low < wanted) & (wanted < high) & (up | (after == low)) & (high - low).isfinite()
        p, went_up = probability[decided], up[decided].double()
        rounding = record.rounding = record.rounding or RoundingDirectionRecord()
        rounding.seen += len(p)
        rounding.excess += float((went_up - p).sum())
        rounding.variance += float((p * (1 - p)).sum())
        surprise = torch.where(decided, up.double() - probability, torch.nan) / (probability * (1 - probability)).sqrt()
        before = self._last_surprises.get(record.name)
        if before is not None and len(before) == len(surprise):
            products = before * surprise
            products = products[products.isfinite()]
            if len(products) >= _FEWEST_CORRELATED_ELEMENTS:
                correlation = float(products.mean())
                rounding.repeated = correlation if rounding.repeated is None else max(rounding.repeated, correlation)
        self._last_surprises[record.name] = surprise

    def _record_states_after_step(self, batch: ParameterBatch) -> dict[str, torch.Tensor]:
        """Count the states after the step, and return samples of those that all parameters of a batch have."""
        found: dict[str, list[torch.Tensor]] = {}
        for record, parameter, size in zip(batch.records, batch.parameters, batch.element_counts):
            for key, value in self._get_state(parameter).items():
                is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
                if key in WHOLE_TENSOR_STATE_NAMES or not is_float:
                    continue
                record.state_dtypes[key] = value.dtype
                numbers = read_numbers(value)
                if numbers is not None and numbers.values.numel() == size:
                    samples = sample_tensors(self.recorder, [record], [numbers], ROLE_BY_STATE_NAME.get(key))
                    found.setdefault(key, []).extend(samples)
        return {key: torch.cat(samples) for key, samples in found.items() if len(samples) == len(batch.records)}

    def _get_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        # Indexing a defaultdict would make an entry that the optimizer takes for a started one.
        found: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return found


def _read_numbers_of_states(given: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """Return states, tensors of a parameter's elements as their numbers; None where one has no such numbers."""
    states: dict[str, Any] = {}
    for key, value in given.items():
        if key not in WHOLE_TENSOR_STATE_NAMES and isinstance(value, torch.Tensor):
            value = read_numbers(value)
            if value is None or value.values.numel() != size:
                return None
        states[key] = value
    return states


def has_float32_weight(plan: ParameterPlan) -> bool:
    """Return whether a plain parameter and its auxiliary tensors stand for a float32 weight, which is sampled."""
    return not (plan.spec.scaled or plan.spec.has_components_in_parameter) and bool(plan.spec.auxiliary_names)


def has_elementwise_rule(plan: ParameterPlan, rule: UpdateRule) -> bool:
    """Return whether a parameter changes by a rule of its elements alone: no rule of `wrap`, or of whole tensors."""
    return not (plan.spec.scaled or rule.assigns or rule.has_data_dependent_constants)


def _convert_number_to_float(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float | torch.Tensor) else otherwise


_IGNORED_GROUP_KEYS = frozenset({"params", "param_names", "identities", "random_stream"})


def _convert_to_plain_option(value: Any) -> Any:
    """Return an option that is a number, a word or a flag, or a tuple, with tensors as numbers; None of any other."""
    if isinstance(value, tuple):  # of which NumPy's numbers stay
        return tuple(one if (read := _convert_to_plain_option(one)) is None else read for one in value)
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, bool | int | float | str) else None


_FEWEST_CORRELATED_ELEMENTS = 64


def is_rounded_stochastically(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer rounds updates of a parameter stochastically, as far as it says so."""
    if isinstance(optimizer, Optimizer):
        plan = optimizer._plans.get(parameter)
        if plan is None or plan.spec.scaled or plan.spec.has_components_in_parameter or plan.spec.auxiliary_names:
            return False
        return plan.spec.store.dtype in SIXTEEN_BIT_DTYPES and bool(
            plan.spec.update.list_random_bits_per_draw(plan.spec.store)
        )
    return parameter.dtype in SIXTEEN_BIT_DTYPES and bool(getattr(optimizer, "bf16_stochastic_round", False))


class WeightAverageWatcher:
    """Watches an average of a model's weights, which is updated between two optimizer steps."""

    def __init__(self, recorder: Recorder, average: EMA | nn.Module, model: nn.Module) -> None:
        self.recorder, self.average = recorder, average
        self._average_weight_pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        # By name: an average before its update, its version, a sample of it, and of the weights less it.
        self._samples_before: dict[str, tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        if not isinstance(average, EMA | nn.Module):
            raise TypeError(
                f"average= takes a hu.optim.EMA, a torch.optim.swa_utils.AveragedModel or a module of averaged "
                f"parameters, got {name_type(average)}"
            )
        live = dict(model.named_parameters())
        if isinstance(average, EMA):
            averaged = average._averages
        else:
            averaged = dict((average.module if isinstance(average, AveragedModel) else average).named_parameters())
        for name, tensor in averaged.items():
            if name in live and tensor.shape == live[name].shape and tensor.dtype.is_floating_point:
                self._average_weight_pairs.append((name, tensor, live[name]))
        if not self._average_weight_pairs:
            raise ValueError("average= holds no parameter named and shaped like one of the model's: give this model's")

    def sample_averages(self) -> None:
        """Sample averages and weights as they are after a step."""
        self._samples_before = {}
        for name, tensor, weight in self._average_weight_pairs:
            before, live = self._sample_tensor(name, tensor), self._sample_tensor(name, weight)
            if before is not None and live is not None:
                wanted = _compute_wanted_change(self.average, before, live)
                self._samples_before[name] = tensor, tensor._version, before, live - before, wanted

    def compare_averages(self) -> None:
        """Compare the averages before the next step with the samples, where they were updated in between."""
        awaited, self._samples_before = self._samples_before, {}
        for name, (tensor, version, before, gap, wanted) in awaited.items():
            after = self._sample_tensor(name, tensor)
            if after is None or tensor._version == version:
                continue
            key, known = f"average.{name}", wanted is not None
            record = self.recorder.record.averages.setdefault(key, AverageRecord(key, tensor.dtype))
            wanted = gap if wanted is None else wanted
            record_realised_changes(record.change, before, after, wanted, is_wanted_known=known)

    def _sample_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        key = self.recorder.get_sampling_key(name)
        if isinstance(self.average, EMA):
            plan = self.average._average_optimizer._plans.get(tensor)
            if plan is not None and has_float32_weight(plan):
                return take_sample(read_float32_weights([plan])[0], key)
        found = read_numbers(tensor)
        return None if found is None else take_sample(found.values, key).mul_(found.scale)


def _compute_wanted_change(average: EMA | nn.Module, before: torch.Tensor, live: torch.Tensor) -> torch.Tensor | None:
    """Return the change of averaged elements that the next update wants, where it can be computed."""
    if isinstance(average, EMA):
        decay = compute_ema_decay(average._average_optimizer.param_groups[0], average.updates + 1)
        return (live - before) * (1 - decay)
    if not isinstance(average, AveragedModel):
        return None
    count: Any = average.n_averaged.cpu()
    if not count or (average.multi_avg_fn is None and average.avg_fn is None):
        return (live - before) / (int(count) + 1)
    after = before.clone()
    with torch.random.fork_rng([]):  # the user's own function may round stochastically
        if average.multi_avg_fn is not None:
            average.multi_avg_fn([after], [live], count)
        elif average.avg_fn is not None:
            after = average.avg_fn(after, live, count)
    return after - before
