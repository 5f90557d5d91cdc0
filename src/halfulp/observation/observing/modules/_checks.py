"""Second runs, made where `check=True` asks for them: compiled beside eager, and checkpointed modules run again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ....kernels import in_float64
from ..._record import Difference
from ...findings._comparisons import explained_by_order
from ...sampling._plain import stored
from ...sampling._sampler import sampled
from .._notebook import Notebook, watching
from ._outputs import tensors_in
from ._second_run import SecondRun, why_never

_AT_ONCE = 1 << 22


def difference(name: str, first: torch.Tensor, second: torch.Tensor) -> Difference:
    """Return how two outputs of a module differ; NaN where the other has NaN counts as equal."""
    names = str(first.dtype).removeprefix("torch."), str(second.dtype).removeprefix("torch.")
    a, b = _flat(first), _flat(second)
    if len(a) != len(b):
        return Difference(name, names, 1.0, float("inf"))
    count, broken, squares, gaps = 0, False, 0.0, 0.0
    for one, other in zip(a.split(_AT_ONCE), b.split(_AT_ONCE)):
        x, y = one.cpu().double(), other.cpu().double()
        differing = (x != y) & ~(x.isnan() & y.isnan())
        finite = x.isfinite() & y.isfinite()
        count += int(differing.sum())
        broken |= bool((differing & ~finite).any())
        squares += float(x[finite].square().sum())
        gaps += float((y - x)[finite].square().sum())
    distance = float("inf") if broken else math.sqrt(gaps / squares) if squares else gaps and float("inf")
    return Difference(name, names, count / max(1, len(a)), distance)


def enter(records: list[Difference], made: Difference) -> None:
    """Keep the larger difference of each module."""
    there = next((k for k, one in enumerate(records) if one.name == made.name), None)
    if there is None:
        records.append(made)
    elif _badness(made) > _badness(records[there]):
        records[there] = made


def _badness(one: Difference) -> tuple[bool, float, float]:
    return one.dtypes[0] != one.dtypes[1], one.relative, one.differing


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    found = stored(tensor)
    if found is None:
        return tensor.detach().to_dense().reshape(-1)
    flat = found.flat.reshape(-1)
    return flat if found.scale == 1.0 else in_float64(flat) * found.scale


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
        enter(self.book.record.recomputed, Difference(name, names, made.differing, made.relative))


class CompiledModules:
    """Runs the eager original of compiled modules on the same inputs, once in a sampled step.

    Nothing that training computes takes notice of it: inputs, buffers and attributes are copies, the states of random
    generators are put back, hooks and caches are left out. There is no verdict where random numbers are drawn, which
    compiled code draws in another order, and where two eager runs differ from each other.

    Args:
        book: what is written to.
        modules: compiled modules that wrap an original, by name.
    """

    def __init__(self, book: Notebook, modules: dict[str, nn.Module]) -> None:
        self.book, self._modules = book, modules
        self._second_runs: dict[str, SecondRun] = {}
        self._compared: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Attach the hooks around compiled modules, which run outside of what was compiled."""
        if self._handles:
            return
        for name, module in self._modules.items():
            before, after = _Around(self, name).hooks()
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # Before hooks of the user's that change outputs, and also where the forward pass raises.
            self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._second_runs.clear()

    def is_due(self, name: str) -> bool:
        """Return whether a module is to be compared at its next run."""
        return self.book.sampling and name in self._modules and self._compared.get(name) != self.book.step

    def forget(self, name: str) -> None:
        """Forget the inputs of a run that did not end."""
        self._second_runs.pop(name, None)

    def hold(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Copy what the original depends on, before the compiled module runs."""
        original: Any = module._orig_mod
        reason = why_never(original)
        try:
            if reason is None:
                self._second_runs[name] = SecondRun(original, args, kwargs)
        except Exception as error:
            reason = f"its inputs or attributes cannot be copied ({type(error).__name__})"
        if reason:
            self._give_up(name, reason)

    def compare(self, name: str, output: Any) -> None:
        """Run the original as it was then."""
        second = self._second_runs.pop(name, None)
        if second is None or output is None:
            return
        self._compared[name] = self.book.step
        reason = second.why_not()
        eager = None if reason else second.run()
        reason = reason or second.why_not()
        if reason:
            self._give_up(name, reason)
            return
        made = _largest_difference(name, eager, output)
        if made is None:
            return
        if made.differing and not explained_by_order(made):
            again = _largest_difference(name, eager, second.run())
            if again is None or again.differing:
                self._give_up(name, "two eager runs on the same inputs differ from each other")
                return
            if second.hooks_left_out:
                self._give_up(name, "they differ, and hooks on its modules, which do not run a second time, may be why")
                return
        enter(self.book.record.compiled, made)

    def _give_up(self, name: str, reason: str) -> None:
        self.book.missed(f"{name or 'the model'}: compiled and eager are not compared: {reason}")
        del self._modules[name]


class _Around:
    """The two hooks of one compiled module."""

    def __init__(self, owner: CompiledModules, name: str) -> None:
        self.owner, self.book, self.name = owner, owner.book, name

    def hooks(self) -> tuple[Any, Any]:
        return self._before, self._after

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.owner.forget(self.name)
        if torch.is_grad_enabled() and self.owner.is_due(self.name):
            self._hold(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.owner.is_due(self.name):
            self._compare(output)

    @watching
    def _hold(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.owner.hold(self.name, module, args, kwargs)

    @watching
    def _compare(self, output: Any) -> None:
        self.owner.compare(self.name, output)


def _largest_difference(name: str, eager: Any, output: Any) -> Difference | None:
    """Return that of the outputs which differ most; None where there are no floating-point ones."""
    found = [difference(name, a, b) for a, b in zip(tensors_in(eager), tensors_in(output))]
    return max(found, key=_badness, default=None)
