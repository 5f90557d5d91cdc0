"""forecast: what rounding will take of a training, before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ... import formats
from ..._messages import name_type, quote
from ...kernels import keeping_subnormals, to_float64
from ...optim._optimizer import unwrap_optimizer
from ..checkpoints._checkpoint import open_checkpoint, parse_checkpoint_content
from ..findings import collect_findings
from ._inputs import (
    ForecastInputs,
    Schedule,
    TrainedTensor,
    compute_learning_rates,
    convert_option_to_float,
    make_forecast_inputs,
    make_inputs_from_checkpoint,
    make_inputs_from_optimizer,
)
from ._layers import Forecast, forecast_parameter_updates, sample_positions

# Elements times leaps over all layers that are followed in some seconds.
_ELEMENT_LEAPS_BUDGET = 2.4e7
_MOST_SAMPLED_ELEMENTS = 2048
_FEWEST_SAMPLED_ELEMENTS = 256
_MOST_LEAPS_PER_SCHEDULE = 400
# Points of the learning-rate curve that a forecast keeps.
_RATE_CURVE_POINTS = 240


@keeping_subnormals()
def forecast(
    model_or_state: nn.Module | Mapping[str, Any] | str | Path,
    optimizer_or_lr: torch.optim.Optimizer | float | None = None,
    schedule: Schedule = None,
    *,
    steps: int | None = None,
    warmup: int = 0,
    decay: int | None = None,
    final_lr: float = 0.0,
    start: int | None = None,
    optimizer: str | None = None,
    dtype: torch.dtype | str | None = None,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Forecast:
    """Say before a training which layers rounding will freeze, at which step, and what would keep them moving.

    A number stays as it is where an update is under half the distance to its neighbour. So a layer freezes when the
    learning rate has fallen below a bound that the sizes of its weights and of its updates give. The sizes of
    Adam's updates are read from its state, m / (sqrt(v) + eps); without one they are those of its averages on noise.
    Each layer is followed through the schedule by a sample of at most 2,048 of its elements, whose weights move as
    their updates make them.

    The forecast takes gradients to stay as large as they are, which is what Adam divides out; a loss that goes to 0
    freezes layers earlier. Of layers of few elements the step is a matter of chance.

    Args:
        model_or_state: a module, a state dict of tensors, a dict of one and of an optimizer's
            (``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``), or the path of a checkpoint:
            safetensors, torch.save, a sharded folder. Its optimizer states and options are read too; nothing in
            it is executed.
        optimizer_or_lr: a torch.optim.Optimizer (its states, options and groups are read), also inside a trainer's
            wrapper, or a learning rate; a checkpoint's own by default.
        schedule: "constant" (None), "linear", "cosine" or "wsd"; a torch LRScheduler, which is not advanced; a function
            step -> learning rate; a list with one rate per step. Names begin at the optimizer's initial rates.
        steps: length of the whole run; needed unless the schedule is a list. 1,000 more for a constant rate.
        warmup, decay, final_lr: of named schedules: steps of a linear rise; steps of the fall at the end of "wsd" (a
            fifth of all); the rate at the end.
        start: steps made so far; default: as the optimizer's states say, else 0.
        optimizer: "adamw", "adam", "sgd" or "lion": whose updates, where a learning rate is given or the optimizer is
            another; default: the one that a checkpoint holds, else AdamW.
        dtype: what the weights will be trained in; default: what they are in.
        betas, eps, momentum, weight_decay: options where a learning rate is given; torch's defaults.

    Returns:
        A Forecast: `layers` and `findings`; print it.

    Raises:
        TypeError: neither a module nor a state dict; neither an optimizer nor a number.
        ValueError: an unknown schedule or optimizer, another optimizer's scheduler, an option or number of steps that
            cannot be, no steps, or nothing to train.
        NotImplementedError: an optimizer whose updates cannot be known, or parameters that are no plain tensors.

    >>> norm = nn.LayerNorm(64).bfloat16()
    >>> layer = forecast(norm, 3e-5, "cosine", steps=1000).layers[0]
    >>> layer.name, layer.freeze_step, layer.freeze_lr
    ('weight', 0, 3e-05)
    """
    given = {"betas": betas, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
    options = {name: value for name, value in given.items() if value is not None}
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"betas={betas!r}: give two numbers from 0 on and below 1, as (0.9, 0.999)")
    for name, value in options.items():
        if name != "betas":
            _check_option(name, value)
    if start is not None and not (isinstance(start, int) and not isinstance(start, bool) and start >= 0):
        raise ValueError(f"start={start!r}: give the steps made so far, a whole number from 0 on")
    if isinstance(dtype, str):
        asked = formats.get(dtype)
        if asked.torch_dtype is None:
            raise ValueError(f"dtype={dtype!r}: torch has no dtype of {asked.name}; give one that it has, as 'bf16'")
        dtype = asked.torch_dtype
    optimizer_or_lr = unwrap_optimizer(optimizer_or_lr)
    named = model_or_state.named_parameters() if isinstance(model_or_state, nn.Module) else ()
    weights = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if isinstance(optimizer_or_lr, torch.optim.Optimizer):
        if not isinstance(model_or_state, nn.Module):
            raise TypeError(
                f"an optimizer goes with its model, not with {name_type(model_or_state)}: give a learning rate"
            )
        if options:
            raise ValueError(
                f"{', '.join(options)}: the optimizer has its own; leave them out, or give a learning rate instead"
            )
        _refuse_scheduler_of_other_optimizer(schedule, optimizer_or_lr)
        inputs = make_inputs_from_optimizer(weights, optimizer_or_lr, optimizer, dtype)
    elif isinstance(model_or_state, nn.Module):
        inputs = make_forecast_inputs(weights, _check_learning_rate(optimizer_or_lr), optimizer, options, dtype, {})
    else:
        rate = None if optimizer_or_lr is None else _check_learning_rate(optimizer_or_lr)
        if isinstance(model_or_state, str | Path):
            opened = open_checkpoint(model_or_state)
        elif isinstance(model_or_state, Mapping):
            opened = parse_checkpoint_content(model_or_state, "the state dict")
        else:
            raise TypeError(
                f"forecast takes a module, state dict or checkpoint's path; got {name_type(model_or_state)}"
            )
        inputs = make_inputs_from_checkpoint(opened, rate, optimizer, options, dtype)
    begin = inputs.steps_done if start is None else start
    rates = compute_learning_rates(
        schedule, inputs.base_lrs, steps=steps, start=begin, warmup=warmup, decay=decay, final=final_lr
    )
    name = schedule or "constant" if schedule is None or isinstance(schedule, str) else type(schedule).__name__
    return _forecast_layers(inputs, rates, name, begin)


def _check_learning_rate(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"forecast takes a torch.optim.Optimizer or a learning rate; got {name_type(given)}")
    if not 0 <= given < float("inf"):
        raise ValueError(f"a learning rate of {given}: give a finite number from 0")
    return float(given)


def _check_option(name: str, given: Any) -> None:
    try:
        number = convert_option_to_float(given)
    except (TypeError, ValueError, RuntimeError):  # of words, and of tensors of several elements
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={given!r}: give a finite number from 0 on")


def _refuse_scheduler_of_other_optimizer(schedule: Schedule, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(schedule, LRScheduler):
        return
    own = unwrap_optimizer(schedule.optimizer)
    # Optimizers that wrap another one share its groups.
    if own is not optimizer and own.param_groups is not optimizer.param_groups:
        raise ValueError(
            f"the scheduler, {name_type(schedule)}, is of another optimizer, {name_type(own)}, than that given, "
            f"{name_type(optimizer)}: give the scheduler that was made of the optimizer"
        )


def _forecast_layers(inputs: ForecastInputs, rates: Tensor, schedule: str, start: int) -> Forecast:
    """Follow every layer, each by as many elements and leaps as some seconds allow for all of them."""
    count = len(inputs.parameters)
    leaps = min(_MOST_LEAPS_PER_SCHEDULE, rates.shape[1])
    sample = int(max(_FEWEST_SAMPLED_ELEMENTS, min(_MOST_SAMPLED_ELEMENTS, _ELEMENT_LEAPS_BUDGET / (leaps * count))))
    leaps = int(max(1, min(leaps, _ELEMENT_LEAPS_BUDGET / (sample * count))))
    layers = tuple(
        forecast_parameter_updates(
            trained, inputs, rates[trained.group_index], start=start, sample=sample, max_leaps=leaps, seed=position
        )
        for position, trained in enumerate(inputs.parameters)
    )
    notes = list(inputs.notes)
    broken = [one.name for one in inputs.parameters if _has_nonfinite_sampled_elements(one, sample)]
    if broken:
        notes.append(f"{quote(broken)} hold NaN or infinity, in weights as trained or states: these are left out")
    unknown = [layer for layer in layers if layer.updates is None and layer.elements and layer.name not in broken]
    if unknown:
        notes.append(
            f"the size of updates is not known of {len(unknown)} of {count} layers: SGD's are its gradients; give an "
            "optimizer that has made a step with momentum"
        )
    total, ahead = start + rates.shape[1], rates.shape[1]
    places = torch.linspace(0, ahead - 1, min(ahead, _RATE_CURVE_POINTS), dtype=torch.float64, device="cpu")
    curve = tuple((start + at, float(rates[0, at])) for at in dict.fromkeys(places.round().long().tolist()))
    made = Forecast(layers, inputs.rule, schedule, start, total, tuple(notes), curve, inputs.is_halfulp)
    return replace(made, findings=collect_findings("forecast", made))


def _has_nonfinite_sampled_elements(trained: TrainedTensor, max_elements: int) -> bool:
    """Return whether the sampled elements have NaN or infinity, or their states have."""
    count = trained.value.numel()
    states = [value for value in trained.state.values() if isinstance(value, Tensor) and value.numel() == count]
    index = sample_positions(count, max_elements)
    dtypes = [trained.dtype, *(state.dtype for state in states)]
    return any(
        not bool(to_float64(one.detach().flatten()[index].to(dtype)).isfinite().all())
        for one, dtype in zip([trained.value, *states], dtypes, strict=True)
        if one.is_floating_point()
    )
