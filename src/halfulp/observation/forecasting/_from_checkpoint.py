"""Weights, optimizer states and options of a checkpoint on disk; its tensors stay mapped files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoints._open import open_checkpoint
from ..checkpoints._state_names import named_states
from ..checkpoints._stored import Stored


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    Attributes:
        weights: named tensors.
        states: the optimizer's, by parameter name.
        options: of each parameter's group, by parameter name.
        unseen: sentences that say what could not be read.
    """

    weights: list[tuple[str, Tensor]]
    states: dict[str, Mapping[str, Any]]
    options: dict[str, Mapping[str, Any]]
    unseen: tuple[str, ...]

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
    )


def _tensor(value: Any) -> Tensor:
    found = value.read(None) if isinstance(value, Stored) else value
    assert isinstance(found, Tensor), "states of a checkpoint are tensors"
    return found
