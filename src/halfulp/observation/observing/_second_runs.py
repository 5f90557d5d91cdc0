"""Second runs: compiled modules beside eager ones, and what gradient checkpointing computes again."""

from __future__ import annotations

import copy
import functools
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

from .._record import OutputDifference
from ..findings._comparisons import is_explained_by_sum_order
from ._recorder import Recorder, find_float_tensors, make_safe_hook_method
from ._sampler import read_numbers, take_sample

# The dtype of an output, and a sample of it.
OutputSample = tuple[torch.dtype, torch.Tensor]


def sample_output(recorder: Recorder, name: str, output: torch.Tensor) -> OutputSample | None:
    """Return a sample of a module's output, at the same places in all of one step; None without numbers."""
    found = read_numbers(output)
    if found is None:
        return None
    return found.dtype, take_sample(found.flat, recorder.get_sampling_key(name)).mul_(found.scale)


def measure_output_difference(name: str, first: OutputSample, second: OutputSample) -> OutputDifference:
    """Return how samples of two outputs of a module differ; NaN where the other has NaN counts as equal."""
    (dtype, a), (other, b) = first, second
    dtypes = str(dtype).removeprefix("torch."), str(other).removeprefix("torch.")
    if len(a) != len(b):
        return OutputDifference(name, dtypes, 1.0, float("inf"))
    differing = (a != b) & ~(a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    size, gap = float(a[finite].norm()), float((b - a)[finite].norm())
    distance = float("inf") if bool((differing & ~finite).any()) else gap / size if size else gap and float("inf")
    return OutputDifference(name, dtypes, int(differing.sum()) / max(1, len(a)), distance)


def keep_larger_difference(records: list[OutputDifference], made: OutputDifference) -> None:
    """Put a module's difference into records, in place of one that is smaller."""
    there = next((k for k, one in enumerate(records) if one.name == made.name), None)
    if there is None:
        records.append(made)
    else:
        records[there] = max(records[there], made, key=_make_difference_sort_key)


def _make_difference_sort_key(one: OutputDifference) -> tuple[bool, float, float]:
    return one.dtypes[0] != one.dtypes[1], one.relative, one.differing


def keep_or_compare_recomputed_output(
    recorder: Recorder, first: dict[str, OutputSample | None], name: str, output: torch.Tensor, in_backward: bool
) -> None:
    """Keep a sample of a module's first output, or compare the one that checkpointing computes in the backward pass.

    Modules called twice are left out.
    """
    sample = sample_output(recorder, name, output)
    if sample is None:
        return
    if not in_backward:
        first[name] = None if name in first else sample
    elif (before := first.get(name)) is not None:
        first[name] = None
        keep_larger_difference(recorder.record.recomputed, measure_output_difference(name, before, sample))


class CompiledModuleCheck:
    """Runs copies of the eager originals of compiled modules on copies of their inputs; says where that cannot be."""

    def __init__(self, recorder: Recorder, modules: dict[str, nn.Module]) -> None:
        self.recorder, self._modules = recorder, modules
        self._expected: dict[str, list[OutputSample | None]] = {}

    def attach(self) -> None:
        """Attach the hooks around compiled modules, which run outside of what was compiled."""
        for name, module in self._modules.items():
            before = functools.partial(self._prepare_comparison, name)
            self.recorder.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # Before hooks of the user's that change outputs.
            after = functools.partial(self._compare_with_eager, name)
            self.recorder.hooks.append(module.register_forward_hook(after, prepend=True))

    def _prepare_comparison(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._expected.pop(name, None)  # of a run that did not end
        if self.recorder.sampling and name in self._modules and torch.is_grad_enabled():
            self._run_copies(name, module, args, kwargs)

    @make_safe_hook_method
    def _run_copies(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the original twice in eager mode, before the compiled module changes inputs or buffers."""
        original = module._orig_mod
        # A copy of the wrapper would reduce its gradients by communication.
        original = original.module if isinstance(original, DistributedDataParallel) else original
        reason = explain_incomparable_module(original)
        try:
            runs = [] if reason else [run_module_copy_eagerly(original, args, kwargs) for _ in range(2)]
        except Exception as error:
            runs, reason = [], f"it cannot be copied, or its copy cannot run ({type(error).__name__})"
        samples = [[sample_output(self.recorder, name, one) for one in find_float_tensors(run)] for run, _ in runs]
        if any(drew for _, drew in runs):
            reason = "its forward pass draws random numbers, which compiled code draws in another order"
        elif runs and (made := find_largest_difference(name, *samples)) and not is_explained_by_sum_order(made):
            reason = "two eager runs on the same inputs differ from each other"
        if reason:
            self.recorder.note_unobserved(f"{name or 'the model'}: compiled and eager are not compared: {reason}")
            del self._modules[name]
        else:
            self._expected[name] = samples[0]

    @make_safe_hook_method
    def _compare_with_eager(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        expected = self._expected.pop(name, None)
        if expected is None:
            return
        found = [sample_output(self.recorder, name, one) for one in find_float_tensors(output)]
        if (made := find_largest_difference(name, expected, found)) is not None:
            keep_larger_difference(self.recorder.record.compiled, made)


def find_largest_difference(
    name: str, first: list[OutputSample | None], second: list[OutputSample | None]
) -> OutputDifference | None:
    """Return the difference of the outputs that differ most; None where none is floating-point."""
    pairs = ((a, b) for a, b in zip(first, second) if a is not None and b is not None)
    return max((measure_output_difference(name, a, b) for a, b in pairs), key=_make_difference_sort_key, default=None)


_MODULE_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def explain_incomparable_module(module: nn.Module) -> str | None:
    """Return why a module is never run a second time; None where it may be."""
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        return "its parameters are sharded, and another run would communicate"
    modes = torch.overrides._get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or any(not isinstance(mode, DeviceContext) for mode in modes):
        return "it runs under a mode that changes or watches its functions"
    own = any(getattr(one, table) for one in module.modules() for table in _MODULE_HOOK_ATTRIBUTES)
    if own or any(getattr(_torch_module, f"_global{table}") for table in _MODULE_HOOK_ATTRIBUTES):
        return "hooks on its modules would run a second time; remove them to compare"
    return None


def run_module_copy_eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return what a copy of a module makes of copies of inputs in eager mode, and whether it drew random numbers."""
    copied = copy.deepcopy(module)
    given = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x), (args, kwargs))
    drawn = random.getstate(), np.random.get_state()
    cached, before = torch.is_autocast_cache_enabled(), _read_random_generator_states()
    # Weights that this run casts would be found by layers that follow.
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()),
            torch.compiler.set_stance("force_eager"),
            torch._C._EnableTorchFunction(),
            torch.enable_grad(),  # as the compiled run, by which a module may choose what it computes
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),  # instead of the user's
        ):
            output = copied(*given[0], **given[1])
            return output, _read_random_generator_states() != before
    finally:
        torch.set_autocast_cache_enabled(cached)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def _read_random_generator_states() -> tuple[Any, ...]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [one.numpy().tobytes() for one in (torch.get_rng_state(), *devices)]
    numpy_state: Any = np.random.get_state()
    return (*states, random.getstate(), numpy_state[1].tobytes(), numpy_state[2])
