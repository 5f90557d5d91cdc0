"""What a forecast starts from: a model, a checkpoint or a table of layers, and learning rates by step."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..._messages import name_type, quote
from ..._names import describe_unknown_name
from .._text import holds_signed_floats
from ..checkpoints._names import RUNNING_STATISTICS, Checkpoint, name_optimizer_states

Schedule = str | LRScheduler | Callable[[int], float] | Sequence[float] | Tensor | None
SCHEDULE_NAMES = ("constant", "linear", "cosine", "wsd")
# What a run of unknown length is taken to have.
DEFAULT_CONSTANT_STEPS = 1000
# Far more than any training makes; each costs some bytes and nanoseconds.
MOST_FORECAST_STEPS = 10**8
# "wsd" falls over the last fifth unless told otherwise.
_WSD_DECAY_DIVISOR = 5


def compute_learning_rates(
    schedule: Schedule,
    top_rates: Sequence[float],
    *,
    steps: int | None = None,
    start: int = 0,
    warmup: int = 0,
    decay: int | None = None,
    final: float = 0.0,
) -> Tensor:
    """Return the learning rate of each group at each step from `start` to the end.

    Args:
        top_rates: per group, the learning rate that a named schedule begins to fall from.
        others: as of `forecast`.

    Returns:
        float64 (groups, steps - start).

    >>> compute_learning_rates("linear", [1.0], steps=4, warmup=2).tolist()
    [[0.5, 1.0, 1.0, 0.5]]
    """
    if isinstance(schedule, str) or schedule is None:
        rates = _compute_rates_by_name(schedule or "constant", top_rates, steps, start, warmup, decay, final)
    else:
        for name, value in {"warmup": warmup, "decay": decay, "final": final}.items():
            if value:
                said = f"{name}={value} is for named schedules; {name_type(schedule)} has its own: leave it out"
                raise ValueError(said)
        if isinstance(schedule, LRScheduler):
            rates = _run_scheduler_copy(schedule, _count_steps_ahead(steps, "a scheduler of torch", start))
            if len(rates) != len(top_rates):
                raise ValueError(
                    f"the scheduler is of {len(rates)} groups, {len(top_rates)} of which hold parameters of the model: "
                    "give a function step -> learning rate, or a list"
                )
        elif callable(schedule):
            count = _count_steps_ahead(steps, "a function step -> learning rate", start)
            rates = _expand_rates_to_groups(
                [_read_scheduled_rate(schedule(step)) for step in range(start, start + count)], top_rates
            )
        elif isinstance(schedule, Iterable):
            listed_rates = [_read_scheduled_rate(value) for value in schedule]
            if steps is not None and steps != len(listed_rates):
                raise ValueError(f"steps={steps} and a list of {len(listed_rates)} learning rates: leave steps out")
            _count_steps_ahead(len(listed_rates), "a list", start)
            rates = _expand_rates_to_groups(listed_rates[start:], top_rates)
        else:
            raise TypeError(
                f"schedule: give {', '.join(map(repr, SCHEDULE_NAMES))}, a scheduler of torch, a function step -> "
                f"learning rate or a list of learning rates; got {name_type(schedule)}"
            )
    if not (rates.isfinite() & (rates >= 0)).all():
        raise ValueError("the schedule gives learning rates that are no finite numbers from 0: see its formula")
    return rates


def _compute_rates_by_name(
    name: str, top_rates: Sequence[float], steps: int | None, start: int, warmup: int, decay: int | None, final: float
) -> Tensor:
    if name not in SCHEDULE_NAMES:
        raise ValueError(describe_unknown_name("schedule", name, SCHEDULE_NAMES))
    if steps is None and name == "constant":
        steps = start + DEFAULT_CONSTANT_STEPS
    count = _count_steps_ahead(steps, f"schedule {name!r}", start)
    total = start + count
    fall = (decay if decay is not None else max(1, total // _WSD_DECAY_DIVISOR)) if name == "wsd" else total - warmup
    if name != "wsd" and decay is not None:
        raise ValueError(f"decay={decay} is for schedule 'wsd'; {name!r} falls from its warm-up to its end")
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
    return torch.stack([rise * (final + (top - final) * share) for top in top_rates])


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


def _read_scheduled_rate(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"a learning rate is a number, the schedule gave {name_type(value)}") from None


def _expand_rates_to_groups(rates: list[float], top_rates: Sequence[float]) -> Tensor:
    return torch.tensor(rates, dtype=torch.float64, device="cpu").expand(len(top_rates), -1)


def _run_scheduler_copy(scheduler: LRScheduler, count: int) -> Tensor:
    """Return the rates that a scheduler would give from now on, by a copy with one number per group."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise NotImplementedError(
            "ReduceLROnPlateau depends on losses to come: give a function step -> learning rate, or a list"
        )
    optimizer = scheduler.optimizer
    stand_in = torch.optim.SGD(
        [{"params": [torch.zeros((), dtype=torch.float32, device="cpu")]} for _ in optimizer.param_groups], lr=0.0
    )
    for group, given in zip(stand_in.param_groups, optimizer.param_groups):
        group.update({key: copy.deepcopy(value) for key, value in given.items() if key != "params"})
    copied = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers warn where no step of the optimizer went before
        for _ in range(count):
            rates.append([float(group["lr"]) for group in stand_in.param_groups])
            copied.step()
    return torch.tensor(rates, dtype=torch.float64, device="cpu").T


