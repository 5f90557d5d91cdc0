"""Hooks on modules and parameters: activations, gradients, residual sums, positions, the loss, and second runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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
from .._record import OutputDifference, PositionCollisionRecord, RealisedChanges, ResidualStreamRecord
from ..findings._comparisons import is_explained_by_sum_order
from ._recorder import Recorder, find_float_tensors, make_safe_hook_method
from ._sampler import PLAIN_TENSOR_TYPES, SAMPLE_SIZE, SIXTEEN_BIT_DTYPES, read_numbers, take_sample
from ._updates import record_realised_changes


class ModuleHook:
    """A method as the hook of a module with a name, which copies and files of that module do not take along."""

    def __init__(self, method: Callable[..., None], name: str) -> None:
        self._method, self._name = method, name

    def __call__(self, *arguments: Any) -> None:
        self._method(self._name, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # What takes any arguments, does nothing, and is found where halfulp is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHooks:
    """Watches the outputs of all modules of a model that run in eager mode; `check` compares second runs, too."""

    def __init__(self, recorder: Recorder, model: nn.Module, check: bool) -> None:
        self.recorder = recorder
        self.loss: torch.Tensor | None = None
        # Bounded: many forward passes may run without an optimizer's step.
        self._gradient_handles: deque[RemovableHandle] = deque(maxlen=10_000)
        self._seen_modules: set[str] = set()
        self._last_seen: tuple[weakref.ref, int] | None = None
        compiled: dict[str, nn.Module] = {}
        names: dict[nn.Module, str] = {}
        for name, module in _find_eager_modules(model, compiled):
            names.setdefault(module, name)
        wrappers = {name: module for name, module in compiled.items() if hasattr(module, "_orig_mod")} if check else {}
        for name in compiled:
            said = name or "the model"
            recorder.note_unobserved(
                f"{said} is compiled: activations and their gradients inside it are not observed, as hooks run in "
                "eager mode only; observe the run without torch.compile to see them"
            )
            if check and name not in wrappers:
                recorder.note_unobserved(f"{said} was compiled in place: there is no eager original to compare with")
        self.expects_calls: bool = bool(names) and not compiled
        self._residual_watcher = ResidualSumWatcher(recorder)
        self._compares_second_runs = check
        # Samples of outputs by module, None behind a second run.
        self._first_outputs: dict[str, OutputSample | None] = {}
        self._hook_by_module = {module: ModuleHook(self._observe_module_run, name) for module, name in names.items()}
        self._compiled_check = CompiledVersusEagerComparison(recorder, wrappers)

    def attach(self) -> None:
        """Attach the hooks."""
        self.recorder.handles += [module.register_forward_hook(hook) for module, hook in self._hook_by_module.items()]
        self._compiled_check.attach()

    def clear_step_state(self) -> None:
        """Forget what belongs to one step."""
        while self._gradient_handles:
            self._gradient_handles.pop().remove()
        self._seen_modules.clear()
        self._last_seen = self.loss = None
        self._residual_watcher.release_tensors()
        self._first_outputs.clear()

    def _observe_module_run(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Observe the outputs of a module that has run in training; evaluation without gradients is left out."""
        if not torch.compiler.is_compiling() and self.recorder.is_sampling and torch.is_grad_enabled():
            in_backward = torch._C._current_graph_task_id() != -1
            self._observe_outputs(name, module, inputs, output, in_backward)

    @make_safe_hook_method
    def _observe_outputs(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any, in_backward: bool
    ) -> None:
        if not in_backward:  # what runs again in a backward pass was noted in the first run
            self._residual_watcher.track_residual_sums_of_module(name, inputs, output)
            for one in output if isinstance(output, tuple) else (output,):
                if type(one) is torch.Tensor and one.dim() > 1 and one.shape[-2] > _FEWEST_POSITIONS:
                    _record_position_collisions(self.recorder, name, one)
        found = list(find_float_tensors(output))
        if self._compares_second_runs and found:
            keep_or_compare_recomputed_output(self.recorder, self._first_outputs, name, found[0], in_backward)
        if not in_backward or name not in self._seen_modules:
            for tensor in found:
                # One that a module around hands on was observed last.
                last = self._last_seen
                if last is None or last[0]() is not tensor or last[1] != tensor._version:
                    self._observe_output(name, module, tensor, inputs)
            self._seen_modules.add(name)
        if not name:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            is_loss = isinstance(loss, torch.Tensor) and loss.dtype.is_floating_point and loss.numel() == 1
            self.loss = loss.detach() if is_loss and loss is not None and loss.requires_grad else None

    def _observe_output(self, name: str, module: nn.Module, tensor: torch.Tensor, inputs: tuple[Any, ...]) -> None:
        kind = type(module).__name__
        record = self.recorder.record_tensor("activation", name, kind, tensor)
        if record is None:
            return
        # Of outputs that are all zeros the largest input and weight: did rounding make them so?
        zeros = record.last_amax == 0.0
        record.input_amax = max(map(_compute_amax, find_float_tensors(inputs)), default=None) if zeros else None
        own = [one for one in module._parameters.values() if one is not None] if zeros else []
        record.weight_amax = max(map(_compute_amax, find_float_tensors(own)), default=None)
        self._last_seen = weakref.ref(tensor), tensor._version
        if tensor.requires_grad:
            hook = functools.partial(self._record_output_gradient, name, kind)
            self._gradient_handles.append(tensor.register_hook(hook))

    @make_safe_hook_method
    def _record_output_gradient(self, name: str, kind: str, gradient: torch.Tensor) -> None:
        """Count the gradient of an output as it arrives."""
        if self.recorder.is_sampling:
            self.recorder.record_tensor("activation gradient", name, kind, gradient, self.recorder.loss_scale)


