"""What a forecast starts from: a model, a checkpoint or a table of layers, and learning rates by step."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..._messages import name_type, quote
from ..._names import describe_unknown_name
from ...optim.parameters._local_tensors import get_local
from .._text import holds_signed_floats
from ..checkpoints._checkpoint import (
    RUNNING_STATISTICS_NAMES,
    Checkpoint,
    NamedParameterState,
    name_optimizer_states,
)

Schedule = str | LRScheduler | Callable[[int], float] | Sequence[float] | Tensor | None
SCHEDULE_NAMES = ("constant", "linear", "cosine", "wsd")
# What a run of unknown length is taken to have.
DEFAULT_STEPS_OF_CONSTANT_SCHEDULE = 1000
# Far more than any training makes; each costs some bytes and nanoseconds.
MOST_FORECAST_STEPS = 10**8
# "wsd" falls over the last fifth unless told otherwise.
_WSD_DECAY_DIVISOR = 5


def compute_learning_rates(
    schedule: Schedule,
    base_lrs: Sequence[float],
    *,
    steps: int | None = None,
    start: int = 0,
    warmup: int = 0,
    decay: int | None = None,
    final: float = 0.0,
) -> Tensor:
    """Return the learning rate of each group at each step from `start` to the end: float64 (groups, steps - start).

    `base_lrs` are those that a named schedule begins to fall from, per group.

    >>> compute_learning_rates("linear", [1.0], steps=4, warmup=2).tolist()
    [[0.5, 1.0, 1.0, 0.5]]
    """
    if isinstance(schedule, str) or schedule is None:
        rates = _compute_named_schedule_rates(schedule or "constant", base_lrs, steps, start, warmup, decay, final)
    elif unused := {name: value for name, value in (("warmup", warmup), ("decay", decay), ("final", final)) if value}:
        said = ", ".join(f"{name}={value}" for name, value in unused.items())
        raise ValueError(f"{said} is for named schedules; {name_type(schedule)} has its own: leave it out")
    elif isinstance(schedule, LRScheduler):
        rates = _compute_rates_by_scheduler_copy(schedule, _count_steps_ahead(steps, "a scheduler of torch", start))
        if len(rates) != len(base_lrs):
            raise ValueError(
                f"the scheduler is of {len(rates)} groups, {len(base_lrs)} of which hold parameters of the model: "
                "give a function step -> learning rate, or a list"
            )
    else:
        if not callable(schedule):
            if not isinstance(schedule, Iterable):
                raise TypeError(
                    f"schedule: give {', '.join(map(repr, SCHEDULE_NAMES))}, a scheduler of torch, a function step -> "
                    f"learning rate or a list of learning rates; got {name_type(schedule)}"
                )
            listed = [_convert_scheduled_rate_to_float(value) for value in schedule]
            if steps is not None and steps != len(listed):
                raise ValueError(f"steps={steps} and a list of {len(listed)} learning rates: leave steps out")
            schedule, steps = listed.__getitem__, len(listed)
        count = _count_steps_ahead(steps, "a function step -> learning rate", start)
        given = [_convert_scheduled_rate_to_float(schedule(step)) for step in range(start, start + count)]
        rates = torch.tensor(given, dtype=torch.float64, device="cpu").expand(len(base_lrs), -1)
    if not (rates.isfinite() & (rates >= 0)).all():
        raise ValueError("the schedule gives learning rates that are no finite numbers from 0: see its formula")
    return rates


def _compute_named_schedule_rates(
    name: str, base_lrs: Sequence[float], steps: int | None, start: int, warmup: int, decay: int | None, final: float
) -> Tensor:
    if name not in SCHEDULE_NAMES:
        raise ValueError(describe_unknown_name("schedule", name, SCHEDULE_NAMES))
    if steps is None and name == "constant":
        steps = start + DEFAULT_STEPS_OF_CONSTANT_SCHEDULE
    count = _count_steps_ahead(steps, f"schedule {name!r}", start)
    total = start + count
    fall = (decay if decay is not None else max(1, total // _WSD_DECAY_DIVISOR)) if name == "wsd" else total - warmup
    if name != "wsd" and decay is not None:
        raise ValueError(f"decay={decay} is for schedule 'wsd'; {name!r} falls from its warm-up to its end")
    if name == "constant" and final:
        raise ValueError(f"final_lr={final} is where a schedule falls to; 'constant' does not: leave it out")
    if not 0 <= warmup <= total or not 0 <= fall <= total:
        raise ValueError(f"warmup={warmup} and decay={decay}: give numbers of steps from 0 to steps={total}")
    at = torch.arange(start, total, dtype=torch.float64, device="cpu")
    gone = ((at - (total - fall)) / max(fall, 1)).clamp(0, 1)
    share = torch.ones_like(at)
    if name in ("linear", "wsd"):
        share = 1 - gone
    elif name == "cosine":
        share = (1 + torch.cos(math.pi * gone)) / 2
    rise = ((at + 1) / warmup).clamp_max(1) if warmup else torch.ones_like(at)
    return torch.stack([rise * (final + (top - final) * share) for top in base_lrs])


def _count_steps_ahead(steps: int | None, what: str, start: int) -> int:
    """Return the steps from `start` to the end."""
    if steps is None:
        raise ValueError(f"{what} needs the length of the run: give steps=")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps <= start:
        raise ValueError(
            f"steps={steps!r}: give the length of the whole run, a whole number above the {start} steps made so far"
        )
    if steps - start > MOST_FORECAST_STEPS:
        raise ValueError(
            f"steps={steps}: a forecast follows each step; give at most {MOST_FORECAST_STEPS:,} steps ahead"
        )
    return steps - start


def _convert_scheduled_rate_to_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"a learning rate is a number, the schedule gave {name_type(value)}") from None


def _compute_rates_by_scheduler_copy(scheduler: LRScheduler, count: int) -> Tensor:
    """Return the rates that a scheduler would give from now on, by a copy with one number per group."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise NotImplementedError(
            "ReduceLROnPlateau depends on losses to come: give a function step -> learning rate, or a list"
        )
    optimizer = scheduler.optimizer
    small = torch.optim.SGD(
        [{"params": [torch.zeros((), dtype=torch.float32, device="cpu")]} for _ in optimizer.param_groups], lr=0.0
    )
    for group, given in zip(small.param_groups, optimizer.param_groups):
        group.update({key: copy.deepcopy(value) for key, value in given.items() if key != "params"})
    copied = copy.deepcopy(scheduler, {id(optimizer): small})
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers warn where no step of the optimizer went before
        for _ in range(count):
            rates.append([float(group["lr"]) for group in small.param_groups])
            copied.step()
    return torch.tensor(rates, dtype=torch.float64, device="cpu").T