# torch's defaults, and those of the paper for Lion (arXiv 2302.06675).
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "SGD": {"momentum": 0.0, "weight_decay": 0.0},
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}
RULE_NAMES = tuple(DEFAULT_OPTIONS)


@dataclass(frozen=True)
class TrainedTensor:
    """One parameter that an optimizer steps.

    Attributes:
        value: its elements, of a floating-point dtype.
        dtype: what it will be trained in.
        state: the optimizer's tensors and numbers for it; empty without.
        group: index of its group.
        weight_update: "nearest" for every optimizer but halfulp's.
    """

    name: str
    value: Tensor
    dtype: torch.dtype
    state: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    group: int = 0
    weight_update: str = "nearest"


@dataclass(frozen=True)
class Inputs:
    """All parameters, and what they share.

    Attributes:
        parameters: in the model's order.
        rule: "AdamW", "Adam", "SGD" or "Lion".
        top_rates: per group, its learning rate before a schedule.
        start: steps that were made so far.
        is_halfulp: whether halfulp steps them, which rounds decay and update together, and moments at random.
        notes: what could not be read.
    """

    parameters: tuple[TrainedTensor, ...]
    rule: str
    top_rates: tuple[float, ...]
    start: int
    is_halfulp: bool = False
    notes: tuple[str, ...] = ()


def make_inputs_from_optimizer(
    weights: Sequence[tuple[str, Tensor]], optimizer: torch.optim.Optimizer, rule: str | None, dtype: torch.dtype | None
) -> Inputs:
    """Return the parameters that an optimizer holds, with its states and options."""
    names = {id(tensor): name for name, tensor in weights}
    states: dict[str, Mapping[str, Any]] = {}
    saved: dict[str, Mapping[str, Any]] = {}
    strangers = 0
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                strangers += 1
            else:
                saved[name], states[name] = options, optimizer.state.get(parameter, {})
    if not saved:
        raise ValueError("the optimizer holds none of the model's parameters: give the one that trains this model")
    notes = (f"{strangers} parameters of the optimizer are not the model's: left out",) if strangers else ()
    held = [(name, tensor) for name, tensor in weights if name in saved]
    rule = rule or _find_optimizer_rule(optimizer)
    return make_inputs_from_weights(held, states, None, rule, {}, dtype, saved, notes)


def make_inputs_from_checkpoint(
    opened: Checkpoint, lr: float | None, rule: str | None, options: Mapping[str, Any], dtype: torch.dtype | None
) -> Inputs:
    """Return the weights of a checkpoint that a training goes on with, with the states and options saved beside them.

    What no optimizer of the checkpoint holds is left out, as nothing steps it.
    """
    notes = list(opened.unseen)
    states = name_optimizer_states(opened, notes)
    saved = {name: state.options for name, state in states.items()}
    if lr is None and not (saved and all("lr" in one for one in saved.values())):
        raise ValueError("the checkpoint holds no optimizer: give the learning rate of the training to come")
    kept = list(opened.tensors)
    if states and len(states) == opened.stepped_count:
        kept = [name for name in opened.tensors if name in states] or kept
    left = [name for name in opened.tensors if name not in kept]
    notes += [f"{quote(left)} are in no optimizer of the checkpoint: left out"] if left else []
    weights = [(name, opened.tensors[name]) for name in kept]
    values = {name: one.state for name, one in states.items()}
    return make_inputs_from_weights(weights, values, lr, rule, options, dtype, saved, tuple(notes))


