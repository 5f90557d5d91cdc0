"""Tasks by name, each imported when it is asked for: the names need no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..._names import unknown

if TYPE_CHECKING:
    from ._task import Task

# Name: file and class.
_TASKS = {
    "digits": "_digits.Digits",
    "digits-fpu": "_digits_fpu.DigitsFPU",
    "text": "_text.Text",
    "tinyshakespeare": "_tinyshakespeare.TinyShakespeare",
    "gpt-scaled": "_gpt_scaled.ScaledGPT",
    "cifar10": "_cifar10.Cifar10",
    "cifar10-resnet": "_cifar10_resnet.Cifar10ResNet",
    "two-heads": "_two_heads.TwoHeads",
    "mammals": "_mammals.Mammals",
    "linear-regression": "_full_batch.LinearRegression",
    "logistic": "_full_batch.Logistic",
    "cancer-logistic": "_full_batch.CancerLogistic",
    "cancer-mlp": "_full_batch.CancerMLP",
}


def names() -> list[str]:
    """The names of all tasks.

    >>> names()[-4:]
    ['linear-regression', 'logistic', 'cancer-logistic', 'cancer-mlp']
    """
    return list(_TASKS)


def get(task: str | Task, data: str | None = None) -> Task:
    """The task of that name; a Task is returned as it is.

    Args:
        task: A name, or a Task.
        data: The folder for tasks that read files; tasks with embedded data ignore it.

    Raises:
        ValueError: no task has that name, or it needs files that are not in ``data``.
    """
    from ._task import Task

    if isinstance(task, Task):
        return task
    if task not in _TASKS:
        raise ValueError(unknown("task", task, _TASKS))
    kind = _class(task)
    return kind(data=data) if "data" in getattr(kind, "__dataclass_fields__", {}) else kind()


def kind_of(name: str) -> type[Task]:
    """The class of the task of that name; of a task that is not one of these, their base."""
    from ._task import Task

    return _class(name) if name in _TASKS else Task


def _class(name: str) -> type[Task]:
    file, kind = _TASKS[name].split(".")
    return getattr(importlib.import_module(f".{file}", __package__), kind)
