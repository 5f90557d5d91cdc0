"""The states of all random generators that a forward pass may draw from: held, compared, put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

_Source = tuple[Callable[[], Any], Callable[[Any], Any]]


class RandomState:
    """The states of torch's generators on every device, and of Python's and numpy's, when this was made."""

    def __init__(self) -> None:
        self._saved_states = [(read, write, read()) for read, write in _sources()]

    def is_current(self) -> bool:
        """Return whether nothing was drawn since."""
        return all(_same(read(), value) for read, _, value in self._saved_states)

    def put_back(self) -> None:
        """Set the generators to these states."""
        for read, write, value in self._saved_states:
            if not _same(read(), value):
                write(value)


def own_state(generator: Any) -> Any:
    """Return the state of a generator object, such as a module keeps; None of anything else."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else None


def same_states(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether two lists of `own_state` are equal."""
    return _same(list(one), list(other))


def _sources() -> list[_Source]:
    found: list[_Source] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (lambda: np.random.get_state(legacy=False), np.random.set_state),
    ]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return found
    device = torch.get_device_module(accelerator)
    # A state asked of a device that nothing has used yet would start it.
    if getattr(device, "is_initialized", lambda: True)():
        every = hasattr(device, "get_rng_state_all")
        names = ("get_rng_state_all", "set_rng_state_all") if every else ("get_rng_state", "set_rng_state")
        if all(hasattr(device, name) for name in names):
            found.append((getattr(device, names[0]), getattr(device, names[1])))
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
