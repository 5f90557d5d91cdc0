"""Residual sums in narrow types: what a layer adds to a stream, and what of it the rounded sum takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ....kernels import in_float64
from ..._record import ResidualRecord
from .._notebook import Notebook
from ..updates._realised import add_changes

NARROW = (torch.bfloat16, torch.float16)
# A sum is looked at when a module takes it: between a layer's input and that lie some outputs and inputs of its own.
OUTPUTS, INPUTS = 3, 8
SAMPLE = 4096


@dataclass(slots=True)
class _Held:
    """A tensor that may be an addend: its place in autograd's graph, its numbers, and the module that made it."""

    key: tuple[int, int]
    values: torch.Tensor
    version: int
    name: str | None


class Residuals:
    """Finds sums of a module's output and a tensor that goes past it, and counts what rounding them takes away.

    Which tensors a sum adds is read from autograd's graph. Some outputs and inputs are held until later ones or the
    end of the step take their place.
    """

    def __init__(self, book: Notebook) -> None:
        self.book = book
        self._outputs: deque[_Held] = deque(maxlen=OUTPUTS)
        self._inputs: deque[_Held] = deque(maxlen=INPUTS)

    def forget(self) -> None:
        """Let go of a step's tensors."""
        self._outputs.clear()
        self._inputs.clear()

    def note(self, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        """Note that a module has run; modules inside it have been noted before."""
        first = inputs[0] if inputs else None
        if type(first) is torch.Tensor and first.dtype in NARROW and first.grad_fn is not None:
            self._enter(first, None)
        if type(output) is torch.Tensor and output.dtype in NARROW and output.grad_fn is not None:
            self._enter(output, name)

    def _enter(self, tensor: torch.Tensor, name: str | None) -> None:
        key = graph_key(tensor.grad_fn, tensor.output_nr)
        known = next((one for one in (*self._outputs, *self._inputs) if one.key == key), None)
        if known is None:
            self._look(tensor)
        if name is None:
            if known is None or known.name is not None:
                self._inputs.append(_Held(key, tensor.detach(), tensor._version, known.name if known else None))
        elif known is None:
            self._outputs.append(_Held(key, tensor.detach(), tensor._version, name))

    def _look(self, total: torch.Tensor) -> None:
        """Count what a sum took of its smaller addend, if it is one of two tensors that are known."""
        node: Any = total.grad_fn
        if not total.numel() or node.name() != "AddBackward0" or len(node.next_functions) != 2:
            return
        held = {one.key: one for one in (*self._inputs, *self._outputs)}
        parts = [held.get(graph_key(*pair)) for pair in node.next_functions]
        if parts[0] is None or parts[1] is None or parts[0] is parts[1]:
            return
        samples = []
        for one in parts:
            assert one is not None
            same = one.values.shape == total.shape and one.values.dtype is total.dtype
            if not same or one.values._version != one.version:
                return
            samples.append(_sample(one.values))
        sizes = [float(sample.square().mean().sqrt()) for sample in samples]
        small = sizes.index(min(sizes))
        added, past, name = samples[small], samples[1 - small], parts[small].name  # type: ignore[union-attr]
        if name is None:
            return
        record = self.book.record.residuals.setdefault(name, ResidualRecord(name, total.dtype))
        record.stream, record.added = sizes[1 - small], sizes[small]
        add_changes([record.change], past, _sample(total), added, [0, len(added)])


def graph_key(node: Any, number: int) -> tuple[int, int]:
    """What tells outputs of a graph's operations apart within a thread."""
    return (-1 if node is None else node._sequence_nr(), number)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some rows of a tensor at even distances."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.detach().reshape(1, 1)
    most = max(1, SAMPLE // max(1, rows.shape[1]))
    return in_float64(rows[:: max(1, -(-rows.shape[0] // most))][:most, :SAMPLE].reshape(-1)).cpu()
