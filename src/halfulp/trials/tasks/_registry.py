"""Tasks by name, each imported when it is asked for: the names need no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..._names import describe_unknown_name, register_entry

if TYPE_CHECKING:
    from ._task import Task

TaskClass = TypeVar("TaskClass", bound="type[Task]")
# Name: file and class, or the class of a task that somebody registered.
_TASK_REGISTRY: dict[str, str | type[Task]] = {
    "digits": "_digits.Digits",
    "digits-slow": "_digits.DigitsSlow",
    "digits-fpu": "_digits.DigitsFromScratch",
    "text": "_text.PythonHelpText",
    "tinyshakespeare": "_text.TinyShakespeare",
    "tinyshakespeare-lstm": "_text.TinyShakespeareLSTM",
    "gpt-scaled": "_text.FusedAttentionGPT",
    "sst2": "_sst2.SST2",
    "cifar10": "_cifar10.Cifar10",
    "cifar10-resnet": "_cifar10.Cifar10ResNet",
    "cifar10-resnet-half": "_cifar10.Cifar10HalfResolutionResNet",
    "two-heads": "_digits.TwoHeads",
    "fsdd": "_fsdd.SpokenDigits",
    "ml100k": "_ml100k.MovieLens",
    "mammals": "_mammals.Mammals",
    "linear-regression": "_full_batch.LinearRegression",
    "logistic": "_full_batch.Logistic",
    "cancer-logistic": "_full_batch.CancerLogistic",
    "cancer-mlp": "_full_batch.CancerMLP",
}


def names() -> list[str]:
    """Return the names of all tasks.

    >>> names()[-4:]
    ['linear-regression', 'logistic', 'cancer-logistic', 'cancer-mlp']
    """
    return list(_TASK_REGISTRY)


def get(task: str | Task, data: str | None = None) -> Task:
    """Return the task of that name; a Task is returned as it is.

    Args:
        task: A name, or a Task.
        data: The folder for tasks that read files; tasks with embedded data ignore it.

    Raises:
        ValueError: no task has that name, or it needs files that are not in ``data``.
    """
    from ._task import Task

    if isinstance(task, Task):
        return task
    if task not in _TASK_REGISTRY:
        raise ValueError(describe_unknown_name("task", task, _TASK_REGISTRY))
    kind: Callable[..., Task] = find_task_class(task)
    return kind(data=data) if has_data_folder_field(kind) else kind()


def has_data_folder_field(kind: object) -> bool:
    """Return whether tasks of a class read files: it is a dataclass with a field ``data``, their folder."""
    return "data" in getattr(kind, "__dataclass_fields__", {})


def find_task_class(name: str) -> type[Task]:
    """Return the class of the task of that name."""
    entry = _TASK_REGISTRY[name]
    if isinstance(entry, type):
        return entry
    file, kind = entry.split(".")
    found: type[Task] = getattr(importlib.import_module(f".{file}", __package__), kind)
    return found


def register(kind: TaskClass) -> TaskClass:
    """Register a task class under its name, for comparisons and the command line (a decorator).

    Worker processes import the class from its module, which a script of its own, an installed package or a file that
    `halfulp --extension` names is.

    Returns:
        The class.

    Raises:
        TypeError: it is no subclass of Task, or lacks an attribute that a task must have.
        ValueError: another task has the name, or this one has no title.
    """
    from ._task import Task

    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise TypeError(f"a task is a subclass of hu.trials.tasks.Task, got {kind!r}")
    lacking = [name for name in ("name", "title", "rule", "hyper", "steps", "batch") if not hasattr(kind, name)]
    if lacking or kind.__abstractmethods__:
        raise TypeError(f"{kind.__name__} lacks {', '.join([*lacking, *sorted(kind.__abstractmethods__)])}")
    register_entry("task", _TASK_REGISTRY, kind.name, kind, kind.title)
    return kind
