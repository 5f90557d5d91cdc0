"""Task: a model, its data and its losses, on which recipes are compared; Step: a training step of one's own."""

import abc
import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._messages import name_type
from ...recipes import Recipe

Batch = tuple[Tensor, Tensor]
# Called with the number of steps done and the loss of late.
ReportLoss = Callable[[int, float], None]
# Points of a loss curve.
_MOST_CURVE_POINTS = 60


@dataclasses.dataclass(frozen=True)
class Data:
    """The data that a task trains on and is judged on: pairs of inputs and targets.

    Data in float64 are held as the recipe holds weights, rounded to their type or as so many components, and judged in
    float64. ``note`` says in words what they are, for reports.
    """

    train: Batch
    validation: Batch
    note: str


class LossCurveRecorder:
    """The loss curve of one training, whose points are reported, the CPU time of its steps, and where it diverged.

    Attributes:
        seconds: CPU time of each step; the training loop adds to it.
        diverged_at: the first step whose loss is not finite; None without one.
    """

    def __init__(self, steps: int, report: ReportLoss | None = None) -> None:
        self._steps, self._report = steps, report
        self._curve: list[list[float]] = []
        self._window_losses: list[float] = []
        self._step_count = 0
        self.seconds: list[float] = []
        self.diverged_at: int | None = None

    def record_step_loss(self, loss: float) -> bool:
        """Add the loss of the next step; return whether it is finite."""
        if not math.isfinite(loss):
            self.diverged_at = self._step_count
            return False
        self._step_count += 1
        self._window_losses.append(loss)
        if len(self._window_losses) == max(1, self._steps // _MOST_CURVE_POINTS) or self._step_count == self._steps:
            self._curve.append([self._step_count, statistics.fmean(self._window_losses)])
            self._window_losses = []
            if self._report is not None:
                self._report(self._step_count, self._curve[-1][1])
        return True

    def make_training_summary(
        self, cancelled: float | None = None, realised: float | None = None, bytes_per_parameter: float | None = None
    ) -> dict[str, Any]:
        """Return the course as plain data, with what the optimizer says of its updates and its memory."""
        return {
            "curve": self._curve,
            "step_ms": 1000 * statistics.median(self.seconds or [0.0]),
            "bytes_per_parameter": bytes_per_parameter,
            "cancelled": replace_nonfinite_by_none(cancelled),
            "realised": replace_nonfinite_by_none(realised),
            "diverged_at": self.diverged_at,
        }


def replace_nonfinite_by_none(value: float | None) -> float | None:
    """Return a number that JSON can hold: None for NaN and infinities.

    >>> replace_nonfinite_by_none(1.5), replace_nonfinite_by_none(math.nan), replace_nonfinite_by_none(None)
    (1.5, None, None)
    """
    return None if value is None or not math.isfinite(value) else float(value)


class Task(abc.ABC):
    """One training job, the same for every recipe: data, model, batches, loss, schedule and verdict.

    A subclass sets the class attributes and writes ``load`` and ``model``; the rest has defaults for
    classification. Worker processes receive it by pickle, so define it in an importable module, at top level.

    Attributes:
        name: What the command line calls it.
        title: What it is, in a few words.
        rule: The optimizer: a class of ``halfulp.optim``.
        hyper: The rule's hyper-parameters, the same in every row.
        steps: Default number of training steps.
        batch: Examples per step.
        judged_by: ``"train_loss"`` or ``"validation_loss"``; both are measured, this one decides.
        target: What one target is called when accuracy is shown: "image", "character"; empty where none is shown.
        in_process: Whether its trials run in the process that asks for them, one after the other, as what cannot be
            pickled for a worker must.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    rule: ClassVar[str]
    hyper: ClassVar[dict[str, Any]]
    steps: ClassVar[int]
    batch: ClassVar[int]
    judged_by: ClassVar[str] = "validation_loss"
    target: ClassVar[str] = "example"
    in_process: ClassVar[bool] = False

    @abc.abstractmethod
    def load(self) -> Data:
        """Return the data, the same at every call."""

    @abc.abstractmethod
    def model(self, data: Data, seed: int) -> nn.Module:
        """Return the float32 model that training starts from, a function of the seed alone."""

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Yield ``steps`` batches: shuffled epochs, in an order that the seed alone decides."""
        inputs, targets = data.train
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long, device="cpu")
        for _ in range(steps):
            while len(order) < self.batch:
                epoch = torch.randperm(len(inputs), generator=generator, dtype=torch.int64, device="cpu")
                order = torch.cat([order, epoch])
            chosen, order = order[: self.batch], order[self.batch :]
            yield inputs[chosen], targets[chosen]

    def outputs(self, model: nn.Module, inputs: Tensor) -> Any:
        """Return the model's outputs for a batch's inputs, from which the losses are computed."""
        return model(inputs)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, computed in float32 in every recipe."""
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    def compute_judged_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss that a trial is judged by, in nats: what is trained on unless overridden."""
        return self.loss(logits, targets)

    def is_hit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a boolean per target, whether it is the one that the model ranks first, for accuracy."""
        return logits.argmax(-1) == targets

    def count_judged(self, targets: Tensor) -> int:
        """Return how many booleans `is_hit` gives."""
        return targets.numel()

    def explain_refusal(self, recipe: Recipe) -> str | None:
        """Return why a recipe cannot run this task, after the words "the task"; None where it can."""
        return None

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the learning rate at a step as a share of ``hyper["lr"]``: constant unless overridden."""
        return 1.0

    def settings(self) -> dict[str, Any]:
        """Return all that decides a trial's result apart from recipe, seed and length, as plain data.

        Of what an instance holds, that is the fields of a dataclass: make one of a task that takes numbers.
        """
        fields: tuple[Any, ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        return {
            "name": self.name,
            "rule": self.rule,
            "hyper": {key: list(v) if isinstance(v, tuple) else v for key, v in self.hyper.items()},
            "batch": self.batch,
            "judged_by": self.judged_by,
            "target": self.target,
            "title": self.title,
            **{field.name: getattr(self, field.name) for field in fields},
        }


def compute_warm_cosine_factor(step: int, steps: int, warm: float = 0.1, last: float = 0.01) -> float:
    """Return the share of the learning rate under a warm-up and half a cosine down to ``last``.

    The warm-up is linear over the first tenth of the steps. It matters for a comparison: Adam's first steps are the
    sign of the gradient, so that without it the smallest rounding of a gradient moves a weight by a whole learning
    rate, and every recipe runs off on a path of its own. It does not end at 0, so that no step is many times smaller
    than the one before.

    >>> [round(compute_warm_cosine_factor(step, 100), 3) for step in (0, 9, 50, 99)]
    [0.1, 0.98, 0.505, 0.01]
    """
    rise = min(1.0, (step + 1) / max(1.0, warm * steps))
    return rise * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def compute_task_warm_cosine_factor(task: Task, step: int, steps: int) -> float:
    """Return `compute_warm_cosine_factor`, as the method `lr_factor` of a task that is set to it."""
    return compute_warm_cosine_factor(step, steps)


LossOfStep = Callable[[nn.Module, int], Tensor]


class Step(Task):
    """A training step of your own as a task, for `hu.tune` and `hu.compare`: no class, no data set.

    Trials run in the process that makes it, so that the step may be any function, with data of any kind and on any
    device. Seed k trains on the batches k * steps, k * steps + 1, ..., whatever your step makes of a number.

    Args:
        step: called with the model and the number of a batch (an int, 0 and up); returns the loss, a scalar tensor.
        model: where each training starts, a module with float32 parameters, which stays as it is; or a function that
            makes it of a seed.
        steps: of a trial.
        rule: an optimizer of `halfulp.optim`, by name.
        rate: the learning rate as a share of ``lr``, from the number of the step and of all steps; constant without.
        judge: the loss that a training is judged by, without gradients and in eval mode: as ``step``, of the batches
            0, 1, ..., ``judged`` - 1 that it makes of these numbers. Without one it is ``step``.
        judged: how many batches that are.
        name: what tables call it.
        **hyper: the rule's hyper-parameters, ``lr=`` and so on.

    Raises:
        TypeError: a step that is no function, or a model that is neither a module nor a function.
        ValueError: fewer steps or judged batches than one.

    >>> import torch
    >>> from torch import nn
    >>> x, y = torch.randn(64, 8), torch.randn(64, 1)
    >>> def step(model, number):
    ...     chosen = torch.arange(8) + 8 * (number % 8)
    ...     return nn.functional.mse_loss(model(x[chosen]), y[chosen])
    >>> task = Step(step, nn.Linear(8, 1), steps=20, rule="SGD", lr=0.01)
    >>> import halfulp as hu
    >>> [row.recipe for row in hu.compare(task, ["bf16"], seeds=1).rows()]
    ['fp32', 'bf16']
    """

    title: ClassVar[str] = "a training step of one's own"
    judged_by: ClassVar[str] = "validation_loss"
    target: ClassVar[str] = ""
    in_process: ClassVar[bool] = True
    batch: ClassVar[int] = 1

    def __init__(
        self,
        step: LossOfStep,
        model: nn.Module | Callable[[int], nn.Module],
        *,
        steps: int,
        rule: str = "AdamW",
        rate: Callable[[int, int], float] | None = None,
        judge: LossOfStep | None = None,
        judged: int = 16,
        name: str = "step",
        **hyper: Any,
    ) -> None:
        if isinstance(step, nn.Module) or not callable(step) or not callable(model):
            raise TypeError(
                f"a Step takes a function, got {name_type(step)}, and a torch.nn.Module or a function that makes it of "
                f"a seed, got {name_type(model)}; see help(halfulp.trials.tasks.Step)"
            )
        if steps < 1 or judged < 1:
            raise ValueError(f"steps and judged are at least 1, got steps={steps}, judged={judged}")
        self._step, self._model, self._rate, self._judge = step, model, rate, judge or step
        self._judged = judged
        # They differ from instance to instance, where other tasks have them on their class.
        vars(self).update(name=name, rule=rule, hyper=hyper, steps=steps)

    def explain_refusal(self, recipe: Recipe) -> str | None:
        """Refuse recipes whose arithmetic an emulation rounds inside of modules alone."""
        return "computes its loss outside of the model, where no emulation rounds it" if recipe.emulate else None

    def load(self) -> Data:
        """Return the numbers of the batches that the step is judged on."""
        numbers = torch.arange(self._judged, dtype=torch.int64, device="cpu")
        return Data(train=(numbers, numbers), validation=(numbers, numbers), note="batches of a step of one's own")

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return a copy of the model, or the model of a seed."""
        return copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model(seed)

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Return the numbers of a seed's batches."""
        for number in range(seed * steps, (seed + 1) * steps):
            index = torch.tensor(number, dtype=torch.int64, device="cpu")
            yield index, index

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the loss of a training step, or the losses of several batches that are judged."""
        if inputs.ndim == 0:
            return _check_scalar(self._step(model, int(inputs)), "step")
        return torch.stack([_check_scalar(self._judge(model, number), "judge").float() for number in inputs.tolist()])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss itself, or the mean of several."""
        return logits.mean() if logits.ndim else logits

    def is_hit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return False for every target, as no batch has a right answer."""
        return torch.zeros_like(targets, dtype=torch.bool)

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the learning rate's share."""
        return 1.0 if self._rate is None else float(self._rate(step, steps))


def _check_scalar(loss: Any, what: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else name_type(loss)
        raise TypeError(f"the {what} returns the loss as a tensor with one element, got {given}")
    return loss.reshape(())
