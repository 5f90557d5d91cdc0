"""A tensor of a checkpoint that is read when it is asked for, whole from mapped memory or by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        dtype, shape: of the tensor.
        read: the whole tensor, or the rows of a slice of its first dimension.
        mapped: whether reading it whole takes no memory beyond the file's pages.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slice | None], Tensor]
    mapped: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def rows(self, most: int) -> Iterator[slice | None]:
        """Yield slices of the first dimension with at most `most` elements each, at least a row; None: all at once."""
        if not self.shape or self.numel <= most:
            yield None
            return
        step = max(1, most // max(1, self.numel // self.shape[0]))
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


def of_tensor(tensor: Tensor, mapped: bool = True) -> Stored:
    """Return a tensor that is in memory, or mapped, already."""
    tensor = tensor.detach()

    def read(rows: slice | None) -> Tensor:
        return tensor if rows is None else tensor[rows]

    return Stored(tensor.dtype, tuple(tensor.shape), read, mapped)


@dataclass(slots=True)
class OptimizerStates:
    """What an optimizer saved.

    Attributes:
        state: by the parameter's number, or name: tensors and numbers by their name.
        groups: options of each param group; "params" are numbers or names, "param_names" names if there are any.
    """

    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        path: as it was given.
        tensors: of the model, by qualified name.
        ordered: whether their order is that of the model, and not an alphabet's.
        optimizers: states of each optimizer.
        contract: the precision contract saved with it, None without one.
        unseen: sentences that say what could not be read, and why.
        config: the model's config of transformers beside it, None without one.
    """

    path: str
    tensors: dict[str, Stored]
    ordered: bool = True
    optimizers: list[OptimizerStates] = field(default_factory=list)
    contract: dict[str, Any] | None = None
    unseen: list[str] = field(default_factory=list)
    config: Path | None = None
