"""Second runs, made where `check=True` asks for them: compiled beside eager, and checkpointed modules run again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...record._record import Difference
from ...sampling._plain import stored
from ...sampling._sampler import sampled
from .._notebook import Notebook, watching
from ._outputs import tensors_in

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def difference(name: str, first: torch.Tensor, second: torch.Tensor) -> Difference:
    """Return how two outputs of a module differ; NaN where the other has NaN counts as equal."""
    a, b = first.detach().double().cpu().reshape(-1), second.detach().double().cpu().reshape(-1)
    dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in (first, second))
    if len(a) != len(b):
        return Difference(name, (dtypes[0], dtypes[1]), 1.0, float("inf"))
    differing = (a != b) & ~(a.isnan() & b.isnan())
    share = float(differing.double().mean()) if len(a) else 0.0
    size, gap = float(a.square().mean().sqrt()) if len(a) else 0.0, torch.where(differing, b - a, 0.0)
    distance = float(gap.square().mean().sqrt()) if len(a) else 0.0
    return Difference(name, (dtypes[0], dtypes[1]), share, distance / size if size else distance and float("inf"))


class Recomputations:
    """Compares what a module gives when its forward pass runs again in the backward pass, as under checkpointing."""

    def __init__(self, book: Notebook) -> None:
        self.book = book
        self._first: dict[str, tuple[torch.dtype, torch.Tensor] | None] = {}

    def end_step(self) -> None:
        """Forget one step's outputs."""
        self._first.clear()

    def note(self, name: str, output: torch.Tensor, again: bool) -> None:
        """Keep a sample of a first output, or compare a second one with it; modules called twice are left out."""
        found = stored(output)
        if found is None:
            return
        sample = sampled(found.flat, self.book.key(name))
        if not again:
            self._first[name] = None if name in self._first else (found.dtype, sample)
            return
        first = self._first.get(name)
        if first is None:
            return
        self._first[name] = None
        made = difference(name, first[1], sample)
        names = (str(first[0]).removeprefix("torch."), str(found.dtype).removeprefix("torch."))
        records = self.book.record.recomputed
        records[:] = [one for one in records if one.name != name]
        records.append(Difference(name, names, made.differing, made.relative))


class CompiledModules:
    """Runs the eager original of compiled modules on the same inputs, once in a sampled step.

    Args:
        book: what is written to.
        modules: compiled modules that wrap an original, by name.
    """

    def __init__(self, book: Notebook, modules: dict[str, nn.Module]) -> None:
        self.book, self._modules = book, modules
        self._inputs: dict[str, tuple[Any, Any, dict[str, torch.Tensor]]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in list(modules.items()):
            if any(isinstance(one, _DROPOUTS) and one.p > 0 for one in module.modules()):
                book.missed(f"{name or 'the model'}: compiled and eager draw other dropout bits, and are not compared")
                del modules[name]

    def attach(self) -> None:
        """Attach the hooks around compiled modules, which run outside of what was compiled."""
        if self._handles:
            return
        for name, module in self._modules.items():
            before, after = _Around(self, name).hooks()
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inputs.clear()

    def hold(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Copy inputs and buffers before a compiled module runs."""
        with torch.no_grad():
            given = copy.deepcopy(_detached(args)), copy.deepcopy(_detached(kwargs))
            buffers = {key: value.detach().clone() for key, value in module.named_buffers()}
        self._inputs[name] = (*given, buffers)

    def compare(self, name: str, module: nn.Module, output: Any) -> None:
        """Run the original as it was then, and put back what the run changes."""
        if name not in self._inputs:
            return
        args, kwargs, buffers = self._inputs.pop(name)
        original: Any = module._orig_mod
        now = {key: value.detach().clone() for key, value in module.named_buffers()}
        state = torch.get_rng_state()
        try:
            _write_buffers(module, buffers)
            eager = original(*args, **kwargs)
        finally:
            _write_buffers(module, now)
            torch.set_rng_state(state)
        records = self.book.record.compiled
        for a, b in zip(tensors_in(eager), tensors_in(output)):
            records[:] = [one for one in records if one.name != name]
            records.append(difference(name, a, b))
            break


class _Around:
    """The two hooks of one compiled module."""

    def __init__(self, owner: CompiledModules, name: str) -> None:
        self.owner, self.book, self.name = owner, owner.book, name

    def hooks(self) -> tuple[Any, Any]:
        return self._before, self._after

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.book.sampling and torch.is_grad_enabled() and self.name not in self.owner._inputs:
            self._hold(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._compare(module, output)

    @watching
    def _hold(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.owner.hold(self.name, module, args, kwargs)

    @watching
    def _compare(self, module: nn.Module, output: Any) -> None:
        self.owner.compare(self.name, module, output)


def _write_buffers(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for key, buffer in module.named_buffers():
        buffer.data.copy_(values[key])


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return (
            type(value)(map(_detached, value)) if not hasattr(value, "_fields") else type(value)(*map(_detached, value))
        )
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value
