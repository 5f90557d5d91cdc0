"""Hooks on modules: activations as they are made, and the gradients that come back to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...sampling._plain import PLAIN_TYPES
from ...sampling._totals import LAST_AMAX
from .._expectations import Expectations
from .._notebook import Notebook, watching
from .._slot import TensorSlot
from ._casts import Casts
from ._checks import CompiledModules, Recomputations
from ._outputs import loss_in, tensors_in
from ._positions import Positions
from ._residuals import Residuals
from ._running_statistics import RunningStatistics

# Hooks on outputs whose graphs may be gone, before they are looked through.
MOST_HANDLES = 10_000


class ModuleHooks:
    """Watches the outputs of all modules of a model that run in eager mode.

    Args:
        book: what is written to.
        model: the model.
        expectations: told what autocast makes of outputs.
        check: whether compiled modules and modules that run again are compared with a second run.
    """

    def __init__(self, book: Notebook, model: nn.Module, expectations: Expectations, check: bool) -> None:
        self.book, self._expectations = book, expectations
        self.loss: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._gradient_handles: list[RemovableHandle] = []
        self._seen: set[str] = set()
        self._last: tuple[weakref.ref, int] | None = None
        compiled: dict[str, nn.Module] = {}
        names: dict[nn.Module, str] = {}
        for name, module in _eager_modules(model, compiled):
            names.setdefault(module, name)
        for name in compiled:
            book.missed(
                f"{name or 'the model'} is compiled: activations and their gradients inside it are not observed, as "
                "hooks run in eager mode only; observe the run without torch.compile to see them"
            )
        self.expects_calls: bool = bool(names) and not compiled
        self._statistics = RunningStatistics(book, names)
        self._residuals, self._positions, self._casts = Residuals(book), Positions(book), Casts(book)
        self._again = Recomputations(book) if check else None
        self._hooks = {
            module: _ModuleHook(self, name, type(module).__name__, check or self._statistics.follows(module))
            for module, name in names.items()
        }
        wrappers = {name: module for name, module in compiled.items() if hasattr(module, "_orig_mod")} if check else {}
        for name in compiled.keys() - wrappers.keys() if check else ():
            book.missed(f"{name or 'the model'} was compiled in place: there is no eager original to compare with")
        self._compiled = CompiledModules(book, wrappers)

    def attach(self) -> None:
        """Attach the hooks."""
        if not self._handles:
            self._handles = [module.register_forward_hook(hook) for module, hook in self._hooks.items()]
        self._compiled.attach()

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in (*self._handles, *self._gradient_handles):
            handle.remove()
        self._handles.clear()
        self._gradient_handles.clear()
        self._compiled.detach()

    def begin_step(self) -> None:
        """Take the running statistics as they are before a sampled step."""
        self._statistics.begin()

    def finish_step(self) -> None:
        """Compare them at the end of it."""
        self._statistics.end()

    def end_step(self) -> None:
        """Forget what belongs to one step."""
        for handle in self._gradient_handles:
            handle.remove()
        self._gradient_handles.clear()
        self._seen.clear()
        self._last = self.loss = None
        self.book.uses.forget()
        self._residuals.forget()
        self._casts.forget()
        if self._again is not None:
            self._again.end_step()

    def ran(self, hook: _ModuleHook, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A module has run; evaluation without gradients is not training and is left out."""
        if torch.is_grad_enabled():
            if torch._C._current_graph_task_id() == -1:  # what runs again in a backward pass was noted in the first run
                self.book.uses.note(hook.name, inputs, output)
                self._residuals.note(hook.name, inputs, output)
                self._casts.note(hook.name, output)
                self._positions.note(hook.name, output)
            if not self._quickly(hook, module, inputs, output):
                self._activations(hook, module, inputs, output)
        elif self._again is not None and module.training:  # the first pass of a reentrant checkpoint
            self._note(module, output)

    def _quickly(self, hook: _ModuleHook, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> bool:
        """Look at a single plain output in a forward pass where nothing else is followed; False elsewhere."""
        if type(output) is not torch.Tensor or hook.is_followed or torch._C._current_graph_task_id() != -1:
            return False
        if torch._C._is_any_autocast_enabled():
            return False
        if not self._was_last(output):
            if not hook.slot.look_quickly(output):
                return False
            totals = hook.slot.totals
            assert totals is not None
            if totals.reals[LAST_AMAX] == 0.0:
                self._watch_inputs(hook, module, inputs)
            else:
                totals.record.input_amax = totals.record.weight_amax = None
            self._follow(hook, output)
        self._seen.add(hook.name)
        if not hook.name:
            self.loss = loss_in(output)
        return True

    @watching
    def _activations(self, hook: _ModuleHook, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name = hook.name
        again = torch._C._current_graph_task_id() != -1 and name in self._seen
        found = list(tensors_in(output))
        self._statistics.follow(module, inputs)
        if self._again is not None and found:
            self._again.note(name, found[0], torch._C._current_graph_task_id() != -1)
        if not again:
            self._expectations.note_output(module, name, output)
            for tensor in found:
                if not self._was_last(tensor):
                    self._activation(hook, module, tensor, inputs)
            self._seen.add(name)
        if not name:
            self.loss = loss_in(output)

    @watching
    def _note(self, module: nn.Module, output: Any) -> None:
        for tensor in tensors_in(output):
            assert self._again is not None
            self._again.note(self._hooks[module].name, tensor, again=False)
            break

    def _activation(self, hook: _ModuleHook, module: nn.Module, tensor: torch.Tensor, inputs: tuple[Any, ...]) -> None:
        if hook.slot.look(tensor) is not None:
            self._note_inputs(hook, module, inputs)
            self._follow(hook, tensor)

    @watching
    def _watch_inputs(self, hook: _ModuleHook, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._note_inputs(hook, module, inputs)

    def _note_inputs(self, hook: _ModuleHook, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Of outputs that are all zeros note how large that is which a quantizer or rounding may have made zeros of."""
        totals = hook.slot.totals
        assert totals is not None
        record, zeros = totals.record, totals.reals[LAST_AMAX] == 0.0
        record.input_amax = max(map(_amax, tensors_in(inputs)), default=None) if zeros else None
        own = [one for one in module._parameters.values() if one is not None] if zeros else []
        record.weight_amax = max(map(_amax, tensors_in(own)), default=None)

    def _follow(self, hook: _ModuleHook, output: torch.Tensor) -> None:
        """Wait for the gradient of an output."""
        self._last = weakref.ref(output), output._version
        if output.requires_grad:
            handles = self._gradient_handles
            if len(handles) > MOST_HANDLES:  # many forward passes without an optimizer's step
                handles[:] = [handle for handle in handles if handle.hooks_dict_ref() is not None]
            handles.append(output.register_hook(hook.gradient))

    def _was_last(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one that was looked at last, handed on by a module around it."""
        last = self._last
        return last is not None and last[0]() is tensor and last[1] == tensor._version


class _ModuleHook:
    """Hook: a module has run.

    Attributes:
        name: the module's.
        slot: of its outputs.
        gradient: hook for their gradients.
        is_followed: whether running statistics or second runs of it are watched too.
    """

    __slots__ = ("gradient", "is_followed", "name", "owner", "slot")

    def __init__(self, owner: ModuleHooks, name: str, kind: str, is_followed: bool) -> None:
        self.owner, self.name, self.is_followed = owner, name, is_followed
        self.slot = TensorSlot(owner.book, "activation", name, kind)
        self.gradient = _GradientHook(owner.book, name, kind)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Look at its outputs."""
        if self.owner.book.sampling and not torch.compiler.is_compiling():
            self.owner.ran(self, module, inputs, output)


class _GradientHook:
    """Hook: the gradient of a module's output arrives."""

    __slots__ = ("book", "slot")

    def __init__(self, book: Notebook, name: str, kind: str) -> None:
        self.book = book
        self.slot = TensorSlot(book, "activation gradient", name, kind)

    def __call__(self, gradient: torch.Tensor) -> None:
        """Look at it."""
        if self.book.sampling and not self.slot.look_quickly(gradient, self.book.scale):
            self._activation_gradient(gradient)

    @watching
    def _activation_gradient(self, gradient: torch.Tensor) -> None:
        self.slot.look(gradient, self.book.scale)


def _amax(tensor: torch.Tensor) -> float:
    if type(tensor) not in PLAIN_TYPES or not tensor.numel():
        return 0.0
    values = tensor.detach()
    low, high = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)
    return max(abs(float(low)), abs(float(high)))


def _eager_modules(
    model: nn.Module, compiled: dict[str, nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are called in eager mode, by name, and note those that are compiled."""
    if is_compiled(model):
        compiled[prefix] = model
        return
    if type(model).forward is not nn.Module.forward:
        yield prefix, model
    for name, child in model.named_children():
        yield from _eager_modules(child, compiled, f"{prefix}.{name}" if prefix else name)


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile wraps a module, or was called on it in place."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