# torch's defaults, and those of the paper for Lion (arXiv 2302.06675).
DEFAULT_OPTIONS_BY_OPTIMIZER: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "SGD": {"momentum": 0.0, "weight_decay": 0.0},
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}
OPTIMIZER_NAMES = tuple(DEFAULT_OPTIONS_BY_OPTIMIZER)


class TrainedTensor(NamedTuple):
    """One parameter that an optimizer steps, with its state, options, and index of its group."""

    name: str
    value: Tensor
    # What it will be trained in.
    dtype: torch.dtype
    state: Mapping[str, Any]
    options: Mapping[str, Any]
    group_index: int
    # "nearest" for every optimizer but halfulp's.
    weight_update: str


class ForecastInputs(NamedTuple):
    """All parameters in the model's order, their optimizer's rule, and what could not be read."""

    parameters: tuple[TrainedTensor, ...]
    rule: str
    # Per group, its learning rate before a schedule.
    base_lrs: tuple[float, ...]
    # Steps that were made so far.
    steps_done: int
    # halfulp's optimizers round decay and update together, and moments at random.
    is_halfulp: bool
    notes: tuple[str, ...]


def make_inputs_from_optimizer(
    weights: Sequence[tuple[str, Tensor]], optimizer: torch.optim.Optimizer, rule: str | None, dtype: torch.dtype | None
) -> ForecastInputs:
    """Return the parameters that an optimizer holds, with its states and options."""
    names = {id(tensor): name for name, tensor in weights}
    states: dict[str, NamedParameterState] = {}
    others = 0
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                others += 1
            else:
                states[name] = NamedParameterState(optimizer.state.get(parameter, {}), options)
    if not states:
        raise ValueError("the optimizer holds none of the model's parameters: give the one that trains this model")
    notes = (f"{others} parameters of the optimizer are not the model's: left out",) if others else ()
    held = [(name, tensor) for name, tensor in weights if name in states]
    rule = rule or next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in OPTIMIZER_NAMES), None)
    if rule is None:
        raise NotImplementedError(
            f"the size of {type(optimizer).__name__}'s updates is not known before they are made, that of "
            f"{', '.join(OPTIMIZER_NAMES)} is: watch a run of it by hu.observe, or say which of these comes near by "
            "optimizer="
        )
    return make_forecast_inputs(held, None, rule, {}, dtype, states, notes)


def make_inputs_from_checkpoint(
    opened: Checkpoint, lr: float | None, rule: str | None, options: Mapping[str, Any], dtype: torch.dtype | None
) -> ForecastInputs:
    """Return the weights of a checkpoint that its optimizer steps, with the states and options saved beside them."""
    notes = list(opened.unseen)
    states = name_optimizer_states(opened, notes)
    if lr is None and not (states and all("lr" in one.options for one in states.values())):
        raise ValueError("the checkpoint holds no optimizer: give the learning rate of the training to come")
    kept = list(opened.tensors)
    if states and len(states) == opened.optimizer_parameter_count:
        kept = [name for name in opened.tensors if name in states] or kept
    left = [name for name in opened.tensors if name not in kept]
    notes += [f"{quote(left)} are in no optimizer of the checkpoint: left out"] if left else []
    weights = [(name, opened.tensors[name]) for name in kept]
    return make_forecast_inputs(weights, lr, rule, options, dtype, states, tuple(notes))


