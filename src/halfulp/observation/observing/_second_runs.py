"""Second runs: compiled modules beside eager ones, and what gradient checkpointing computes again."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as _torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from .._record import Difference
from ..findings._comparisons import is_explained_by_sum_order
from ..sampling._sampler import read_numbers, take_sample
from ._recorder import Recorder, find_float_tensors, make_safe_method

# The dtype of an output, and a sample of it.
OutputSample = tuple[torch.dtype, torch.Tensor]


def sample_output(recorder: Recorder, name: str, output: torch.Tensor) -> OutputSample | None:
    """Return a sample of a module's output, at the same places in all of one step; None without numbers."""
    found = read_numbers(output)
    return None if found is None else (found.dtype, take_sample(found.flat, recorder.place_key(name)).mul_(found.scale))


def measure_difference(name: str, first: OutputSample, second: OutputSample) -> Difference:
    """Return how samples of two outputs of a module differ; NaN where the other has NaN counts as equal."""
    dtypes = str(first[0]).removeprefix("torch."), str(second[0]).removeprefix("torch.")
    a, b = first[1].double(), second[1].double()
    if len(a) != len(b):
        return Difference(name, dtypes, 1.0, float("inf"))
    differing = (a != b) & ~(a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    size, gap = float(a[finite].norm()), float((b - a)[finite].norm())
    distance = float("inf") if bool((differing & ~finite).any()) else gap / size if size else gap and float("inf")
    return Difference(name, dtypes, int(differing.sum()) / max(1, len(a)), distance)


def keep_larger_difference(records: list[Difference], made: Difference) -> None:
    """Keep the larger difference of each module."""
    there = next((k for k, one in enumerate(records) if one.name == made.name), None)
    if there is None:
        records.append(made)
    elif _rank_difference(made) > _rank_difference(records[there]):
        records[there] = made


def _rank_difference(one: Difference) -> tuple[bool, float, float]:
    return one.dtypes[0] != one.dtypes[1], one.relative, one.differing


class Recomputations:
    """Compares the outputs of modules whose forward pass runs again in the backward pass, as under checkpointing."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._first: dict[str, OutputSample | None] = {}

    def end_step(self) -> None:
        """Forget one step's outputs."""
        self._first.clear()

    def note_output(self, name: str, output: torch.Tensor, again: bool) -> None:
        """Keep a sample of a first output, or compare a second one with it; modules called twice are left out."""
        sample = sample_output(self.recorder, name, output)
        if sample is None:
            return
        if not again:
            self._first[name] = None if name in self._first else sample
        elif (first := self._first.get(name)) is not None:
            self._first[name] = None
            keep_larger_difference(self.recorder.record.recomputed, measure_difference(name, first, sample))


class CompiledModuleCheck:
    """Runs the eager original of compiled modules on the same inputs, once in a sampled step.

    Nothing that training computes takes notice of it: inputs, buffers and attributes are deep copies, and the states of
    random generators are put back. There is no verdict, but a sentence in the record, where random numbers are drawn,
    which compiled code draws in another order; where a module has hooks, which would run twice; where something cannot
    be copied; and where two eager runs differ from each other, as those of a module that counts its calls do.

    Args:
        modules: compiled modules that wrap an original, by name.
    """

    def __init__(self, recorder: Recorder, modules: dict[str, nn.Module]) -> None:
        self.recorder, self._modules = recorder, modules
        self._second_runs: dict[str, SecondRun] = {}
        self._compared: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Attach the hooks around compiled modules, which run outside of what was compiled."""
        if self._handles:
            return
        for name, module in self._modules.items():
            before = functools.partial(self._before_forward, name)
            after = functools.partial(self._compare_with_eager, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # Before hooks of the user's that change outputs, and also where the forward pass raises.
            self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._second_runs.clear()

    def _before_forward(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._second_runs.pop(name, None)  # of a run that did not end
        if torch.is_grad_enabled() and self._is_due(name):
            self._copy_inputs(name, module, args, kwargs)

    def _is_due(self, name: str) -> bool:
        """Return whether a module is to be compared at its next run."""
        return self.recorder.sampling and name in self._modules and self._compared.get(name) != self.recorder.step

    @make_safe_method
    def _copy_inputs(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Copy inputs and state of the original, before the compiled module runs."""
        original: Any = module._orig_mod
        # Another run of the wrapper would prepare its reduction of gradients anew.
        original = original.module if isinstance(original, DistributedDataParallel) else original
        reason = explain_never_comparable(original)
        try:
            if reason is None:
                self._second_runs[name] = SecondRun(original, args, kwargs)
        except Exception as error:
            reason = f"its inputs or attributes cannot be copied ({type(error).__name__})"
        if reason:
            self._stop_comparing(name, reason)

    @make_safe_method
    def _compare_with_eager(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        """Run the original as it was then."""
        second = self._second_runs.pop(name, None)
        if second is None or output is None or not self._is_due(name):
            return
        self._compared[name] = self.recorder.step
        reason = second.explain_incomparable()
        eager = None if reason else second.run_eagerly()
        reason = reason or second.explain_incomparable()
        made = None if reason else self._find_largest_difference(name, eager, output)
        if made is not None and made.differing and not is_explained_by_sum_order(made):
            again = self._find_largest_difference(name, eager, second.run_eagerly())
            if again is None or again.differing:
                reason = "two eager runs on the same inputs differ from each other"
        if reason:
            self._stop_comparing(name, reason)
        elif made is not None:
            keep_larger_difference(self.recorder.record.compiled, made)

    def _find_largest_difference(self, name: str, eager: Any, output: Any) -> Difference | None:
        """Return the difference of the outputs that differ most; None where none is floating-point."""
        found = []
        for pair in zip(find_float_tensors(eager), find_float_tensors(output)):
            first, second = (sample_output(self.recorder, name, one) for one in pair)
            if first is not None and second is not None:
                found.append(measure_difference(name, first, second))
        return max(found, key=_rank_difference, default=None)

    def _stop_comparing(self, name: str, reason: str) -> None:
        self.recorder.note_unseen(f"{name or 'the model'}: compiled and eager are not compared: {reason}")
        del self._modules[name]


_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def explain_never_comparable(module: nn.Module) -> str | None:
    """Return why a module is never run a second time; None where it may be."""
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        return "its parameters are sharded, and another run would communicate"
    modes = torch.overrides._get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or any(not isinstance(mode, DeviceContext) for mode in modes):
        return "it runs under a mode that changes or watches its functions"
    own = any(getattr(one, table) for one in module.modules() for table in _HOOK_TABLES)
    if own or any(getattr(_torch_module, f"_global{table}") for table in _HOOK_TABLES):
        return "hooks on its modules would run a second time; remove them to compare"
    return None


class SecondRun:
    """A module and all that its forward pass depends on, as they are when this is made."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._given = _copy_inputs((args, kwargs))
        parameters = list(module.parameters())
        self._parameters = [(parameter, parameter._version) for parameter in parameters]
        memo: dict[int, Any] = {id(one): one for one in (*parameters, *module.modules())}
        for one in module.modules():  # results that a module keeps, which deepcopy refuses
            kept = (value for value in vars(one).values() if isinstance(value, torch.Tensor) and not value.is_leaf)
            memo |= {id(value): value.detach().clone() for value in kept}
        self._states = {one: copy.deepcopy(vars(one), memo) for one in module.modules()}
        self._random = _read_random_states()
        self._drew = False

    def explain_incomparable(self) -> str | None:
        """Return why the module's run cannot be compared with another one; None where it can be."""
        if self._drew or _read_random_states() != self._random:
            return "its forward pass draws random numbers, which compiled code draws in another order"
        if any(parameter._version != version for parameter, version in self._parameters):
            return "its forward pass changes its parameters in place, so that they are not what they were"
        return None

    def run_eagerly(self) -> Any:
        """Run the module in eager mode on the same inputs; its own buffers and attributes stay as they are."""
        drawn = random.getstate(), np.random.get_state()
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        held = {module: dict(vars(module)) for module in self._states}
        cached = torch.is_autocast_cache_enabled()
        # Weights that this run casts would be found by layers that follow, and be held by their graphs.
        torch.set_autocast_cache_enabled(False)
        try:
            for module, state in self._states.items():
                vars(module).clear()
                vars(module).update(state)
            with (
                torch.random.fork_rng(devices),
                torch.compiler.set_stance("force_eager"),
                torch._C._EnableTorchFunction(),
                torch.enable_grad(),
                saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),  # instead of the user's
            ):
                # A forward pass may change inputs in place where they require gradients, too.
                args, kwargs = tree_map(
                    lambda one: one.clone() if isinstance(one, torch.Tensor) else one, _copy_inputs(self._given)
                )
                output = self._module(*args, **kwargs)
                self._drew = _read_random_states() != self._random
            return output
        finally:
            for module, own in held.items():
                vars(module).clear()
                vars(module).update(own)
            torch.set_autocast_cache_enabled(cached)
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


def _copy_inputs(given: Any) -> Any:
    """Return a deep copy of inputs, whose tensors have no history."""

    def copy_leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return copy.deepcopy(value)

    return tree_map(copy_leaf, given)


def _read_random_states() -> tuple[Any, ...]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [one.numpy().tobytes() for one in (torch.get_rng_state(), *devices)]
    return (*states, random.getstate(), pickle.dumps(np.random.get_state()))
