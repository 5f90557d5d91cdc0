"""Tasks by name."""

from ...recipes import unknown
from ._cifar10 import Cifar10
from ._cifar10_resnet import Cifar10ResNet
from ._digits import Digits
from ._digits_fpu import DigitsFPU
from ._full_batch import CancerLogistic, CancerMLP, LinearRegression, Logistic
from ._gpt_scaled import ScaledGPT
from ._mammals import Mammals
from ._task import Task
from ._text import Text
from ._tinyshakespeare import TinyShakespeare
from ._two_heads import TwoHeads

_TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        *(Digits, DigitsFPU, Text, TinyShakespeare, ScaledGPT, Cifar10, Cifar10ResNet, TwoHeads, Mammals),
        *(LinearRegression, Logistic, CancerLogistic, CancerMLP),
    )
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
    if isinstance(task, Task):
        return task
    if task not in _TASKS:
        raise ValueError(unknown("task", task, _TASKS))
    kind = _TASKS[task]
    return kind(data=data) if "data" in getattr(kind, "__dataclass_fields__", {}) else kind()


def kind_of(name: str) -> type[Task]:
    """The class of the task of that name; of a task that is not one of these, their base."""
    return _TASKS.get(name, Task)
