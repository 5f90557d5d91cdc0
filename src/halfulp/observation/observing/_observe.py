"""observe: watch a run, and say what its numbers do."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..._messages import name_type
from ...optim import EMA
from ...optim._optimizer import find_inner_optimizer
from ...sinks import Sink
from ._expectations import ExpectedFormats, FormatsByPattern
from ._observation import Observation


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
        one = find_inner_optimizer(given)
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"observe takes torch optimizers, got {name_type(one)}: give subclasses of torch.optim.Optimizer, "
                "whose step has hooks, or leave it out (optimizer=None) to observe activations and gradients alone"
            )
        found.append(one)
    return found


def find_scheduler(optimizers: Sequence[torch.optim.Optimizer]) -> LRScheduler | None:
    """Return the scheduler of optimizers, None without one."""
    # torch's schedulers mark the `step` of their optimizer, but leave no way from there to themselves.
    if not any(hasattr(one.step, "_wrapped_by_lr_sched") for one in optimizers):
        return None
    living = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    found = [one for one in living if any(getattr(one, "optimizer", None) is stepped for stepped in optimizers)]
    # Those that another one steps are not asked.
    inner = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    outer = [one for one in found if id(one) not in inner]
    return outer[-1] if outer else None