def make_forecast_inputs(
    weights: Sequence[tuple[str, Tensor]],
    lr: float | None,
    rule: str | None,
    options: Mapping[str, Any],
    dtype: torch.dtype | None,
    states: Mapping[str, NamedParameterState],
    notes: tuple[str, ...] = (),
) -> ForecastInputs:
    """Return the inputs of a forecast from floating-point weights, under a named optimizer and its saved states.

    The optimizer and its options are those given, else what a checkpoint saved for a parameter, else AdamW and an
    optimizer's own defaults. Without a learning rate each parameter has that of its group, of which all parameters
    have the same dict of options in `states`.
    """
    given = rule or next((_guess_optimizer_of_saved_state(states[n]) for n, _ in weights if n in states), None)
    if given is None and states:
        keys = ", ".join(next(iter(states.values())).options)
        notes = (*notes, f"whose options {keys} are is not known: AdamW's updates are taken; optimizer= names others")
    given = given or "AdamW"
    rule = next((one for one in OPTIMIZER_NAMES if isinstance(given, str) and one.lower() == given.lower()), None)
    if rule is None:
        raise ValueError(describe_unknown_name("optimizer", given, OPTIMIZER_NAMES))
    is_halfulp = any("weight_update" in one.options for one in states.values())
    own = {id(one.options): one.options for one in states.values()}
    groups = list(own.values()) if lr is None else [{"lr": lr}]
    base_lrs = tuple(convert_option_to_float(one.get("initial_lr", one.get("lr", 0.0))) for one in groups)
    numbers = {id(one): number for number, one in enumerate(groups)}
    found: list[TrainedTensor] = []
    others = []
    for name, tensor in weights:
        if not holds_signed_floats(tensor.dtype):
            # Other kinds of numbers, but no counters, indices and masks.
            is_code = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
            others += [name] if tensor.dim() > 0 and (tensor.dtype.is_complex or is_code) else []
        elif name.rpartition(".")[2] not in RUNNING_STATISTICS_NAMES:
            saved = states.get(name, NamedParameterState({}, {}))
            group = numbers.get(id(saved.options), 0)
            merged = {**DEFAULT_OPTIONS_BY_OPTIMIZER[rule], **saved.options, **options, "lr": base_lrs[group]}
            value, trained = _get_plain_local_weight(name, tensor, dtype), dtype or tensor.dtype
            update = _get_weight_update_name(saved.options, trained)
            state = {key: get_local(one) for key, one in saved.state.items()}
            found.append(TrainedTensor(name, value, trained, state, merged, group, update))
    if others:
        notes = (*notes, f"{quote(others)} are complex, or codes of quantized weights: left out")
    if not found:
        raise ValueError("nothing to forecast: there is no floating-point tensor among the weights")
    start = max(int(convert_option_to_float(one.state.get("step", 0))) for one in found)
    return ForecastInputs(tuple(found), rule, base_lrs, start, is_halfulp, notes)


def _guess_optimizer_of_saved_state(saved: NamedParameterState) -> str | None:
    """Return which optimizer saved a parameter's options and states, or None."""
    state, options = saved.state, saved.options
    if "momentum_buffer" in state or {"momentum", "nesterov"} <= options.keys():
        return "SGD"
    if "betas" not in options:
        return None
    if "eps" not in options:
        return "Lion"
    if "amsgrad" not in options and not {"exp_avg", "exp_avg_sq"} <= state.keys():
        return None
    return "Adam" if options.get("decoupled_weight_decay") is False else "AdamW"


def _get_plain_local_weight(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the local part of a weight of plain floating-point numbers; refuse others by name."""
    if is_lazy(tensor):
        raise NotImplementedError(f"{name} is uninitialized: run the model once, which makes a lazy module's weights")
    value = get_local(tensor).detach()
    if value.is_meta or value.layout != torch.strided:
        kind = "is on the meta device" if value.is_meta else f"is a tensor of layout {value.layout}"
        raise NotImplementedError(f"{name} {kind}: give a model with weights in plain memory (x.to_dense())")
    if type(value) not in (Tensor, nn.Parameter) or not holds_signed_floats(dtype or value.dtype):
        kind = name_type(value) if type(value) is not Tensor else f"of dtype {dtype or value.dtype}"
        raise NotImplementedError(
            f"{name} is {kind}, whose updates are not those of plain floating-point numbers: forecast the model before "
            "it is converted"
        )
    return value


def _get_weight_update_name(group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Return the name of the weight update by which an optimizer with a group's options steps weights of a dtype."""
    if "weight_update" not in group:
        return "nearest"
    chosen = group["weight_update"] or "split8"
    # A mapping in state_dict().
    name = chosen.get("name") if isinstance(chosen, Mapping) else getattr(chosen, "name", chosen)
    return "exact" if dtype.itemsize > 2 else str(name)


def convert_option_to_float(value: Any) -> float:
    """Return a number that may be a tensor of one element."""
    return float(value.item() if isinstance(value, Tensor) else value)
