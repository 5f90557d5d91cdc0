"""First steps: which optimizers over unnamed parameters are of one program, and draw other random bits than the others.

Without names a parameter's bits are keyed by its position, so that two optimizers would draw the same. What tells them
apart must be the same whenever the program runs again, in a notebook too: neither how many optimizers live nor how many
were made before, but which of them take their first steps while others wait for theirs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...scaled import ScaledTensor
from ...subclass.models._data_parallel import data_parallel_modules
from ._local_tensors import is_dtensor, memory

# How a parameter begins: its shape, and the sum of its float32 values' bits, which copies share; None for shards.
_Start = tuple[torch.Size, int | None]
# So many first steps are remembered while an optimizer waits, maybe for good.
_REMEMBERED = 1000
_clock = itertools.count()
# Optimizers that have not stepped yet, also those that nobody will step.
_waiting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_made: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
# Other threads make and step optimizers too.
_lock = threading.Lock()


@dataclass(frozen=True)
class _FirstStep:
    """The first step of an optimizer over unnamed parameters.

    Attributes:
        time: when it was made.
        backward: the backward pass that it was made in; -1 outside of one.
        seeds: of its groups.
        offset: what was added to the positions of its parameters.
        free: the next number that none of its parameters has.
        starts: how its parameters began, by position; empty where a file had stepped them before.
    """

    time: int
    backward: int
    seeds: frozenset[int]
    offset: int
    free: int
    starts: Mapping[int, _Start]


class _History(threading.local):
    """The first steps of a thread, for whose order another thread's count for nothing."""

    def __init__(self) -> None:
        self.steps: list[_FirstStep] = []


_history = _History()


def note_made(optimizer: torch.optim.Optimizer) -> None:
    """Record that an optimizer, or a copy of one, was made now."""
    with _lock:
        _made[optimizer] = next(_clock)
        _waiting.add(optimizer)


def part_from_others(optimizer: torch.optim.Optimizer) -> bool:
    """Give the unnamed parameters of an optimizer other identities than those of others of its program.

    It is called before an optimizer's first step. Of one program are those that were made before the first of them
    stepped, as a GAN's, or begin in one backward pass, as those that hooks step. In the order of their first steps they
    take the next free positions. Parameters that begin as another optimizer's do are copies, of a run that is compared
    with another: they draw the same. Replicas draw by position, whatever else steps on their process. One that has made
    a step, as in a file, keeps its identities.

    Returns:
        Whether identities were changed.
    """
    groups = _unnamed(optimizer)
    with _lock:
        _waiting.discard(optimizer)
        made = _made.pop(optimizer, None)
        is_awaited = bool(groups) and any(_unnamed(other) for other in _waiting)
    if not groups or made is None:  # the latter where its first step has raised
        return False
    backward, seeds = torch._C._current_graph_task_id(), frozenset(group["seed"] for group in groups)
    is_begun = any(isinstance(state, dict) and state.get("step") for state in optimizer.state.values())
    steps = _history.steps
    last = steps[-1] if steps and steps[-1].backward == backward >= 0 else None
    company = [one for one in steps if one.time > made and one.seeds & seeds]
    # A pass over all parameters, where there are others to compare with.
    starts = _starts(groups) if not is_begun and (is_awaited or company) else {}
    offset = 0
    if not is_begun and last is not None:
        offset = last.free
    elif not is_begun and company:
        copied = next((one for one in company if _are_copies(starts, one.starts)), None)
        offset = max(one.free for one in company) if copied is None else copied.offset
        offset = 0 if offset and _has_replicas(groups) else offset
    free = offset + 1 + max((identity for group in groups for identity in group["identities"]), default=-1)
    # Who is made from now on is of another program: without others that wait, only this backward pass counts.
    kept = steps[-_REMEMBERED:] if is_awaited else []
    _history.steps = [*kept, _FirstStep(next(_clock), backward, seeds, offset, free, starts)]
    for group in groups if offset else ():
        group["identities"] = [offset + identity for identity in group["identities"]]
    return offset > 0


def _unnamed(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups whose parameters have no names; none of an optimizer that could not be made."""
    return [group for group in getattr(optimizer, "param_groups", ()) if not group.get("param_names")]


def _are_copies(starts: Mapping[int, _Start], others: Mapping[int, _Start]) -> bool:
    """Whether parameters begin as those of an optimizer that has the same ones, or more or fewer."""
    shared = starts.keys() & others.keys()
    is_part = len(shared) in (len(starts), len(others))
    return bool(shared) and is_part and all(_is_same(starts[one], others[one]) for one in shared)


def _is_same(start: _Start, other: _Start) -> bool:
    """Whether two parameters begin alike, as far as is known of shards."""
    is_known = start[1] is not None and other[1] is not None
    return start[0] == other[0] and (not is_known or start[1] == other[1])


def _has_replicas(groups: list[dict[str, Any]]) -> bool:
    """Whether DistributedDataParallel holds a parameter: other optimizers may step on one process alone."""
    held = {id(one) for module in data_parallel_modules() for one in module.parameters()}
    return any(id(parameter) in held for group in groups for parameter in group["params"])


@torch.no_grad()
def _starts(groups: list[dict[str, Any]]) -> dict[int, _Start]:
    """Return how the parameters of groups begin, by their identities."""
    pairs = [pair for group in groups for pair in zip(group["identities"], group["params"])]
    return {identity: _start(parameter) for identity, parameter in pairs}


def _start(parameter: torch.Tensor) -> _Start:
    """Return how a parameter begins, the same of tensors of other kinds and dtypes that hold the same values.

    Shards tell by their whole shape alone, as all processes must find the same.
    """
    if is_dtensor(parameter):
        return parameter.shape, None
    value = parameter.decode(torch.float32) if isinstance(parameter, ScaledTensor) else memory(parameter)
    words = value.detach().to(torch.float32).contiguous().view(torch.int32)
    return parameter.shape, int(words.sum(dtype=torch.int64))
