"""Weights, optimizer states and options of a checkpoint on disk; its tensors stay mapped files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._messages import listed
from ..checkpoints._open import open_checkpoint
from ..checkpoints._state_names import named_states
from ..checkpoints._stored import OptimizerStates, Stored
from ._inputs import average_prefixes


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    Attributes:
        weights: named tensors.
        states: the optimizer's, by parameter name.
        options: of each parameter's group, by parameter name.
        unseen: sentences that say what could not be read.
        all_stepped: names of all parameters that the checkpoint's optimizers step; None where that is not known.
    """

    weights: list[tuple[str, Tensor]]
    states: dict[str, Mapping[str, Any]]
    options: dict[str, Mapping[str, Any]]
    unseen: tuple[str, ...]
    all_stepped: frozenset[str] | None = None

    def trained(self) -> tuple[list[tuple[str, Tensor]], str | None]:
        """Return the weights that a training goes on with, and a sentence on those that it does not step.

        Averages of the weights, and what no optimizer of the checkpoint holds, stand still because nothing steps them.
        """
        averages = average_prefixes(name for name, _ in self.weights)
        kept: list[tuple[str, Tensor]] = []
        left: list[tuple[str, Tensor]] = []
        for name, tensor in self.weights:
            stepped = self.all_stepped is None or name in self.all_stepped
            apart = not stepped or (self.all_stepped is None and name.startswith(averages))
            (left if apart else kept).append((name, tensor))
        if not left or not kept:
            return self.weights, None
        why = "averages of the weights" if self.all_stepped is None else "in no optimizer of the checkpoint"
        return kept, f"{listed([name for name, _ in left])} are {why}: left out"

    @property
    def has_rates(self) -> bool:
        """Whether an optimizer with learning rates is saved beside the weights."""
        return bool(self.options) and all("lr" in options for options in self.options.values())


def read_checkpoint(path: str | Path) -> Saved:
    """Open a checkpoint of any known layout; nothing that it holds is executed.

    Raises:
        ValueError: it is no checkpoint, truncated, or not plain data.
    """
    opened = open_checkpoint(path)
    unseen = list(opened.unseen)
    states = named_states(opened, unseen)
    return Saved(
        [(name, stored.read(None)) for name, stored in opened.tensors.items()],
        {
            name: {**state.values, **{key: _tensor(value) for key, value in state.tensors.items()}}
            for name, state in states.items()
        },
        {name: state.options for name, state in states.items()},
        tuple(unseen),
        frozenset(states) if states and len(states) == sum(map(_members, opened.optimizers)) else None,
    )


def _members(optimizer: OptimizerStates) -> int:
    return sum(len(group.get("params") or ()) for group in optimizer.groups)


def _tensor(value: Any) -> Tensor:
    found = value.read(None) if isinstance(value, Stored) else value
    assert isinstance(found, Tensor), "states of a checkpoint are tensors"
    return found
