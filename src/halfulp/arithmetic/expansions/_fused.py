"""A function of a few values per element as one kernel over tensors that are already there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .._error_free import Terms
from ._pointwise import Elements


@dataclass(frozen=True)
class Fused:
    """A compiled kernel for one function of a few values per element.

    Attributes:
        name: for the cache of machine code.
        function: as many values as there are inputs -> as many terms as there are outputs.
        arithmetic: the type it computes in.
        inputs: dtypes in memory.
        outputs: dtypes in memory.
    """

    name: str
    function: Callable[..., Terms]
    arithmetic: torch.dtype
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Fill `outputs` (contiguous, of one shape; they may be inputs too) from inputs that broadcast to them."""
        written = tuple(outputs)
        if written[0].numel() and not self._elements.fill(inputs, written):
            for target, term in zip(written, self._elements.evaluate(inputs), strict=True):
                target.copy_(term)

    @cached_property
    def _elements(self) -> Elements:
        return Elements(self.name, self.function, self.arithmetic, self.inputs, self.outputs)
