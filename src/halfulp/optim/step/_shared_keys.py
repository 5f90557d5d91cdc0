"""A warning of two optimizers of one training that draw the same random bits for other parameters, unasked.

Without names, random bits are keyed by position: a run can be repeated, and compared with its twin in the same process.
Two optimizers over unnamed parameters of one training, such as those of a GAN, thereby round by the same bits. Keys
that avoided those of living optimizers would depend on what else happens to live in the process; so keys stay, and
whoever shares them is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ...kernels import note_and_warn_once
from ..parameters._local_tensors import local, memory
from ._batch import Batch

# One of this library: Optimizer's own file imports this one.
Optimizer = Any
Key = tuple[int, int]  # seed, identity
_COMPARED = 4  # parameters by which twins are known
_MEETINGS = 2  # one alone may be two runs, one after the other


class _Record:
    """What is known of one optimizer that draws bits for unnamed parameters.

    Attributes:
        corners: the first elements of its first parameters before its first step, by key.
        meetings: how often it has stepped right after another one that draws from the same keys; 0 from when on that
            one is known to be its twin, or was told of.
    """

    __slots__ = ("corners", "meetings")

    def __init__(self, drawn: dict[Key, torch.Tensor]) -> None:
        self.corners = {key: _corner(drawn[key]) for key in sorted(drawn)[:_COMPARED]}
        self.meetings: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


class _Last:
    """The optimizer that stepped last, of those with records."""

    optimizer: weakref.ref | None = None


_records: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Record] = weakref.WeakKeyDictionary()


def warn_of_shared_keys(optimizer: Optimizer, batches: Iterable[Batch]) -> None:
    """Warn, before a step, of an optimizer that steps in turn with this one and draws the same bits, unless a twin.

    Twins are runs that are compared: their parameters are alike in shape and, now or before their first steps, in
    value.

    Args:
        optimizer: that is about to step.
        batches: of the step.
    """
    last = None if _Last.optimizer is None else _Last.optimizer()
    if last is optimizer or not any(batch.spec.draws for batch in batches):
        return
    record = _records.get(optimizer)
    if record is None:
        drawn = _drawn(optimizer)
        if not drawn:
            return
        _records[optimizer] = _Record(drawn)
    elif last is not None and record.meetings.get(last, 1):
        _meet(optimizer, record, last)
    _Last.optimizer = weakref.ref(optimizer)


def _meet(optimizer: Optimizer, record: _Record, last: Optimizer) -> None:
    """Judge two optimizers, one of which steps right after the other."""
    mine, theirs, other = _drawn(optimizer), _drawn(last), _records[last]
    shared = [key for key in sorted(mine.keys() & theirs.keys()) if not _is_same_memory(mine[key], theirs[key])]
    count = record.meetings.get(last, 0) + other.meetings.get(optimizer, 0) + 1
    if not shared or _are_twins([(mine[key], theirs[key]) for key in shared], _corners(shared, record, other)):
        record.meetings[last] = other.meetings[optimizer] = 0
        return
    if count < _MEETINGS:
        record.meetings[last] = count
        return
    record.meetings[last] = other.meetings[optimizer] = 0
    note_and_warn_once(
        "random bits",
        f"two optimizers ({type(last).__name__}, {type(optimizer).__name__}) of unnamed parameters step in turn under "
        f"seed={shared[0][0]}, and parameters at equal positions are rounded by the same random bits: make them from "
        "model.named_parameters() with other names, or give one of them another seed=; between runs that are only "
        "compared with each other that is no harm",
    )


def _drawn(optimizer: Optimizer) -> dict[Key, torch.Tensor]:
    """Return an optimizer's unnamed parameters that draw random bits, by what keys these."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in () if group.get("param_names") else group["params"]:
            plan = optimizer._plans.get(parameter)
            if plan is not None and plan.spec.draws:
                found[plan.seed, plan.identity] = parameter
    return found


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return memory(one).data_ptr() == memory(other).data_ptr()


def _corners(keys: list[Key], *records: _Record) -> list[tuple[torch.Tensor, ...]]:
    known = [key for key in keys[:_COMPARED] if all(key in record.corners for record in records)]
    return [tuple(record.corners[key] for record in records) for key in known]


def _are_twins(parameters: list[tuple[torch.Tensor, ...]], corners: list[tuple[torch.Tensor, ...]]) -> bool:
    """Return whether two runs are of one model: by its parameters' shapes and values, now or at their beginnings."""
    if any(one.shape != other.shape for one, other in parameters):
        return False
    now = [(_corner(one), _corner(other)) for one, other in parameters[:_COMPARED]]
    return any(bool(pairs) and all(_are_equal(*pair) for pair in pairs) for pairs in (corners, now))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) if one.device == other.device else torch.equal(one.cpu(), other.cpu())


def _corner(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter's first elements, where it lies: nothing waits for it."""
    part = memory(parameter).detach()
    return local(part)[(slice(0, 4),) * part.dim()].to(torch.float32, copy=True)