def make_inputs_from_weights(
    weights: Sequence[tuple[str, Tensor]],
    states: Mapping[str, Mapping[str, Any]],
    lr: float | None,
    rule: str | None,
    options: Mapping[str, Any],
    dtype: torch.dtype | None,
    saved: Mapping[str, Mapping[str, Any]] | None = None,
    notes: tuple[str, ...] = (),
) -> Inputs:
    """Return the inputs of a forecast from floating-point weights, under a named optimizer and its saved states.

    The optimizer and its options are those given, else what a checkpoint saved for a parameter, else AdamW and an
    optimizer's own defaults. Without a learning rate each parameter has that of its group, of which all parameters
    have the same dict of options in `saved`.
    """
    saved = saved or {}
    own = (
        None if rule else next((_guess_saved_rule(saved[n], states.get(n, {})) for n, _ in weights if n in saved), None)
    )
    if own is None and rule is None and saved:
        keys = ", ".join(next(iter(saved.values())))
        notes = (*notes, f"whose options {keys} are is not known: AdamW's updates are taken; optimizer= names others")
    given = rule or own or "AdamW"
    rule = next((one for one in RULE_NAMES if isinstance(given, str) and one.lower() == given.lower()), None)
    if rule is None:
        raise ValueError(describe_unknown_name("optimizer", given, RULE_NAMES))
    ours = any("weight_update" in one for one in saved.values())
    groups = list({id(one): one for one in saved.values()}.values()) if lr is None else [{"lr": lr}]
    top_rates = tuple(read_number(one.get("initial_lr", one.get("lr", 0.0))) for one in groups)
    places = {id(one): place for place, one in enumerate(groups)}

    def make_tensor(name: str, tensor: Tensor) -> TrainedTensor:
        before = saved.get(name, {})
        group = places.get(id(before), 0)
        merged = {**DEFAULT_OPTIONS[rule], **before, **options, "lr": top_rates[group]}
        update = _name_weight_update(before, dtype or tensor.dtype) if "weight_update" in before else "nearest"
        return _make_trained_tensor(name, tensor, states.get(name, {}), merged, group, dtype, update)

    found = [
        make_tensor(name, tensor)
        for name, tensor in weights
        if holds_signed_floats(tensor.dtype) and name.rpartition(".")[2] not in RUNNING_STATISTICS
    ]
    others = [
        name
        for name, tensor in weights
        # Of other kinds of numbers: no counters, indices and masks.
        if tensor.dim() > 0
        and not holds_signed_floats(tensor.dtype)
        and (tensor.dtype.is_complex or (tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool))
    ]
    if others:
        notes = (*notes, f"{quote(others)} are complex, or codes of quantized weights: left out")
    if not found:
        raise ValueError("nothing to forecast: there is no floating-point tensor among the weights")
    start = max(int(read_number(one.state.get("step", 0))) for one in found)
    return Inputs(tuple(found), rule, top_rates, start, ours, notes)


def _guess_saved_rule(options: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Return which optimizer saved a parameter's options and states, or None."""
    if "momentum_buffer" in state or {"momentum", "nesterov"} <= options.keys():
        return "SGD"
    if "betas" not in options:
        return None
    if "eps" not in options:
        return "Lion"
    if "amsgrad" not in options and not {"exp_avg", "exp_avg_sq"} <= state.keys():
        return None
    return "Adam" if options.get("decoupled_weight_decay") is False else "AdamW"


def _make_trained_tensor(
    name: str,
    tensor: Tensor,
    state: Mapping[str, Any],
    options: Mapping[str, Any],
    group: int,
    dtype: torch.dtype | None,
    update: str = "nearest",
) -> TrainedTensor:
    if is_lazy(tensor):
        raise NotImplementedError(f"{name} is uninitialized: run the model once, which makes a lazy module's weights")
    value = _take_local_part(tensor).detach()
    state = {key: _take_local_part(one) for key, one in state.items()}
    if value.is_meta or value.layout != torch.strided:
        kind = "is on the meta device" if value.is_meta else f"is a tensor of layout {value.layout}"
        raise NotImplementedError(f"{name} {kind}: give a model with weights in plain memory (x.to_dense())")
    if type(value) not in (Tensor, nn.Parameter) or not holds_signed_floats(dtype or value.dtype):
        kind = name_type(value) if type(value) is not Tensor else f"of dtype {dtype or value.dtype}"
        raise NotImplementedError(
            f"{name} is {kind}, whose updates are not those of plain floating-point numbers: forecast the model before "
            "it is converted"
        )
    return TrainedTensor(name, value, dtype or value.dtype, state, options, group, update)


def _take_local_part(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _find_optimizer_rule(optimizer: torch.optim.Optimizer) -> str:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in RULE_NAMES:
            return kind.__name__
    raise NotImplementedError(
        f"the size of {type(optimizer).__name__}'s updates is not known before they are made, that of "
        f"{', '.join(RULE_NAMES)} is: watch a run of it by hu.observe, or say which of these comes near by optimizer="
    )


def _name_weight_update(group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Return the name of the weight update by which halfulp's optimizer steps a parameter of a dtype."""
    if dtype.itemsize > 2:
        return "exact"
    chosen = group.get("weight_update")
    if chosen is None:
        return "split8"
    if isinstance(chosen, Mapping):  # as state_dict() has it
        return str(chosen.get("name"))
    return chosen if isinstance(chosen, str) else str(chosen.name)


def read_number(value: Any) -> float:
    """Return a number that may be a tensor of one element."""
    return float(value.item() if isinstance(value, Tensor) else value)
