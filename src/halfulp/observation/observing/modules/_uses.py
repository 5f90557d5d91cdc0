"""Which modules take an output: where its gradient comes from on the way back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

# Outputs of many forward passes without an optimizer's step, before those that are gone are looked for.
MOST_ALIVE = 10_000


class Uses:
    """Follows tensors by identity from the module that made them to those that take them; keeps none alive."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._takers: dict[str, dict[str, None]] = {}
        self._outermost: dict[str, str] = {}

    def forget(self) -> None:
        """Forget the tensors of a step; what was learned of names stays."""
        self._made.clear()

    def note(self, name: str, inputs: Iterable[Any], output: Any) -> None:
        """Note that a module has run; modules inside it have been noted before.

        Args:
            name: the module's.
            inputs: what it was given.
            output: what it returned, a tensor or a container of tensors.
        """
        made = self._made
        for one in inputs:
            known = made.get(id(one))
            # What hands its input on makes nothing of the gradient either.
            if known is not None and one is not output and known[0]() is one:
                self._takers.setdefault(known[1], {})[name] = None
        if isinstance(output, torch.Tensor):
            self._enter(name, output)
        elif isinstance(output, tuple | list | Mapping):
            for one in output.values() if isinstance(output, Mapping) else output:
                if isinstance(one, torch.Tensor):
                    self._enter(name, one)

    def _enter(self, name: str, tensor: torch.Tensor) -> None:
        made = self._made
        known = made.get(id(tensor))
        if known is not None and known[0]() is tensor:
            self._outermost[known[1]] = name
            return
        if len(made) > MOST_ALIVE:
            self._made = made = {key: pair for key, pair in made.items() if pair[0]() is not None}
        made[id(tensor)] = weakref.ref(tensor), name

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the innermost modules that took a module's output, else the one whose own code did, if any."""
        takers = self._takers.get(name, {})
        innermost = [one for one in takers if not any(_within(other, one) for other in takers)]
        if innermost:
            return tuple(innermost)
        outermost = self._outermost.get(name, name)
        return (outermost.rpartition(".")[0],) if outermost else ()


def _within(name: str, module: str) -> bool:
    """Return whether a module lies in another; "" is the whole model."""
    return name != module and (not module or name.startswith(f"{module}."))
