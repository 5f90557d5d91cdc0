"""Hooks on modules: activations as they are made, and the gradients that come back to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...sampling._totals import LAST_AMAX
from .._expectations import Expectations
from .._notebook import Notebook, watching
from ._checks import CompiledModules, Recomputations
from ._outputs import loss_in, tensors_in
from ._running_statistics import RunningStatistics


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
        self._modules: dict[nn.Module, tuple[str, str]] = {}
        self._seen: set[str] = set()
        self._last: tuple[weakref.ref, int, float] | None = None
        compiled: dict[str, nn.Module] = {}
        for name, module in _eager_modules(model, compiled):
            self._modules.setdefault(module, (name, type(module).__name__))
        for name in compiled:
            book.missed(
                f"{name or 'the model'} is compiled: activations and their gradients inside it are not observed, as "
                "hooks run in eager mode only; observe the run without torch.compile to see them"
            )
        self.expects_calls: bool = bool(self._modules) and not compiled
        self._statistics = RunningStatistics(book, {module: name for module, (name, _) in self._modules.items()})
        self._again = Recomputations(book) if check else None
        wrappers = {name: module for name, module in compiled.items() if hasattr(module, "_orig_mod")} if check else {}
        for name in compiled.keys() - wrappers.keys() if check else ():
            book.missed(f"{name or 'the model'} was compiled in place: there is no eager original to compare with")
        self._compiled = CompiledModules(book, wrappers)

    def attach(self) -> None:
        """Attach the hooks."""
        if not self._handles:
            self._handles = [module.register_forward_hook(self._forward) for module in self._modules]
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
        if self._again is not None:
            self._again.end_step()

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Hook: a module has run; evaluation without gradients is not training and is left out."""
        if torch.compiler.is_compiling() or not self.book.sampling:
            return
        if torch.is_grad_enabled():
            self._activations(module, inputs, output)
        elif self._again is not None and module.training:  # the first pass of a reentrant checkpoint
            self._note(module, output)

    @watching
    def _activations(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name, kind = self._modules[module]
        again = torch._C._current_graph_task_id() != -1 and name in self._seen
        found = list(tensors_in(output))
        self._statistics.follow(module, inputs)
        if self._again is not None and found:
            self._again.note(name, found[0], torch._C._current_graph_task_id() != -1)
        if not again:
            self._expectations.note_output(module, name, output)
            amax = [self._amax(tensor) for tensor in tensors_in(inputs)]
            for tensor in found:
                if not self._was_last(tensor):
                    self._activation(name, kind, tensor, max(amax, default=None))
            self._seen.add(name)
        if not name:
            self.loss = loss_in(output)

    @watching
    def _note(self, module: nn.Module, output: Any) -> None:
        for tensor in tensors_in(output):
            assert self._again is not None
            self._again.note(self._modules[module][0], tensor, again=False)
            break

    def _activation(self, name: str, kind: str, tensor: torch.Tensor, input_amax: float | None) -> None:
        totals = self.book.look("activation", name, kind, tensor)
        if totals is None:
            return
        totals.record.input_amax = input_amax
        self._last = weakref.ref(tensor), tensor._version, float(totals.reals[LAST_AMAX])
        if tensor.requires_grad:
            hook = _GradientHook(self.book, name, kind)
            self._gradient_handles.append(tensor.register_hook(hook))

    def _was_last(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one that was looked at last, handed on by a module around it."""
        last = self._last
        return last is not None and last[0]() is tensor and last[1] == tensor._version

    def _amax(self, tensor: torch.Tensor) -> float:
        if self._was_last(tensor):
            assert self._last is not None
            return self._last[2]
        if type(tensor) is not torch.Tensor or not tensor.numel():
            return 0.0
        low, high = torch.aminmax(tensor.detach())
        return max(abs(float(low)), abs(float(high)))


class _GradientHook:
    """Hook: the gradient of a module's output arrives."""

    __slots__ = ("book", "kind", "name")

    def __init__(self, book: Notebook, name: str, kind: str) -> None:
        self.book, self.name, self.kind = book, name, kind

    def __call__(self, gradient: torch.Tensor) -> None:
        """Look at it."""
        if self.book.sampling:
            self._activation_gradient(gradient)

    @watching
    def _activation_gradient(self, gradient: torch.Tensor) -> None:
        self.book.look("activation gradient", self.name, self.kind, gradient, self.book.scale)


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
