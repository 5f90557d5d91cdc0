"""One trial: a task trained once under one recipe from one seed."""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import recipes
from ...recipes import Recipe
from ...recipes._torch_optimizers import MeasuredOptimizer
from ..tasks import Batch, Data, Task
from ._gradient_scaling import Scaling, scaling
from ._observed import READINGS, observing, readings

POINTS = 60
_NOTHING = {"loss": None, "accuracy": None}

Loss = Callable[[Tensor, Tensor], Tensor]
Report = Callable[[int, float], None]


def run(
    task: Task,
    recipe: Recipe,
    seed: int,
    steps: int,
    data: Data,
    report: Report | None = None,
    observed: bool = False,
    take: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> dict[str, Any]:
    """Train, measure, and return the result as plain data; a loss that is not finite ends it as "diverged".

    Args:
        task: What to train.
        recipe: How.
        seed: Decides the start, the order of the data and the recipe's random bits.
        steps: How many optimizer steps.
        data: ``task.load()``.
        report: Called now and then with the number of steps done and the latest loss.
        observed: Whether `hu.observe` watches, which changes no bit; the result then has its ``observed`` readings.
        take: Which of the batches are trained on: all.
    """
    torch.manual_seed(seed)
    # What is not batches, a model and a loss brings its own loop.
    own_trial = getattr(task, "trial", None)
    if own_trial is not None:
        return own_trial(recipe, seed, steps, data, report)
    model = task.model(data, seed)
    blank = copy.deepcopy(model)
    report_interval = max(1, min(50, steps // 12))
    recipes.convert(model, recipe, seed=seed)
    optimizer = recipes.optimizer(model, task.rule, seed=seed, report_interval=report_interval, **task.hyper)
    with _arithmetic(recipe, model) as under:
        loss, judge = under(task.loss), under(task.judge)
        with (
            scaling(recipe, model, optimizer, steps) as scaled,
            observing(observed, model, optimizer, steps) as seen,
        ):
            batches = take(task.batches(data, seed, steps))
            course = _train(task, model, loss, optimizer, batches, steps, report, scaled)
        failed = course["diverged_at"] is not None
        own = _NOTHING if failed else evaluate(task, model, judge, data.validation)
    wide = _in_float32(task, blank, data, None if failed else optimizer.float32_state_dict(model))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = {"parameters": parameters, "targets": task.count(data.validation[1]), "data": data.note}
    watched = {READINGS: readings(seen, steps)} if seen is not None else {}
    return {**course, **scaled.readings(), "float32": wide, "own": own, **size, **watched}


def _train(
    task: Task,
    model: nn.Module,
    loss_of: Loss,
    optimizer: MeasuredOptimizer,
    batches: Iterator[Batch],
    steps: int,
    report: Report | None,
    scaled: Scaling,
) -> dict[str, Any]:
    """The training loop: the loss curve, the time of a step, the memory, the updates lost."""
    rates = [group["lr"] for group in optimizer.param_groups]
    dtype = next(model.parameters()).dtype
    width = max(1, steps // POINTS)
    curve: list[list[float]] = []
    window: list[float] = []
    seconds: list[float] = []
    memory = None

    def loss_on(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(task.outputs(model, batch[0]), batch[1])

    for step, (inputs, targets) in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * task.rate(step, steps)
        batch = _cast(inputs, dtype), targets
        scaled.before(step)
        start = time.process_time()
        loss = loss_on(model, batch)
        scaled.backward(loss)
        if step == min(2, steps - 1):
            memory = optimizer.bytes_per_parameter()
        scaled.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        window.append(loss.item())
        if not math.isfinite(window[-1]):
            return _course(curve, seconds, optimizer, memory, step)
        scaled.after(step, loss_on, batch)
        if len(window) == width or step == steps - 1:
            curve.append([step + 1, statistics.fmean(window)])
            window = []
            if report is not None:
                report(step + 1, curve[-1][1])
    return _course(curve, seconds, optimizer, memory, None)


def _course(
    curve: list[list[float]],
    seconds: list[float],
    optimizer: MeasuredOptimizer,
    memory: float | None,
    diverged_at: int | None,
) -> dict[str, Any]:
    lost = optimizer.report()
    return {
        "curve": curve,
        "step_ms": 1000 * statistics.median(seconds),
        "bytes_per_parameter": memory,
        "cancelled": _finite(lost.cancelled),
        "realised": _finite(lost.realised),
        "diverged_at": diverged_at,
    }


def _in_float32(task: Task, blank: nn.Module, data: Data, decoded: dict[str, Tensor] | None) -> dict[str, Any]:
    """Scores of the decoded weights in a float32 copy of the model."""
    if decoded is None:
        return {"validation": _NOTHING, "train": _NOTHING}
    blank.load_state_dict(decoded)
    train = evaluate(task, blank, task.judge, data.train) if task.judged_by == "train_loss" else _NOTHING
    return {"validation": evaluate(task, blank, task.judge, data.validation), "train": train}


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, loss: Loss, part: Batch, size: int = 256) -> dict[str, float | None]:
    """Mean loss in nats and the share of targets that the task calls hits; no share where it has no targets."""
    inputs, targets = part
    dtype = next(model.parameters()).dtype
    total, right, count = 0.0, 0, 0
    model.eval()
    for start in range(0, len(inputs), size):
        chunk = targets[start : start + size]
        logits = task.outputs(model, _cast(inputs[start : start + size], dtype))
        hit = task.hits(logits, chunk)
        total += loss(logits, chunk).item() * hit.numel()
        right += int(hit.sum())
        count += hit.numel()
    model.train()
    return {"loss": _finite(total / count), "accuracy": right / count if task.target else None}


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


@contextlib.contextmanager
def _arithmetic(recipe: Recipe, model: nn.Module) -> Iterator[Callable[[Loss], Loss]]:
    """Put the model under the recipe's emulation, if it has one; gives what puts a loss under the same."""
    if recipe.emulate is None:
        yield lambda loss: loss
        return
    from ...emulation import emulate

    with emulate(model, recipe.emulate) as emulation:

        def under(loss: Loss) -> Loss:
            def rounded(logits: Tensor, targets: Tensor) -> Tensor:
                with emulation.region():
                    return loss(logits, targets)

            return rounded

        yield under
