"""Step: a training step of a user's own as a task."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..._messages import a_kind
from ._task import Batch, Data, Task

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
        TypeError: a step or a judge that cannot be called, or a model that is neither a module nor a function.
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
        for said, given in (("step", step), ("judge", judge), ("rate", rate)):
            if given is not None and (not callable(given) or isinstance(given, nn.Module)):
                raise TypeError(f"{said}= takes a function, got {a_kind(given)}; see help(halfulp.trials.tasks.Step)")
        if not callable(model):
            raise TypeError(
                f"model= takes a torch.nn.Module or a function that makes it of a seed, got {a_kind(model)}"
            )
        if steps < 1 or judged < 1:
            raise ValueError(f"steps and judged are at least 1, got steps={steps}, judged={judged}")
        self._step, self._model, self._rate, self._judge = step, model, rate, judge or step
        self._judged = judged
        # They differ from instance to instance, where other tasks have them on their class.
        vars(self).update(name=name, rule=rule, hyper=hyper, steps=steps)

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

    def hits(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return False for every target, as no batch has a right answer."""
        return torch.zeros_like(targets, dtype=torch.bool)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate's share."""
        return 1.0 if self._rate is None else float(self._rate(step, steps))


def _check_scalar(loss: Any, what: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else a_kind(loss)
        raise TypeError(f"the {what} returns the loss as a tensor with one element, got {given}")
    return loss.reshape(())
