"""Jobs of `halfulp warm`: small examples of everything that has kernels, through the public names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import formats, mctensor, optim, recipes, rounding
from .._names import unknown
from ..optim.weight_updates._weight_update import WEIGHT_UPDATES
from ..recipes._optimizer import backpropagate_and_step
from ..rounding._modes import MODES

_NARROW_DTYPES = (torch.bfloat16, torch.float16)
_STATE_DTYPES = (None, torch.float32, "8bit")
# Beside an optimizer's defaults: options that choose another rule, and that trainings often have.
_OPTIONS_BY_OPTIMIZER: dict[str, Sequence[dict[str, Any]]] = {"SGD": ({}, {"momentum": 0.9})}
_TENSOR_WIDTH = 256  # whole blocks of 8-bit states


# A small run that puts its kernels into the cache, and what it is called.
WarmUpJob = tuple[str, Callable[[], object]]


def list_jobs(recipe_names: Sequence[str] | None, chosen: Sequence[str] | None) -> Iterator[WarmUpJob]:
    """Yield jobs for some recipes or all, and chosen optimizers or all."""
    names = list(optim.OPTIMIZERS) if chosen is None else chosen
    for name in names:
        if name not in optim.OPTIMIZERS:
            raise ValueError(unknown("optimizer", name, optim.OPTIMIZERS))
    calls = [(name, options) for name in names for options in _OPTIONS_BY_OPTIMIZER.get(name, ({},))]
    if recipe_names is not None:
        for recipe, (name, options) in itertools.product([recipes.get(one) for one in recipe_names], calls):
            train = partial(_train_small_model, recipe, name, options)
            yield f"recipes: {recipe.name}, {_format_call(name, options)}", train
        return
    # Every weight update, dtype and storage of states that an optimizer accepts together.
    for (name, options), dtype, update, state in itertools.product(
        calls, (*_NARROW_DTYPES, torch.float32), (None, *WEIGHT_UPDATES), _STATE_DTYPES
    ):
        given = {"lr": 1e-3, "weight_update": update, "state_dtype": state, **options}
        if (dtype == torch.float32) != (update is None) or _are_options_refused(name, dtype, given):
            continue
        told = ", ".join(filter(None, (str(dtype), update, f"states {state or dtype}"))).replace("torch.", "")
        yield f"steps: {_format_call(name, options)}: {told}", partial(_run_steps, name, dtype, given)
    if set(names) != set(optim.OPTIMIZERS):
        return
    for name, mode in itertools.product((*formats.names(), *formats.block_names()), MODES):
        yield f"roundings: {name}, {mode}", partial(_quantize_samples, name, mode)
    for dtype, components in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), (2, 3)):
        run = partial(_run_expansion_operators, dtype, components)
        yield f"expansions: MCTensor of {components} x {dtype}".replace("torch.", ""), run


def _format_call(name: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"


def _are_options_refused(name: str, dtype: torch.dtype, given: dict[str, Any]) -> bool:
    """Return whether options do not go together, or the states that they choose are the default ones, or none."""
    try:
        optimizer = optim.OPTIMIZERS[name](
            [nn.Parameter(torch.zeros(1, _TENSOR_WIDTH, dtype=dtype, device="cpu"))], **given
        )
        optimizer.bytes_per_parameter()
    except (ValueError, NotImplementedError):
        return True
    has_states = bool(optimizer.rule(optimizer.param_groups[0]).states)
    return given["state_dtype"] is not None and (not has_states or given["state_dtype"] == dtype)


def _run_steps(name: str, dtype: torch.dtype, given: dict[str, Any]) -> None:
    """Step twice, once with lost updates counted, which is another kernel."""
    parameter = nn.Parameter(torch.ones(1, _TENSOR_WIDTH, dtype=dtype, device="cpu"))
    for interval in (0, 1):
        optimizer = optim.OPTIMIZERS[name]([parameter], report_interval=interval, **given)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def _train_small_model(recipe: recipes.Recipe, name: str, options: dict[str, Any]) -> None:
    """Train a small model of the most common layers for two steps under a recipe."""
    model = nn.Sequential(nn.Embedding(4, _TENSOR_WIDTH), nn.LayerNorm(_TENSOR_WIDTH), nn.Linear(_TENSOR_WIDTH, 2))
    recipes.convert(model, recipe)
    scaler = recipes.scaler(recipe, model)
    for interval in (0, 1):
        optimizer = recipes.optimizer(model, name, lr=1e-3, report_interval=interval, **options)
        loss = model(torch.arange(4, dtype=torch.int64, device="cpu")).float().square().mean()
        backpropagate_and_step(loss, optimizer, scaler)


def _quantize_samples(name: str, mode: str) -> None:
    """Round tensors of the dtypes that hold a format's numbers."""
    for dtype in (torch.float32, *_NARROW_DTYPES):
        x = torch.linspace(0, 2, 64, dtype=torch.float32, device="cpu").to(dtype)
        try:
            rounding.quantize(x, name, mode)
        except ValueError:
            continue


def _run_expansion_operators(dtype: torch.dtype, components: int) -> None:
    """Run the operators of a small model and its loss on expansions."""
    numbers = torch.linspace(0.5, 2, 64, dtype=torch.float64, device="cpu").reshape(8, 8)
    x = mctensor.MCTensor.encode(numbers, components, dtype)
    made = [x + x, x - x, x * x, x / x, x @ x, -x, x + 1, x * 2.0, x.sum(), x.mean(-1)]
    functions = (torch.exp, torch.log, torch.sqrt, torch.tanh, torch.sigmoid, torch.nn.functional.gelu)
    made += [function(x) for function in functions]
    for result in made:
        assert isinstance(result, mctensor.MCTensor)
        result.decode()
