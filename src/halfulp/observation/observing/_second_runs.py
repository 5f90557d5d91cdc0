"""Second runs: compiled modules beside eager ones, and what gradient checkpointing computes again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import random
import types
from collections.abc import Callable, Iterator
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

from ...kernels import to_float64
from .._record import Difference
from ..findings._comparisons import is_explained_by_sum_order
from ..sampling._sampler import read_numbers, take_sample
from ._recorder import Recorder, find_float_tensors, make_safe_method

_ELEMENTS_PER_PIECE = 1 << 22


def measure_difference(name: str, first: torch.Tensor, second: torch.Tensor) -> Difference:
    """Return how two outputs of a module differ; NaN where the other has NaN counts as equal."""
    names = str(first.dtype).removeprefix("torch."), str(second.dtype).removeprefix("torch.")
    a, b = _flatten_numbers(first), _flatten_numbers(second)
    if len(a) != len(b):
        return Difference(name, names, 1.0, float("inf"))
    count, broken, squares, gaps = 0, False, 0.0, 0.0
    for one, other in zip(a.split(_ELEMENTS_PER_PIECE), b.split(_ELEMENTS_PER_PIECE)):
        x, y = one.cpu().double(), other.cpu().double()
        differing = (x != y) & ~(x.isnan() & y.isnan())
        finite = x.isfinite() & y.isfinite()
        count += int(differing.sum())
        broken |= bool((differing & ~finite).any())
        squares += float(x[finite].square().sum())
        gaps += float((y - x)[finite].square().sum())
    distance = float("inf") if broken else math.sqrt(gaps / squares) if squares else gaps and float("inf")
    return Difference(name, names, count / max(1, len(a)), distance)


def keep_larger_difference(records: list[Difference], made: Difference) -> None:
    """Keep the larger difference of each module."""
    there = next((k for k, one in enumerate(records) if one.name == made.name), None)
    if there is None:
        records.append(made)
    elif _rank_difference(made) > _rank_difference(records[there]):
        records[there] = made


def _rank_difference(one: Difference) -> tuple[bool, float, float]:
    return one.dtypes[0] != one.dtypes[1], one.relative, one.differing


def _flatten_numbers(tensor: torch.Tensor) -> torch.Tensor:
    found = read_numbers(tensor)
    if found is None:
        return tensor.detach().to_dense().reshape(-1)
    flat = found.flat.reshape(-1)
    return flat if found.scale == 1.0 else to_float64(flat) * found.scale


class Recomputations:
    """Compares the outputs of modules whose forward pass runs again in the backward pass, as under checkpointing."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._first: dict[str, tuple[torch.dtype, torch.Tensor] | None] = {}

    def end_step(self) -> None:
        """Forget one step's outputs."""
        self._first.clear()

    def note_output(self, name: str, output: torch.Tensor, again: bool) -> None:
        """Keep a sample of a first output, or compare a second one with it; modules called twice are left out."""
        found = read_numbers(output)
        if found is None:
            return
        sample = take_sample(found.flat, self.recorder.place_key(name))
        if not again:
            self._first[name] = None if name in self._first else (found.dtype, sample)
            return
        first = self._first.get(name)
        if first is None:
            return
        self._first[name] = None
        made = measure_difference(name, first[1], sample)
        names = (str(first[0]).removeprefix("torch."), str(found.dtype).removeprefix("torch."))
        keep_larger_difference(self.recorder.record.recomputed, Difference(name, names, made.differing, made.relative))


