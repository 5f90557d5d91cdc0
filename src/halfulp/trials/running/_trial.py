"""One trial: a task trained under a recipe from a seed, and judged."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import recipes
from ...environment._narrow_products import force_float32_products, list_dtypes_multiplied_in_float32
from ...gradients import AdaptiveGradScaler
from ...mctensor import MCTensor
from ...mctensor._convert_model import plain_state_dict
from ...recipes._optimizer import LossFunction, RecipeOptimizer, emulate_recipe
from ..tasks import Batch, Data, Task
from ..tasks._task import LossCurveRecorder, ReportLoss, replace_nonfinite_by_none
from ._plan import Trial

_NO_SCORE = {"loss": None, "accuracy": None}


def run_trial(trial: Trial, data: Data, report: ReportLoss | None = None) -> dict[str, Any]:
    """Train and measure one trial; return its result as plain data. A loss that is not finite ends it as "diverged".

    The seed decides the start, the order of the data and the recipe's random bits.
    """
    task, recipe, seed, steps = trial.task, trial.recipe, trial.seed, trial.steps
    torch.manual_seed(seed)
    # What is not batches, a model and a loss brings its own loop.
    own_trial = getattr(task, "trial", None)
    if own_trial is not None:
        return own_trial(recipe, seed, steps, data, report)
    for part in ("train", "validation"):
        if not len(getattr(data, part)[0]):
            raise ValueError(f"the {part} data of task {task.name!r} are empty")
    model = task.model(data, seed)
    blank = copy.deepcopy(model)
    report_interval = max(1, min(50, steps // 12))
    recipes.convert(model, recipe, seed=seed)
    optimizer = recipes.optimizer(model, task.rule, seed=seed, report_interval=report_interval, **task.hyper)
    # Plain float16 products run in float32: torch's float16 convolutions take ten to a hundred times as long, on
    # processors with float16 instructions too, and differ by the order of summation alone.
    is_float16 = recipe.param_dtype == "float16" and recipe.is_narrow
    widened = (
        (*list_dtypes_multiplied_in_float32(), torch.float16) if is_float16 else list_dtypes_multiplied_in_float32()
    )
    with force_float32_products(*widened), emulate_recipe(recipe, model) as under:
        loss, judge = under(task.loss), under(task.compute_judged_loss)
        scaler = recipes.scaler(recipe, model)
        try:
            batches = task.batches(data, seed, steps)
            course = _train_model(task, model, loss, optimizer, batches, steps, report, scaler)
        finally:
            if scaler is not None:
                scaler.detach()
        failed = course["diverged_at"] is not None
        if not failed:
            optimizer.eval()
        own = _NO_SCORE if failed else evaluate_model(task, model, judge, data.validation)
    wide: dict[str, Any] = {"validation": _NO_SCORE, "train": _NO_SCORE}
    if not failed:
        # The decoded weights in a copy of the model, in float32, or in float64 where the data are.
        state = plain_state_dict(model.state_dict(), torch.float64) if recipe.is_stepped_by_torch else None
        blank.to(torch.float64 if data.train[0].dtype == torch.float64 else torch.float32)
        blank.load_state_dict(state or optimizer.float32_state_dict(model))
        judged = ("train", "validation") if task.judged_by == "train_loss" else ("validation",)
        wide |= {name: evaluate_model(task, blank, task.compute_judged_loss, getattr(data, name)) for name in judged}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = {"parameters": parameters, "targets": task.count_judged(data.validation[1]), "data": data.note}
    return {**course, "float32": wide, "own": own, **size}


def _train_model(
    task: Task,
    model: nn.Module,
    loss_of: LossFunction,
    optimizer: RecipeOptimizer,
    batches: Iterator[Batch],
    steps: int,
    report: ReportLoss | None,
    scaler: AdaptiveGradScaler | None,
) -> dict[str, Any]:
    """Train a model in place; return the course of the training as plain data."""
    rates = [group["lr"] for group in optimizer.param_groups]
    course, memory, skipped = LossCurveRecorder(steps, report), None, 0
    for step, given in enumerate(itertools.islice(batches, steps)):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * task.lr_factor(step, steps)
        batch = _convert_batch_to_weight_dtype(model, given)
        start = time.process_time()
        loss = loss_of(task.outputs(model, batch[0]), batch[1])
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == min(2, steps - 1):
            memory = optimizer.bytes_per_parameter()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.last_step is None or not scaler.last_step.applied
        optimizer.zero_grad()
        course.seconds.append(time.process_time() - start)
        if not course.record_step_loss(loss.item()):
            break
    if course.diverged_at is None and len(course.seconds) < steps:
        raise ValueError(f"task {task.name!r} yields {len(course.seconds)} batches for {steps} steps: one each")
    lost = optimizer.report()
    found = course.make_training_summary(lost.cancelled, lost.realised, memory)
    return found if scaler is None else {**found, "skipped": skipped}


@torch.no_grad()
def evaluate_model(
    task: Task, model: nn.Module, loss: LossFunction, part: Batch, size: int = 256
) -> dict[str, float | None]:
    """Return the mean loss in nats and the share of targets that are hits, None where the task has no targets."""
    total, right, count = 0.0, 0, 0
    model.eval()
    for start in range(0, len(part[0]), size):
        inputs, chunk = _convert_batch_to_weight_dtype(
            model, (part[0][start : start + size], part[1][start : start + size])
        )
        logits = task.outputs(model, inputs)
        hit = task.is_hit(logits, chunk)
        total += loss(logits, chunk).item() * hit.numel()
        right += int(hit.sum())
        count += hit.numel()
    model.train()
    return {"loss": replace_nonfinite_by_none(total / count), "accuracy": right / count if task.target else None}


def _convert_batch_to_weight_dtype(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch with floating inputs in the dtype of the weights; float64 data as as many components."""
    weight, (inputs, targets) = next(model.parameters()), batch
    components = len(weight.components) if isinstance(weight, MCTensor) and inputs.dtype == torch.float64 else 0

    def convert_to_weight_dtype(x: Tensor) -> Tensor:
        return MCTensor.encode(x, components, weight.dtype) if components else x.to(weight.dtype)

    if inputs.is_floating_point():
        inputs = convert_to_weight_dtype(inputs)
    return inputs, convert_to_weight_dtype(targets) if targets.dtype == torch.float64 else targets