def _compute_amax(tensor: torch.Tensor) -> float:
    if type(tensor) not in PLAIN_TENSOR_TYPES or not tensor.numel():
        return 0.0
    values = tensor.detach()
    low, high = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)
    return max(abs(float(low)), abs(float(high)))


def _find_eager_modules(
    model: nn.Module, compiled: dict[str, nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are called in eager mode, by name, and note those that are compiled."""
    # torch.compile wraps it, or was called on it in place.
    if getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod"):
        compiled[prefix] = model
        return
    if type(model).forward is not nn.Module.forward:
        yield prefix, model
    for name, child in model.named_children():
        yield from _find_eager_modules(child, compiled, f"{prefix}.{name}" if prefix else name)


# A sum is measured when a module takes it: between a layer's input and that lie some outputs and inputs of its own.
_MOST_HELD_OUTPUTS, _MOST_HELD_INPUTS = 3, 8


class _Addend(NamedTuple):
    """A tensor that may be an addend: its place in autograd's graph, its numbers, and the module that made it."""

    graph_key: tuple[int, int]
    values: torch.Tensor
    version: int
    module_name: str | None


class ResidualSumWatcher:
    """Finds sums of a module's output and a tensor that bypasses it in autograd's graph, and what rounding loses."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._outputs: deque[_Addend] = deque(maxlen=_MOST_HELD_OUTPUTS)
        self._inputs: deque[_Addend] = deque(maxlen=_MOST_HELD_INPUTS)

    def release_tensors(self) -> None:
        """Let go of a step's tensors."""
        self._outputs.clear()
        self._inputs.clear()

    def track_residual_sums_of_module(self, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        """Note that a module has run; modules inside it have been noted before."""
        for tensor, maker in ((inputs[0] if inputs else None, None), (output, name)):
            if type(tensor) is not torch.Tensor or tensor.dtype not in SIXTEEN_BIT_DTYPES or tensor.grad_fn is None:
                continue
            key = make_graph_output_key(tensor.grad_fn, tensor.output_nr)
            known = next((one for one in (*self._outputs, *self._inputs) if one.graph_key == key), None)
            if known is None:
                self._measure_sum(tensor)
            if maker is None:
                if known is None or known.module_name is not None:
                    made_by = known.module_name if known else None
                    self._inputs.append(_Addend(key, tensor.detach(), tensor._version, made_by))
            elif known is None:
                self._outputs.append(_Addend(key, tensor.detach(), tensor._version, maker))

    def _measure_sum(self, total: torch.Tensor) -> None:
        """Measure the loss of a sum's smaller addend, if both addends are noted tensors."""
        node: Any = total.grad_fn
        if not total.numel() or node.name() != "AddBackward0" or len(node.next_functions) != 2:
            return
        held = {one.graph_key: one for one in (*self._inputs, *self._outputs)}
        first, second = (held.get(make_graph_output_key(*pair)) for pair in node.next_functions)
        if first is None or second is None or first is second:
            return
        samples = []
        for one in (first, second):
            same = one.values.shape == total.shape and one.values.dtype is total.dtype
            if not same or one.values._version != one.version:
                return
            samples.append(_sample_rows(one.values))
        sizes = [float(sample.square().mean().sqrt()) for sample in samples]
        small = sizes.index(min(sizes))
        name = (first, second)[small].module_name
        if name is None:
            return
        record = self.recorder.record.residuals.setdefault(name, ResidualStreamRecord(name, total.dtype))
        record.stream, record.added = sizes[1 - small], sizes[small]
        record_realised_changes(record.change, samples[1 - small], _sample_rows(total), samples[small])


def make_graph_output_key(node: Any, number: int) -> tuple[int, int]:
    """Return a key that tells the outputs of a graph's operations apart within a thread."""
    return (-1 if node is None else node._sequence_nr(), number)


def _sample_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return some rows of a tensor at even distances."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.detach().reshape(1, 1)
    most = max(1, SAMPLE_SIZE // max(1, rows.shape[1]))
    return to_float64(rows[:: max(1, -(-rows.shape[0] // most))][:most, :SAMPLE_SIZE].reshape(-1)).cpu()


# The whole numbers up to which each format has all.
_EXACT_INTEGER_LIMIT_BY_DTYPE = {torch.bfloat16: 256, torch.float16: 2048}
_FIRST_REPEATS_WINDOW = 8
_FEWEST_POSITIONS = min(_EXACT_INTEGER_LIMIT_BY_DTYPE.values()) + _FIRST_REPEATS_WINDOW
# As many pairs of equal neighbours chance does not place where rounding does.
_FEWEST_REPEATED_POSITIONS = 16
# Two positions may have one sine in 8 bits.
_LARGEST_SHARE_OF_UNEXPECTED_REPEATS = 0.2


def _record_position_collisions(recorder: Recorder, name: str, output: torch.Tensor) -> None:
    """Record an output whose positions were counted in 16 bits: a column repeats just where rounded integers do."""
    if name in recorder.record.positions or not output.is_floating_point() or not output.numel():
        return
    rows = output.detach()[(0,) * (output.dim() - 2)]
    for dtype, start in _EXACT_INTEGER_LIMIT_BY_DTYPE.items():
        end = start + _FIRST_REPEATS_WINDOW
        if len(rows) <= end:
            continue
        positions = torch.arange(len(rows), device=rows.device, dtype=torch.float32).to(dtype)
        expected = positions[1:] == positions[:-1]
        columns = _find_columns_repeating_at(rows[start : end + 1], expected[start:end])
        if not bool(columns.any()) or int(expected.sum()) < _FEWEST_REPEATED_POSITIONS:
            continue
        if bool(_find_columns_repeating_at(rows[:, columns], expected).any()):
            recorder.record.positions[name] = PositionCollisionRecord(name, dtype, len(rows))
            return


def _find_columns_repeating_at(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the columns whose elements repeat wherever they are expected to, and hardly anywhere else."""
    repeats = rows[1:] == rows[:-1]
    return repeats[expected].all(0) & (repeats[~expected].double().mean(0) < _LARGEST_SHARE_OF_UNEXPECTED_REPEATS)


class GradientHooks:
    """Watches gradients as backward passes hand them to parameters, and as they are added to those that are there."""

    def __init__(self, recorder: Recorder, parameters: Mapping[str, torch.Tensor]) -> None:
        self.recorder = recorder
        # Names whose gradients were observed in this step.
        self.arrived_names: set[str] = set()
        self._parameter_by_name = {name: one for name, one in parameters.items() if one.requires_grad}
        # Names of parameters with a hook behind their accumulation.
        self._hooked_names: set[str] = set()
        # Samples of a gradient that is there and of the one that is added to it, until it has been.
        self._addends: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self) -> None:
        """Attach the hooks."""
        self._hooked_names.clear()
        for name, parameter in self._parameter_by_name.items():
            if parameter.requires_grad and parameter.is_leaf:
                hook = functools.partial(self._note_arriving_gradient, name)
                self.recorder.handles.append(parameter.register_hook(hook))

    def clear_step_state(self) -> None:
        """Forget what belongs to one step."""
        self.arrived_names.clear()
        self._addends.clear()

    @make_safe_hook_method
    def _note_arriving_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Count a gradient that arrives, and keep samples of it and of the one that it is added to, if there is one."""
        if not self.recorder.is_sampling:
            return
        kind, parameter = self.recorder.record.parameters[name].kind, self._parameter_by_name[name]
        if self.recorder.record_tensor("weight gradient", name, kind, gradient, self.recorder.loss_scale) is not None:
            self.arrived_names.add(name)
        self._addends.pop(name, None)
        held = None if parameter.grad is None else read_numbers(parameter.grad)
        incoming = None if held is None else read_numbers(gradient)
        if held is None or incoming is None or held.values.numel() != incoming.values.numel():
            return
        key = self.recorder.get_sampling_key(name)
        self._addends[name] = take_sample(held.values, key), take_sample(incoming.values, key)
        if name not in self._hooked_names:
            self._hooked_names.add(name)
            hook = functools.partial(self._compare_accumulated_gradient, name)
            self.recorder.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            # First of all: another hook may step by the gradient and free it. torch runs them in the order of a dict.
            hooks: Any = parameter._post_accumulate_grad_hooks
            for other in [*hooks][:-1]:
                hooks[other] = hooks.pop(other)

    @make_safe_hook_method
    def _compare_accumulated_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Compare a gradient that has been added with the exact sum."""
        addends = self._addends.pop(name, None)
        found = None if addends is None or parameter.grad is None else read_numbers(parameter.grad)
        # Zeros that `zero_grad(set_to_none=False)` left swallow nothing.
        if found is None or addends is None or not addends[0].any():
            return
        held, incoming = addends
        now = take_sample(found.values, self.recorder.get_sampling_key(name))
        record = self.recorder.record.parameters[name]
        record.accumulation = record.accumulation or RealisedChanges()
        record_realised_changes(record.accumulation, held, now, incoming)


# The dtype of an output, and a sample of it.
OutputSample = tuple[torch.dtype, torch.Tensor]


def sample_output(recorder: Recorder, name: str, output: torch.Tensor) -> OutputSample | None:
    """Return a sample of a module's output, at the same places in all of one step; None without numbers."""
    found = read_numbers(output)
    if found is None:
        return None
    return found.dtype, take_sample(found.values, recorder.get_sampling_key(name)).mul_(found.scale)


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
        records[there] = max(records[there], made, key=_get_difference_rank)


def _get_difference_rank(one: OutputDifference) -> tuple[bool, float, float]:
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


class CompiledVersusEagerComparison:
    """Runs copies of the eager originals of compiled modules on copies of their inputs; says where that cannot be."""

    def __init__(self, recorder: Recorder, modules: dict[str, nn.Module]) -> None:
        self.recorder, self._modules = recorder, modules
        self._eager_samples: dict[str, list[OutputSample | None]] = {}

    def attach(self) -> None:
        """Attach the hooks around compiled modules, which run outside of what was compiled."""
        for name, module in self._modules.items():
            before = ModuleHook(self._sample_eager_outputs, name)
            self.recorder.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # Before hooks of the user's that change outputs.
            after = ModuleHook(self._compare_with_eager, name)
            self.recorder.handles.append(module.register_forward_hook(after, prepend=True))

    def _sample_eager_outputs(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._eager_samples.pop(name, None)  # of a run that did not end
        if self.recorder.is_sampling and name in self._modules and torch.is_grad_enabled():
            self._run_original_twice(name, module, args, kwargs)

    @make_safe_hook_method
    def _run_original_twice(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            self._eager_samples[name] = samples[0]

    @make_safe_hook_method
    def _compare_with_eager(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        expected = self._eager_samples.pop(name, None)
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
    return max((measure_output_difference(name, a, b) for a, b in pairs), key=_get_difference_rank, default=None)


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