class CompiledModuleCheck:
    """Runs the eager original of compiled modules on the same inputs, once in a sampled step.

    Nothing that training computes takes notice of it: inputs, buffers and attributes are copies, the states of random
    generators are put back, hooks and caches are left out. There is no verdict where random numbers are drawn, which
    compiled code draws in another order, and where two eager runs differ from each other.

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
            before, after = functools.partial(self._before_forward, name), functools.partial(self._after_forward, name)
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

    def _after_forward(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        if self._is_due(name):
            self._compare_with_eager(name, output)

    def _is_due(self, name: str) -> bool:
        """Return whether a module is to be compared at its next run."""
        return self.recorder.sampling and name in self._modules and self._compared.get(name) != self.recorder.step

    @make_safe_method
    def _copy_inputs(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Copy inputs and state of the original, before the compiled module runs."""
        original: Any = module._orig_mod
        reason = explain_never_comparable(original)
        try:
            if reason is None:
                self._second_runs[name] = SecondRun(original, args, kwargs)
        except Exception as error:
            reason = f"its inputs or attributes cannot be copied ({type(error).__name__})"
        if reason:
            self._stop_comparing(name, reason)

    @make_safe_method
    def _compare_with_eager(self, name: str, output: Any) -> None:
        """Run the original as it was then."""
        second = self._second_runs.pop(name, None)
        if second is None or output is None:
            return
        self._compared[name] = self.recorder.step
        reason = second.explain_incomparable()
        eager = None if reason else second.run_eagerly()
        reason = reason or second.explain_incomparable()
        if reason:
            self._stop_comparing(name, reason)
            return
        made = _largest_difference(name, eager, output)
        if made is None:
            return
        if made.differing and not is_explained_by_sum_order(made):
            again = _largest_difference(name, eager, second.run_eagerly())
            if again is None or again.differing:
                self._stop_comparing(name, "two eager runs on the same inputs differ from each other")
                return
            if second.hooks_left_out:
                self._stop_comparing(
                    name, "they differ, and hooks on its modules, which do not run a second time, may be why"
                )
                return
        keep_larger_difference(self.recorder.record.compiled, made)

    def _stop_comparing(self, name: str, reason: str) -> None:
        self.recorder.note_unseen(f"{name or 'the model'}: compiled and eager are not compared: {reason}")
        del self._modules[name]


def _largest_difference(name: str, eager: Any, output: Any) -> Difference | None:
    """Return the difference of the outputs that differ most; None where none is floating-point."""
    found = [measure_difference(name, a, b) for a, b in zip(find_float_tensors(eager), find_float_tensors(output))]
    return max(found, key=_rank_difference, default=None)


_GLOBAL_HOOK_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class SecondRun:
    """A module and all that its forward pass depends on, as they are when this is made."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Another run of the wrapper would prepare its reduction of gradients anew.
        self._module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        copier = Copier()
        self._args, self._kwargs = copier.copy((args, kwargs), objects=True)
        copier.modules.extend(self._module.modules())
        self._states: dict[nn.Module, dict[str, Any]] = {}
        for one in copier.modules:  # which grows by the modules that those before keep in lists
            for inner in one.modules():
                if inner not in self._states:
                    self._states[inner] = copier.copy_state(vars(inner))
        self.hooks_left_out: bool = copier.hooks_left_out or any(
            getattr(_torch_module, name) for name in _GLOBAL_HOOK_TABLES
        )
        self._random = RandomState()
        self._own_random = [get_generator_state(generator) for generator in copier.generators]
        self._parameters = [(p, p._version) for p in self._module.parameters() if not p.is_inference()]
        self._drew = False

    def explain_incomparable(self) -> str | None:
        """Return why the module's run cannot be compared with another one; None where it can be."""
        if self._drew or not self._random.is_current():
            return "its forward pass draws random numbers, which compiled code draws in another order"
        if any(parameter._version != version for parameter, version in self._parameters):
            return "its forward pass changes its parameters in place, so that they are not what they were"
        return None

    def run_eagerly(self) -> Any:
        """Run the module in eager mode on the same inputs; buffers, attributes and generators stay as they are."""
        copier = Copier()
        args, kwargs = copier.copy((self._args, self._kwargs), objects=True)
        states = {module: copier.copy_state(state) for module, state in self._states.items()}
        now = RandomState()
        try:
            self._random.restore()
            with _isolate_eager_run(), _replace_module_states(states):
                args, kwargs = _clone_leaf_inputs((args, kwargs))
                output = self._module(*args, **kwargs)
            drawn = [get_generator_state(generator) for generator in copier.generators]
            self._drew = not self._random.is_current() or not _are_equal_states(drawn, self._own_random)
            return output
        finally:
            now.restore()


def explain_never_comparable(module: nn.Module) -> str | None:
    """Return why a module is never run a second time; None where it may be."""
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        return "its parameters are sharded, and another run would communicate"
    modes = torch.overrides._get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or any(not isinstance(mode, DeviceContext) for mode in modes):
        return "it runs under a mode that changes or watches its functions"
    return None


@contextlib.contextmanager
def _isolate_eager_run() -> Iterator[None]:
    """Run as the user's call ran, but eagerly, and without a trace in torch's caches and hooks."""
    cached = torch.is_autocast_cache_enabled()
    held = {name: dict(getattr(_torch_module, name)) for name in _GLOBAL_HOOK_TABLES}
    # Weights that this run casts would be found by layers that follow, and be held by their graphs.
    torch.set_autocast_cache_enabled(False)
    for name in _GLOBAL_HOOK_TABLES:
        getattr(_torch_module, name).clear()
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            torch._C._EnableTorchFunction(),
            torch.enable_grad(),
            saved_tensors_hooks(_return_tensor, _return_tensor),  # instead of the user's
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for name, hooks in held.items():
            getattr(_torch_module, name).update(hooks)


