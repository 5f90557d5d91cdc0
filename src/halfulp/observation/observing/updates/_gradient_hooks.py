"""Hooks on parameters: the gradient that arrives, and what adding it to one that is there leaves of it."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from ...record._record import Realised
from ...sampling._plain import stored
from ...sampling._sampler import sampled
from .._notebook import Notebook, watching
from ._realised import add_changes


class GradientHooks:
    """Watches gradients as backward passes hand them to parameters.

    Args:
        book: what is written to; its record has the parameters.
        named: trainable parameters and their names.
    """

    def __init__(self, book: Notebook, named: list[tuple[str, torch.Tensor]]) -> None:
        self.book = book
        self.arrived: set[str] = set()
        self._hooks = [(parameter, _Arrival(self, name)) for name, parameter in named]
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Attach the hooks."""
        for parameter, hook in self._hooks if not self._handles else ():
            if parameter.requires_grad and parameter.is_leaf:
                hook.parameter = parameter
                self._handles.append(parameter.register_hook(hook.before))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook.after))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self) -> None:
        """Forget what belongs to one step."""
        self.arrived.clear()


class _Arrival:
    """The two hooks of one parameter."""

    __slots__ = ("book", "held", "incoming", "name", "owner", "parameter")

    def __init__(self, owner: GradientHooks, name: str) -> None:
        self.owner, self.book, self.name = owner, owner.book, name
        self.parameter: torch.Tensor | None = None
        self.held: torch.Tensor | None = None
        self.incoming: torch.Tensor | None = None

    def before(self, gradient: torch.Tensor) -> None:
        """Hook: a gradient arrives, before it is added."""
        if self.book.sampling:
            self._weight_gradient(gradient)

    def after(self, parameter: torch.Tensor) -> None:
        """Hook: it has been added."""
        if self.held is not None:
            self._accumulated(parameter)

    @watching
    def _weight_gradient(self, gradient: torch.Tensor) -> None:
        book, name = self.book, self.name
        self.held = self.incoming = None
        if book.look("weight gradient", name, book.record.parameters[name].kind, gradient, book.scale) is None:
            return
        self.owner.arrived.add(name)
        there = self.parameter.grad if self.parameter is not None else None
        if there is None:
            return
        held, incoming = stored(there), stored(gradient)
        if held is not None and incoming is not None and held.flat.numel() == incoming.flat.numel():
            key = book.key(name)
            self.held = sampled(held.flat, key)
            self.incoming = sampled(incoming.flat, key)

    @watching
    def _accumulated(self, parameter: torch.Tensor) -> None:
        held, incoming, self.held, self.incoming = self.held, self.incoming, None, None
        found = stored(parameter.grad) if parameter.grad is not None else None
        # Zeros that `zero_grad(set_to_none=False)` left swallow nothing.
        if found is None or held is None or incoming is None or not held.any():
            return
        now = sampled(found.flat, self.book.key(self.name))
        record = self.book.record.parameters[self.name]
        if record.accumulation is None:
            record.accumulation = Realised()
        add_changes([record.accumulation], held, now, incoming, [len(held)])
