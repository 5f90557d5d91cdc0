"""One trial: a task trained under a recipe from a seed, its gradients scaled, its layers observed."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ... import recipes
from ...environment._narrow_products import float32_products_of, widened_dtypes
from ...gradients import AdaptiveGradScaler
from ...mctensor import MCTensor
from ...mctensor._convert_model import plain_state_dict
from ...recipes import Recipe
from ...recipes._optimizer import LossFunction, MeasuredOptimizer, emulate_recipe
from ..tasks import Batch, Data, Task
from ..tasks._task import LossCourse, ReportLoss, finite_or_none
from ._plan import Trial

# Underflow is counted in steps that a scaler measures anyway: every sixteenth, and no more than so many of them.
SAMPLE_INTERVAL = 16
MOST_SAMPLES = 12

LossOfBatch = Callable[[nn.Module, Batch], Tensor]
ZeroCounts = dict[str, tuple[float, int]]


class ScaledSteps:
    """The steps of a trial by the recipe's gradient scaler, if it has one, with counts of overflows and underflows.

    A step that overflows is skipped and counted. Underflow is counted in sampled steps, against the same step without
    rounding: of the gradient elements that are not zero there, the share that is stored as zero.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._scaler, self._model, self._optimizer = recipes.scaler(recipe, model), model, optimizer
        self._sample_interval = SAMPLE_INTERVAL * max(1, steps // (SAMPLE_INTERVAL * MOST_SAMPLES))
        self._applied, self._skipped = True, 0
        self._lost: dict[str, list[tuple[float, float]]] = {}
        self._copy: nn.Module | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the model's own forward pass."""
        if self._scaler is not None:
            self._scaler.detach()

    def begin_step(self, step: int) -> None:
        """Keep, at a sampled step, the model and the random state that it starts from."""
        self._copy = None
        if self._scaler is not None and step % self._sample_interval == 0:
            self._copy, self._random = copy.deepcopy(self._model), torch.get_rng_state()

    def backpropagate(self, loss: Tensor) -> None:
        """Differentiate the loss, scaled by the scaler."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def step(self) -> None:
        """Step the optimizer; by a scaler unless a gradient is not finite, and set the next scales."""
        if self._scaler is None:
            self._optimizer.step()
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()
        last = self._scaler.last_step
        self._applied = last is not None and last.applied
        self._skipped += not self._applied

    def count_underflow(self, step: int, loss_on: LossOfBatch, batch: Batch) -> None:
        """Count, at a sampled step, what underflowed; skipped steps, which overflowed, show nothing."""
        if self._scaler is None or self._copy is None or not self._applied:
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            # Rounding to float32's own format changes nothing, and lets zeros be counted.
            exact = AdaptiveGradScaler(self._copy, policy="constant", init_scale=1.0, format="fp32")
            exact.scale(loss_on(self._copy, batch)).backward()
            exact.step(torch.optim.SGD(self._copy.parameters(), lr=0.0))
            exact.update()
            wanted = _count_zeros(exact)
        for key, (zeros, elements) in _count_zeros(self._scaler).items():
            if key in wanted:
                lost = max(0.0, zeros - wanted[key][0])
                self._lost.setdefault(key, []).append((lost, elements - wanted[key][0]))

    def summarize_scaling(self) -> dict[str, Any]:
        """Return how many steps were skipped, and the share that underflowed, of all sampled gradients and at worst."""
        if self._scaler is None:
            return {}
        sites = {key: _compute_lost_share(counts) for key, counts in self._lost.items()}
        worst = max(sites, key=lambda site: sites[site], default=None)
        counts = [pair for pairs in self._lost.values() for pair in pairs]
        mean = _compute_lost_share(counts) if counts else None
        return {
            "skipped": self._skipped,
            "underflow": {"mean": mean, "worst": None if worst is None else sites[worst], "site": worst},
        }


def _count_zeros(scaler: AdaptiveGradScaler) -> ZeroCounts:
    """Count stored zeros of the last measured step's gradients, and the elements, by site."""
    rows = [row for row in scaler.sites() if row.elements]
    return {row.site: (row.zero * row.elements, row.elements) for row in rows if row.zero is not None}


def _compute_lost_share(counts: list[tuple[float, float]]) -> float:
    """Return the share of lost values among those that could be lost."""
    whole = sum(could for _, could in counts)
    return sum(lost for lost, _ in counts) / whole if whole else 0.0


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
    model = task.model(data, seed)
    blank = copy.deepcopy(model)
    report_interval = max(1, min(50, steps // 12))
    recipes.convert(model, recipe, seed=seed)
    optimizer = recipes.optimizer(model, task.rule, seed=seed, report_interval=report_interval, **task.hyper)
    # Plain float16 products run in float32: torch's float16 convolutions take ten to a hundred times as long, on
    # processors with float16 instructions too, and differ by the order of summation alone.
    is_float16 = recipe.param_dtype == "float16" and recipe.narrow
    products: Any = float32_products_of(*widened_dtypes(), torch.float16) if is_float16 else contextlib.nullcontext()
    with products, emulate_recipe(recipe, model) as under:
        loss, judge = under(task.loss), under(task.judge)
        with ScaledSteps(recipe, model, optimizer, steps) as scaled:
            batches = task.batches(data, seed, steps)
            course = _train_model(task, model, loss, optimizer, batches, steps, report, scaled)
        failed = course["diverged_at"] is not None
        if not failed:
            optimizer.eval()
        own = _NO_SCORE if failed else evaluate_model(task, model, judge, data.validation)
    wide: dict[str, Any] = {"validation": _NO_SCORE, "train": _NO_SCORE}
    if not failed:
        # The decoded weights in a copy of the model, in float32, or in float64 where the data are.
        state = plain_state_dict(model.state_dict(), torch.float64) if recipe.by_torch else None
        blank.to(torch.float64 if data.train[0].dtype == torch.float64 else torch.float32)
        blank.load_state_dict(state or optimizer.float32_state_dict(model))
        judged = ("train", "validation") if task.judged_by == "train_loss" else ("validation",)
        wide |= {name: evaluate_model(task, blank, task.judge, getattr(data, name)) for name in judged}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = {"parameters": parameters, "targets": task.count(data.validation[1]), "data": data.note}
    return {**course, **scaled.summarize_scaling(), "float32": wide, "own": own, **size}


def _train_model(
    task: Task,
    model: nn.Module,
    loss_of: LossFunction,
    optimizer: MeasuredOptimizer,
    batches: Iterator[Batch],
    steps: int,
    report: ReportLoss | None,
    scaled: ScaledSteps,
) -> dict[str, Any]:
    """Train a model in place; return the course of the training as plain data."""
    rates = [group["lr"] for group in optimizer.param_groups]
    course, memory = LossCourse(steps, report), None

    def loss_on(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(task.outputs(model, batch[0]), batch[1])

    for step, given in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * task.rate(step, steps)
        batch = _hold_as_weights(model, given)
        scaled.begin_step(step)
        start = time.process_time()
        loss = loss_on(model, batch)
        scaled.backpropagate(loss)
        if step == min(2, steps - 1):
            memory = optimizer.bytes_per_parameter()
        scaled.step()
        optimizer.zero_grad()
        course.seconds.append(time.process_time() - start)
        if not course.add_loss(loss.item()):
            break
        scaled.count_underflow(step, loss_on, batch)
    lost = optimizer.report()
    return course.summarize_training(lost.cancelled, lost.realised, memory)


@torch.no_grad()
def evaluate_model(
    task: Task, model: nn.Module, loss: LossFunction, part: Batch, size: int = 256
) -> dict[str, float | None]:
    """Return the mean loss in nats and the share of targets that are hits, None where the task has no targets."""
    total, right, count = 0.0, 0, 0
    model.eval()
    for start in range(0, len(part[0]), size):
        inputs, chunk = _hold_as_weights(model, (part[0][start : start + size], part[1][start : start + size]))
        logits = task.outputs(model, inputs)
        hit = task.hits(logits, chunk)
        total += loss(logits, chunk).item() * hit.numel()
        right += int(hit.sum())
        count += hit.numel()
    model.train()
    return {"loss": finite_or_none(total / count), "accuracy": right / count if task.target else None}


def _hold_as_weights(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch with floating inputs in the dtype of the weights; float64 data as as many components."""
    weight, (inputs, targets) = next(model.parameters()), batch
    components = len(weight.components) if isinstance(weight, MCTensor) and inputs.dtype == torch.float64 else 0

    def hold(x: Tensor) -> Tensor:
        return MCTensor.encode(x, components, weight.dtype) if components else x.to(weight.dtype)

    if inputs.is_floating_point():
        inputs = hold(inputs)
    return inputs, hold(targets) if targets.dtype == torch.float64 else targets