@contextlib.contextmanager
def _replace_module_states(states: dict[nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Give modules other buffers and attributes for a while; their own, and their versions, stay untouched."""
    held = {module: dict(vars(module)) for module in states}
    try:
        for module, state in states.items():
            _replace_items(vars(module), state)
        yield
    finally:
        for module, state in held.items():
            _replace_items(vars(module), state)


def _replace_items(attributes: dict[str, Any], state: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(state)


def _clone_leaf_inputs(given: Any) -> Any:
    """Return inputs that require gradients as a forward pass sees them, which may change them in place."""
    made: dict[int, torch.Tensor] = {}

    def clone(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter):
            return made.setdefault(id(value), value.clone())
        return value

    return tree_map(clone, given)


def _return_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MODULE_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNCOPIED_TYPES = (nn.Module, nn.Parameter, torch.Size, type, types.FunctionType, types.ModuleType, types.MethodType)


class Copier:
    """Copies values of one moment; a tensor, generator or object in two places is the same copy in both.

    Attributes:
        modules: met in values; they are not copied.
        generators: copies of the random generators met, in order.
        hooks_left_out: whether a module's hooks that are not torch's own were left out.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self.hooks_left_out: bool = False
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any, objects: bool) -> Any:
        """Return a copy: of tensors, generators, containers, data classes, and what these hold.

        Args:
            value: anything. Modules, parameters, and what else is not named here, are returned as they are.
            objects: whether other objects are copied too, attribute by attribute, as inputs are. What a module holds
                may be a trainer with all that belongs to it.
        """
        return tree_map(functools.partial(self._copy_leaf, objects), value)

    def copy_state(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return a module's `vars` with copies of its buffers and attributes, without its users' hooks."""
        return {
            key: self._drop_users_hooks(value) if key in MODULE_HOOK_TABLES else self.copy(value, objects=False)
            for key, value in attributes.items()
        }

    def _drop_users_hooks(self, hooks: Any) -> Any:
        kept = copy.copy(hooks)
        for key, hook in hooks.items():
            # Those of torch.nn.utils compute the module's weight, and belong to its forward pass.
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if not home.startswith("torch.nn.utils"):
                del kept[key]
                self.hooks_left_out = True
        return kept

    def _copy_leaf(self, objects: bool, value: Any) -> Any:
        if isinstance(value, nn.Module):
            self.modules.append(value)
        if isinstance(value, _UNCOPIED_TYPES):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        made: Any
        if isinstance(value, torch.Tensor):
            made = value.detach().clone().requires_grad_(value.requires_grad)
        elif isinstance(value, GENERATOR_TYPES):
            made = copy.deepcopy(value)
            self.generators.append(made)
        elif objects or dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace | dict | list | set):
            made = copy.copy(value)
        else:
            return value
        self._copies[id(value)] = value, made  # the value too, so that its id stays its own
        if made is not value and not isinstance(value, (torch.Tensor, *GENERATOR_TYPES)):
            for key, item in getattr(made, "__dict__", {}).items():  # one of which may lead back to the value
                object.__setattr__(made, key, self.copy(item, objects))
        return made


_StateAccess = tuple[Callable[[], Any], Callable[[Any], Any]]


class RandomState:
    """The states of torch's generators on every device, and of Python's and numpy's, when this was made."""

    def __init__(self) -> None:
        self._saved_states = [(read, write, read()) for read, write in _list_random_states()]

    def is_current(self) -> bool:
        """Return whether nothing was drawn since."""
        return all(_are_equal_states(read(), value) for read, _, value in self._saved_states)

    def restore(self) -> None:
        """Set the generators to these states."""
        for read, write, value in self._saved_states:
            if not _are_equal_states(read(), value):
                write(value)


def get_generator_state(generator: Any) -> Any:
    """Return the state of a generator object, such as a module keeps."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)


def _list_random_states() -> list[_StateAccess]:
    found: list[_StateAccess] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (lambda: np.random.get_state(legacy=False), np.random.set_state),
    ]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return found
    device = torch.get_device_module(accelerator)
    # A state asked of a device that nothing has used yet would start it.
    if getattr(device, "is_initialized", lambda: True)():
        every = hasattr(device, "get_rng_state_all")
        names = ("get_rng_state_all", "set_rng_state_all") if every else ("get_rng_state", "set_rng_state")
        if all(hasattr(device, name) for name in names):
            found.append((getattr(device, names[0]), getattr(device, names[1])))
    return found


def _are_equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal_states(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_are_equal_states, one, other))
    return bool(one == other)
