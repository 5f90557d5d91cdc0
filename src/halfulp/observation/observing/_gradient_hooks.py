"""Hooks on parameters: the gradient that arrives, and what adding it to one that is there leaves of it."""

from __future__ import annotations

import math

import torch
from torch.utils.hooks import RemovableHandle

from ...kernels import in_float64
from .._record import Realised
from ..sampling._sample_places import stored
from ..sampling._sampler import sampled
from ._batch import add_changes
from ._notebook import Notebook, TensorSlot, watching


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
        self._adding: list[_Arrival] = []
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Attach the hooks."""
        for parameter, hook in self._hooks if not self._handles else ():
            if parameter.requires_grad and parameter.is_leaf:
                hook.parameter, hook.is_followed = parameter, False
                self._handles.append(parameter.register_hook(hook.before))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def follow(self, hook: _Arrival) -> None:
        """Let a parameter's second hook run from now on: only gradients that are added to others need it."""
        if not hook.is_followed and hook.parameter is not None:
            hook.is_followed = True
            self._handles.append(hook.parameter.register_post_accumulate_grad_hook(hook.after))

    def end_step(self) -> None:
        """Compare the step's sums with the exact ones, and forget what belongs to one step."""
        for hook in self._adding:
            hook.compare_sums()
        self._adding.clear()
        self.arrived.clear()

    def adds(self, hook: _Arrival) -> None:
        """Note that a parameter's gradient is a sum in this step."""
        self._adding.append(hook)


class _Arrival:
    """The two hooks of one parameter."""

    __slots__ = (
        "accumulated",
        "book",
        "errors",
        "exact",
        "incoming",
        "is_followed",
        "name",
        "owner",
        "parameter",
        "rounded",
        "slot",
        "squares",
    )

    def __init__(self, owner: GradientHooks, name: str) -> None:
        self.owner, self.book, self.name = owner, owner.book, name
        self.slot = TensorSlot(owner.book, "weight gradient", name, owner.book.record.parameters[name].kind)
        self.parameter: torch.Tensor | None = None
        self.is_followed: bool = False
        self.accumulated: torch.Tensor | None = None
        self.incoming: torch.Tensor | None = None
        self.exact: torch.Tensor | None = None
        self.rounded: torch.Tensor | None = None
        self.errors: float = 0.0
        self.squares: float = 0.0

    def before(self, gradient: torch.Tensor) -> None:
        """Hook: a gradient arrives, before it is added."""
        if self.book.sampling:
            if self.slot.look_quickly(gradient, self.book.scale):
                self.owner.arrived.add(self.name)
            else:
                self._look(gradient)
            self.accumulated = self.incoming = None
            if self.parameter is not None and self.parameter.grad is not None:
                self._hold(self.parameter.grad, gradient)

    def after(self, parameter: torch.Tensor) -> None:
        """Hook: it has been added."""
        if self.accumulated is not None:
            self._accumulated(parameter)

    @watching
    def _look(self, gradient: torch.Tensor) -> None:
        if self.slot.look(gradient, self.book.scale) is not None:
            self.owner.arrived.add(self.name)

    @watching
    def _hold(self, there: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep samples of what is there and of what is added to it."""
        held, incoming = stored(there), stored(gradient)
        if held is not None and incoming is not None and held.flat.numel() == incoming.flat.numel():
            key = self.book.key(self.name)
            self.accumulated, self.incoming = sampled(held.flat, key), sampled(incoming.flat, key)
            self.owner.follow(self)

    @watching
    def _accumulated(self, parameter: torch.Tensor) -> None:
        held, incoming, self.accumulated, self.incoming = self.accumulated, self.incoming, None, None
        found = stored(parameter.grad) if parameter.grad is not None else None
        # Zeros that `zero_grad(set_to_none=False)` left swallow nothing.
        if found is None or held is None or incoming is None or not held.any():
            return
        now = sampled(found.flat, self.book.key(self.name))
        record = self.book.record.parameters[self.name]
        if record.accumulation is None:
            record.accumulation = Realised()
        add_changes([record.accumulation], held, now, incoming)
        if self.exact is None:
            self.owner.adds(self)
        # What somebody cleared, clipped or scaled since the last addition is where the exact sum begins anew.
        if self.exact is None or self.rounded is None or not torch.equal(held, self.rounded):
            self.exact = in_float64(held)
        self.exact += in_float64(incoming)
        self.rounded = now

    def compare_sums(self) -> None:
        """Add what rounding made of this step's sum to the record."""
        exact, rounded, self.exact, self.rounded = self.exact, self.rounded, None, None
        if exact is None or rounded is None or len(exact) != len(rounded):
            return
        error, square = (float(one.square().sum()) for one in (in_float64(rounded) - exact, exact))
        if math.isfinite(error) and math.isfinite(square):
            self.errors, self.squares = self.errors + error, self.squares + square
        if self.squares:
            self.book.record.parameters[self.name].accumulation_error = math.sqrt(self.errors / self.squares)
