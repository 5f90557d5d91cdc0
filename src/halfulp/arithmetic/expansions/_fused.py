"""A function of a few values per element as one kernel over tensors that are already there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...kernels import compile_trace, record, select_engine
from .._error_free import Terms
from ._pointwise import fill


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
        if not outputs[0].numel():
            return
        if select_engine(outputs[0].device.type) == "numba":
            fill(self._kernel, inputs, tuple(outputs))
            return
        terms = self.function(*(part.to(self.arithmetic) for part in inputs))
        for target, term in zip(outputs, terms, strict=True):
            target.copy_(term)

    @cached_property
    def _kernel(self) -> Callable:
        trace, results = record(self.function, self.arithmetic, len(self.inputs))
        numbers = [trace.emit("add", (r, 0.0)).number if not hasattr(r, "number") else r.number for r in results]
        return compile_trace(self.name, trace, numbers, self.inputs, self.outputs)
