"""Rows: a sampled step as one flat row of numbers, and the sinks that get it."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import formats
from ..._messages import a_kind
from ..._qualified_names import pattern_of
from ...sinks import Outlet, Sink, outlet
from .._record import ParameterRecord, Record, StepRecord
from ..sampling._sampler import NARROW, Totals
from ._notebook import Notebook

MOST_GROUPS = 24
OTHERS = "others"
RUN = ("step", "loss", "lr", "loss_scale", "skipped", "smallest_exponent", "largest_exponent", "nonfinite_tensors")
SHARES = ("updates_lost", "movement_kept", "gradient_underflow")
GRADIENTS = ("weight gradient", "activation gradient")
# Of a group's sums: changes that were wanted, those that were lost; movement that was wanted, what of it took place;
# nonzero elements of weight gradients, about how many became zero.
_SUMS = 6


class Rows:
    """Makes rows of a record.

    A row holds numbers of the run (`RUN`), then three shares over all parameters and over each group of them, such as
    "updates_lost" and "updates_lost/layers.*.norm.weight": of the changes that were wanted in this step, those that
    left their element as it was; of the wanted movement, what took place; of the nonzero gradients, about how many
    became zero in their dtype (over all: those of activations too). None stands for what is not known. A group is the
    parameters whose names differ in numbers alone, in modules of one class; where those are more than 24, parameters of
    one name in modules of one class; the smallest beyond that are together "others". Gradients of iterations that a
    scaler skipped before the step count in it.

    Attributes:
        columns: names of the entries, in order, the same in all rows.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._group_of = groups_of(p for p in record.parameters.values() if p.requires_grad and p.numel)
        self._groups: list[str] = list(dict.fromkeys(self._group_of.values()))
        self._index = {name: self._groups.index(group) for name, group in self._group_of.items()}
        each = ["", *(f"/{group}" for group in self._groups)]
        self.columns: list[str] = [*RUN, *(f"{share}{group}" for group in each for share in SHARES)]
        self._skipped: int = 0
        self._before: np.ndarray = self._sums()
        self._keys: list[tuple[int, torch.dtype]] = []
        self._counts: np.ndarray = np.zeros((0, 2))

    def row(self, step: StepRecord, totals: Mapping[tuple[Any, str], Totals]) -> dict[str, Any]:
        """Return the row of a sampled step that has ended; shares are those since the row before."""
        skipped, self._skipped = self._record.skipped - self._skipped, self._record.skipped
        least, most = step.exponents or (None, None)
        broken = sum(int(one.step == step.step and one.step_nonfinite > 0) for one in totals.values())
        run = (step.step, step.loss, step.lr, step.loss_scale, skipped, least, most, broken)
        sums, whole = self._sums(), self._underflow(totals)
        since, self._before = sums - self._before, sums
        since[:, 4:] = whole[:-1]
        total = since.sum(0)
        total[4:] = whole.sum(0)
        shares = (share for one in (total, *since) for share in _shares(one))
        return dict(zip(self.columns, (*run, *shares), strict=True))

    def _sums(self) -> np.ndarray:
        """Return sums over each group's parameters since the observation began."""
        found = [[0.0] * _SUMS for _ in self._groups]
        parameters = self._record.parameters
        for name, k in self._index.items():
            update, own = parameters[name].update, found[k]
            own[0] += update.seen
            own[1] += update.cancelled
            if update.known:
                own[2] += update.wanted
                own[3] += update.kept
        return np.array(found, np.float64).reshape(-1, _SUMS)

    def _underflow(self, totals: Mapping[tuple[Any, str], Totals]) -> np.ndarray:
        """Count this step's nonzero gradients, and about how many became zero: per group, then of activations."""
        found = np.zeros((len(self._groups) + 1, 2))
        own = {key: one for key, one in totals.items() if key[0] in GRADIENTS and not one.wide}
        if not own:
            return found
        keys = [(id(one), one.record.dtype) for one in own.values()]
        binades = np.stack([one.histogram for one in own.values()])
        if keys != self._keys:
            before = dict(zip(self._keys, self._counts))
            self._counts = np.array([before.get(key, (0.0, 0.0)) for key in keys])
            self._smallest = np.stack([_smallest_binades(dtype) for _, dtype in keys])
            places = [self._index.get(name, -1) if role == GRADIENTS[0] else -1 for role, name in own]
            self._keys, self._places = keys, np.array(places)
        # As `findings` estimates it: half as many as are left at the smallest number became zero.
        counts = np.column_stack([binades.sum(1), 0.5 * (binades * self._smallest).sum(1)])
        np.add.at(found, self._places, counts - self._counts)
        self._counts = counts
        return found


