"""Sinks: what a user gives rows to, told apart by what it can do."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from .._messages import a_kind
from ._outlet import Outlet, Row
from ._row_file import RowFile

PREFIX = "halfulp/"
_WANTED = (
    "a path that ends in .jsonl or .csv, a SummaryWriter (add_scalar), a run whose log or log_metrics takes a dict, a "
    "csv.DictWriter, or a function of a dict"
)


class ScalarWriter(Protocol):
    """Like TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = ..., /) -> Any:
        """Write a number under a name."""


class DictLogger(Protocol):
    """Like a wandb run."""

    @property
    def log(self) -> Callable[..., Any]:
        """Takes a dict, and `step=` where it can."""


class MetricsLogger(Protocol):
    """Like MLflow's module, or a logger of Lightning."""

    @property
    def log_metrics(self) -> Callable[..., Any]:
        """Takes a dict, and `step=` where it can."""


class DictWriter(Protocol):
    """Like csv.DictWriter, whose `fieldnames` choose."""

    @property
    def fieldnames(self) -> Any:
        """The columns."""

    @property
    def writerow(self) -> Callable[[Any], Any]:
        """Takes a dict of them."""


Sink: TypeAlias = (
    str
    | os.PathLike[str]
    | ScalarWriter
    | DictLogger
    | MetricsLogger
    | DictWriter
    | Callable[[dict[str, Any]], object]
    | Outlet
)


def outlet(sink: Sink, columns: Sequence[str], check: bool = True) -> Outlet:
    """Return the outlet of a sink.

    Args:
        sink: a path, a logger, a function.
        columns: of its rows, in order; "step" is one.
        check: whether to check that a file can be written.

    Raises:
        TypeError: it can take no rows.
        ValueError: a path with another ending, or one that cannot be written.

    >>> outlet(print, ["step"]).put({"step": 3})
    {'step': 3}
    """
    if isinstance(sink, Outlet):
        return sink
    if isinstance(sink, str | os.PathLike):
        file = RowFile(sink, columns)
        if check:
            file.check()
        return Outlet("the CSV file" if file.is_csv else "the file of JSON lines", lambda row: file.write([row]))
    name = f"the {type(sink).__name__}"
    for method, writing in _METHODS.items():
        if callable(getattr(sink, method, None)):
            return Outlet(name, writing(sink))
    if callable(sink):
        return Outlet("the function", lambda row: sink(dict(row)))
    raise TypeError(f"a sink is {_WANTED}; got {a_kind(sink)}")


def _scalars(writer: Any) -> Callable[[Row], None]:
    def write(row: Row) -> None:
        for key, value in _known(row).items():
            if key != "step":
                writer.add_scalar(PREFIX + key, value, row["step"])

    return write


def _metrics(log: Callable[..., Any]) -> Callable[[Row], None]:
    with_step = _takes_step(log)

    def write(row: Row) -> None:
        numbers = {PREFIX + key: value for key, value in _known(row).items()}
        if with_step:
            log(numbers, step=row["step"])
        else:
            log(numbers)

    return write


def _named_columns(writer: Any) -> Callable[[Row], None]:
    return lambda row: writer.writerow({name: row.get(name) for name in writer.fieldnames})


# The first that a sink has counts: a SummaryWriter may have more than one.
_METHODS: Mapping[str, Callable[[Any], Callable[[Row], None]]] = {
    "add_scalar": _scalars,
    "log": lambda run: _metrics(run.log),
    "log_metrics": lambda run: _metrics(run.log_metrics),
    "writerow": _named_columns,
}


def _known(row: Row) -> dict[str, Any]:
    """What a logger of numbers can keep."""
    return {key: value for key, value in row.items() if value is not None}


def _takes_step(log: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(log).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return True
    return any(one.name == "step" or one.kind is one.VAR_KEYWORD for one in parameters)
