"""Casts on the way back: how large gradients were that a cast to a narrow type made zeros of."""

from __future__ import annotations

from typing import Any

import torch

from .._notebook import Notebook, watching
from ._residuals import NARROW, graph_key

# Operations between a module's output and that of one around it, before the search is given up.
MOST_NODES = 512
CAST = "ToCopyBackward0"


class Casts:
    """Follows outputs in 16 bits all of whose gradients were zeros so far: whether a cast on the way back made them so.

    Autograd's graph, from the output of a module around, leads to the cast that took the output; what comes to it on
    the way back is what was there before rounding.
    """

    def __init__(self, book: Notebook) -> None:
        self.book = book
        self._wanted: dict[str, tuple[int, int]] = {}
        self._handles: list[Any] = []

    def forget(self) -> None:
        """Forget what belongs to one step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._wanted.clear()

    def note(self, name: str, output: Any) -> None:
        """Note that a module has run; modules inside it have been noted before."""
        if type(output) is not torch.Tensor or output.grad_fn is None:
            return
        if self._wanted and any(not name or wanted.startswith(f"{name}.") for wanted in self._wanted):
            self._search(name, output)
        if output.dtype in NARROW:
            totals = self.book.totals.get(("activation gradient", name))
            if totals is not None and totals.all_zero():
                self._wanted[name] = graph_key(output.grad_fn, output.output_nr)

    @watching
    def _search(self, name: str, output: torch.Tensor) -> None:
        """Look for the casts of wanted outputs among the operations that made an output around them."""
        wanted = {key: one for one, key in self._wanted.items() if not name or one.startswith(f"{name}.")}
        stack: list[Any] = [output.grad_fn]
        seen: set[int] = set()
        while stack and len(seen) < MOST_NODES:
            node = stack.pop()
            number = graph_key(node, 0)[0]
            if node is None or number in seen:
                continue
            seen.add(number)
            for before in node.next_functions:
                found = wanted.get(graph_key(*before))
                if found is None:
                    stack.append(before[0])
                    continue
                self._wanted.pop(found, None)
                if node.name() == CAST:
                    self._handles.append(node.register_prehook(_Cast(self.book, found)))


class _Cast:
    """Hook: a gradient comes to a cast."""

    def __init__(self, book: Notebook, name: str) -> None:
        self.book, self.name = book, name

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._measure(gradients[0])

    @watching
    def _measure(self, gradient: torch.Tensor | None) -> None:
        totals = self.book.totals.get(("activation gradient", self.name))
        if totals is not None and type(gradient) is torch.Tensor and gradient.numel():
            low, high = torch.aminmax(gradient)
            totals.record.before_cast = max(abs(float(low)), abs(float(high)))