def groups_of(parameters: Iterable[ParameterRecord]) -> dict[str, str]:
    """Return the group of each parameter, by name: alike parameters share one, so that there are at most 24.

    >>> import torch
    >>> named = {"0.weight": "Linear", "1.weight": "LayerNorm", "3.weight": "Linear"}
    >>> groups_of(ParameterRecord(name, kind, torch.float32, (2,), 2, True) for name, kind in named.items())
    {'0.weight': '*.weight (Linear)', '1.weight': '1.weight', '3.weight': '*.weight (Linear)'}
    """
    parameters = list(parameters)
    members: dict[tuple[str, str], list[str]] = {}
    for one in parameters:
        members.setdefault((pattern_of(one.name), one.kind), []).append(one.name)
    patterns = Counter(pattern for pattern, _ in members)
    found: dict[str, str] = {}
    for (pattern, kind), names in members.items():
        shared = pattern if patterns[pattern] == 1 else f"{pattern} ({kind})"
        found |= dict.fromkeys(names, shared if len(names) > 1 else names[0])
    if len(members) > MOST_GROUPS:
        found = {one.name: f"{one.kind}.{one.name.rpartition('.')[2]}".lstrip(".") for one in parameters}
    sizes: Counter[str] = Counter()
    for one in parameters:
        sizes[found[one.name]] += one.numel
    most = MOST_GROUPS if len(sizes) <= MOST_GROUPS else MOST_GROUPS - 1
    kept = {group for group, _ in sizes.most_common(most)}
    return {one.name: found[one.name] if found[one.name] in kept else OTHERS for one in parameters}


@functools.cache
def _smallest_binades(dtype: torch.dtype) -> np.ndarray:
    """Return which bins of a histogram hold a dtype's smallest numbers."""
    try:
        smallest = math.frexp(formats.get(dtype).smallest_subnormal)[1] - 1
    except ValueError:  # integers, whose gradients are none
        smallest = NARROW[0] - 1
    return np.arange(NARROW[0], NARROW[0] + NARROW[1]) <= smallest


def _shares(sums: np.ndarray) -> tuple[float | None, ...]:
    seen, lost, wanted, kept, nonzero, vanished = sums.tolist()
    return (
        lost / seen if seen else None,
        kept / wanted if wanted else None,
        vanished / (nonzero + vanished) if nonzero else None,
    )


class Sinks:
    """Gives each sink a row of every sampled step.

    Raises:
        TypeError: a sink that can take no rows.
        ValueError: a path that cannot be written.
    """

    def __init__(self, book: Notebook, given: Sequence[Sink]) -> None:
        self._book = book
        self._rows = Rows(book.record)
        # Of several processes the others may see another disk.
        self._outlets: list[Outlet] = [outlet(sink, self._rows.columns, check=is_first()) for sink in given]

    def put(self, step: StepRecord) -> None:
        """Give a sampled step that has ended to all sinks that still take rows."""
        if not self._outlets or not is_first():
            return
        row = self._rows.row(step, self._book.totals)
        for one in self._outlets:
            one.put(row)
            if one.said is not None:
                self._book.note_unseen(f"rows of the steps: {one.said}")
        self._outlets = [one for one in self._outlets if not one.closed]


def checked_sinks(given: Any) -> Sequence[Sink]:
    """Return the sinks as a list.

    Raises:
        TypeError: it is none.
    """
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        raise TypeError(f"sinks= takes a list of sinks, got {a_kind(given)}: put it into a list, sinks=[...]")
    return list(given)


def is_first() -> bool:
    """Return whether this process is the first of those that train together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")
