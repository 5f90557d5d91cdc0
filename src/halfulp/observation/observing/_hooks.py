"""Hooks on modules and parameters: activations, gradients, residual sums, positions, and the loss."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...kernels import to_float64
from .._record import PositionsRecord, RealisedChanges, ResidualRecord
from ._recorder import Recorder, find_float_tensors, make_safe_method
from ._sampler import PLAIN_TENSOR_TYPES, read_numbers, take_sample
from ._second_runs import CompiledModuleCheck, RecomputationCheck
from ._updates import count_changes


class ModuleHooks:
    """Watches the outputs of all modules of a model that run in eager mode.

    Args:
        check: whether compiled modules and modules that run again are compared with a second run.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, check: bool) -> None:
        self.recorder = recorder
        self.loss: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []
        # Bounded: many forward passes may run without an optimizer's step.
        self._gradient_handles: deque[RemovableHandle] = deque(maxlen=10_000)
        self._seen: set[str] = set()
        self._last: tuple[weakref.ref, int] | None = None
        compiled: dict[str, nn.Module] = {}
        names: dict[nn.Module, str] = {}
        for name, module in _find_eager_modules(model, compiled):
            names.setdefault(module, name)
        for name in compiled:
            recorder.note_unseen(
                f"{name or 'the model'} is compiled: activations and their gradients inside it are not observed, as "
                "hooks run in eager mode only; observe the run without torch.compile to see them"
            )
        self.expects_calls: bool = bool(names) and not compiled
        self._residuals = ResidualSums(recorder)
        self._again = RecomputationCheck(recorder) if check else None
        self._hooks = {module: functools.partial(self._note_module_run, name) for module, name in names.items()}
        wrappers = {name: module for name, module in compiled.items() if hasattr(module, "_orig_mod")} if check else {}
        for name in compiled.keys() - wrappers.keys() if check else ():
            recorder.note_unseen(
                f"{name or 'the model'} was compiled in place: there is no eager original to compare with"
            )
        self._compiled = CompiledModuleCheck(recorder, wrappers) if wrappers else None

    def attach(self) -> None:
        """Attach the hooks."""
        if not self._handles:
            self._handles = [module.register_forward_hook(hook) for module, hook in self._hooks.items()]
        if self._compiled is not None:
            self._compiled.attach()

    def detach(self) -> None:
        """Remove all hooks, and let go of a step's tensors."""
        self._residuals.release_tensors()
        for handle in (*self._handles, *self._gradient_handles):
            handle.remove()
        self._handles.clear()
        self._gradient_handles.clear()
        if self._compiled is not None:
            self._compiled.detach()

    def end_step(self) -> None:
        """Forget what belongs to one step."""
        for handle in self._gradient_handles:
            handle.remove()
        self._gradient_handles.clear()
        self._seen.clear()
        self._last = self.loss = None
        self._residuals.release_tensors()
        if self._again is not None:
            self._again.end_step()

    def _note_module_run(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Note that a module has run in training; evaluation without gradients is left out."""
        if torch.compiler.is_compiling() or not self.recorder.sampling:
            return
        if torch.is_grad_enabled():
            in_backward = torch._C._current_graph_task_id() != -1
            self._look_at_outputs(name, module, inputs, output, in_backward)

    @make_safe_method
    def _look_at_outputs(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any, in_backward: bool
    ) -> None:
        if not in_backward:  # what runs again in a backward pass was noted in the first run
            self._residuals.note_module_run(name, inputs, output)
            for one in output if isinstance(output, tuple) else (output,):
                if type(one) is torch.Tensor and one.dim() > 1 and one.shape[-2] > FEWEST_ROWS:
                    find_position_collisions(self.recorder, name, one)
        found = list(find_float_tensors(output))
        if self._again is not None and found:
            self._again.note_output(name, found[0], in_backward)
        if not in_backward or name not in self._seen:
            for tensor in found:
                # One that a module around hands on was looked at last.
                if self._last is None or self._last[0]() is not tensor or self._last[1] != tensor._version:
                    self._look_at_output(name, module, tensor, inputs)
            self._seen.add(name)
        if not name:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            is_one = isinstance(loss, torch.Tensor) and loss.dtype.is_floating_point and loss.numel() == 1
            self.loss = loss.detach() if is_one and loss is not None and loss.requires_grad else None

    def _look_at_output(self, name: str, module: nn.Module, tensor: torch.Tensor, inputs: tuple[Any, ...]) -> None:
        kind = type(module).__name__
        record = self.recorder.count_tensor("activation", name, kind, tensor)
        if record is None:
            return
        # Of outputs that are all zeros the largest input and weight: did rounding make them so?
        zeros = record.last_amax == 0.0
        record.input_amax = max(map(_compute_amax, find_float_tensors(inputs)), default=None) if zeros else None
        own = [one for one in module._parameters.values() if one is not None] if zeros else []
        record.weight_amax = max(map(_compute_amax, find_float_tensors(own)), default=None)
        self._last = weakref.ref(tensor), tensor._version
        if tensor.requires_grad:
            hook = functools.partial(self._note_gradient, name, kind)
            self._gradient_handles.append(tensor.register_hook(hook))

    @make_safe_method
    def _note_gradient(self, name: str, kind: str, gradient: torch.Tensor) -> None:
        """Count the gradient of an output as it arrives."""
        if self.recorder.sampling:
            self.recorder.count_tensor("activation gradient", name, kind, gradient, self.recorder.scale)


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


SIXTEEN_BIT_DTYPES = (torch.bfloat16, torch.float16)
# A sum is looked at when a module takes it: between a layer's input and that lie some outputs and inputs of its own.
MOST_KEPT_OUTPUTS, MOST_KEPT_INPUTS = 3, 8
MOST_SAMPLED = 4096


@dataclass(slots=True)
class _Addend:
    """A tensor that may be an addend: its place in autograd's graph, its numbers, and the module that made it."""

    key: tuple[int, int]
    values: torch.Tensor
    version: int
    name: str | None


class ResidualSums:
    """Finds residual sums, of a module's output and a tensor that bypasses it, and counts what rounding loses of them.

    Which tensors a sum adds is read from autograd's graph. Some outputs and inputs are held until later ones or the
    end of the step take their place.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._outputs: deque[_Addend] = deque(maxlen=MOST_KEPT_OUTPUTS)
        self._inputs: deque[_Addend] = deque(maxlen=MOST_KEPT_INPUTS)

    def release_tensors(self) -> None:
        """Let go of a step's tensors."""
        self._outputs.clear()
        self._inputs.clear()

    def note_module_run(self, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        """Note that a module has run; modules inside it have been noted before."""
        first = inputs[0] if inputs else None
        if type(first) is torch.Tensor and first.dtype in SIXTEEN_BIT_DTYPES and first.grad_fn is not None:
            self._note_tensor(first, None)
        if type(output) is torch.Tensor and output.dtype in SIXTEEN_BIT_DTYPES and output.grad_fn is not None:
            self._note_tensor(output, name)

    def _note_tensor(self, tensor: torch.Tensor, name: str | None) -> None:
        key = make_graph_key(tensor.grad_fn, tensor.output_nr)
        known = next((one for one in (*self._outputs, *self._inputs) if one.key == key), None)
        if known is None:
            self._measure_sum(tensor)
        if name is None:
            if known is None or known.name is not None:
                self._inputs.append(_Addend(key, tensor.detach(), tensor._version, known.name if known else None))
        elif known is None:
            self._outputs.append(_Addend(key, tensor.detach(), tensor._version, name))

    def _measure_sum(self, total: torch.Tensor) -> None:
        """Measure the loss of a sum's smaller addend, if both addends are noted tensors."""
        node: Any = total.grad_fn
        if not total.numel() or node.name() != "AddBackward0" or len(node.next_functions) != 2:
            return
        held = {one.key: one for one in (*self._inputs, *self._outputs)}
        parts = [held.get(make_graph_key(*pair)) for pair in node.next_functions]
        first, second = parts[0], parts[1]
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
        added, past, name = samples[small], samples[1 - small], (first, second)[small].name
        if name is None:
            return
        record = self.recorder.record.residuals.setdefault(name, ResidualRecord(name, total.dtype))
        record.stream, record.added = sizes[1 - small], sizes[small]
        count_changes(record.change, past, _sample_rows(total), added)


def make_graph_key(node: Any, number: int) -> tuple[int, int]:
    """Return a key that tells the outputs of a graph's operations apart within a thread."""
    return (-1 if node is None else node._sequence_nr(), number)


def _sample_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return some rows of a tensor at even distances."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.detach().reshape(1, 1)
    most = max(1, MOST_SAMPLED // max(1, rows.shape[1]))
    return to_float64(rows[:: max(1, -(-rows.shape[0] // most))][:most, :MOST_SAMPLED].reshape(-1)).cpu()


# The whole numbers up to which each format has all.
EXACT_INTEGERS_UP_TO = {torch.bfloat16: 256, torch.float16: 2048}
FIRST_REPEATS_WINDOW = 8
FEWEST_ROWS = min(EXACT_INTEGERS_UP_TO.values()) + FIRST_REPEATS_WINDOW
# As many pairs of equal neighbours chance does not place where rounding does.
FEWEST_REPEATS = 16
# Two positions may have one sine in 8 bits.
MOST_CHANCE_REPEATS = 0.2


def find_position_collisions(recorder: Recorder, name: str, output: torch.Tensor) -> None:
    """Record an output whose positions were counted in 16 bits: a column repeats just where rounded integers do."""
    if name in recorder.record.positions or not output.is_floating_point() or not output.numel():
        return
    rows = output.detach()[(0,) * (output.dim() - 2)]
    for dtype, start in EXACT_INTEGERS_UP_TO.items():
        if len(rows) <= start + FIRST_REPEATS_WINDOW:
            continue
        positions = torch.arange(len(rows), device=rows.device, dtype=torch.float32).to(dtype)
        expected = positions[1:] == positions[:-1]
        end = start + FIRST_REPEATS_WINDOW
        columns = _find_columns_repeating_at(rows[start : end + 1], expected[start:end])
        if not bool(columns.any()) or int(expected.sum()) < FEWEST_REPEATS:
            continue
        if bool(_find_columns_repeating_at(rows[:, columns], expected).any()):
            recorder.record.positions[name] = PositionsRecord(name, dtype, len(rows))
            return


def _find_columns_repeating_at(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the columns whose elements repeat wherever they are expected to, and hardly anywhere else."""
    repeats = rows[1:] == rows[:-1]
    return repeats[expected].all(0) & (repeats[~expected].double().mean(0) < MOST_CHANCE_REPEATS)


class GradientHooks:
    """Watches gradients as backward passes hand them to parameters, and as they are added to those that are there.

    Args:
        recorder: what is written to; its record has the parameters.
        named: parameters by name.

    Attributes:
        arrived: names whose gradients were looked at in this step.
    """

    def __init__(self, recorder: Recorder, named: Mapping[str, torch.Tensor]) -> None:
        self.recorder = recorder
        self.arrived: set[str] = set()
        self._named = {name: one for name, one in named.items() if one.requires_grad}
        self._handles: list[RemovableHandle] = []
        self._followed: set[str] = set()
        # Samples of a gradient that is there and of the one that is added to it, until it has been.
        self._addends: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self) -> None:
        """Attach the hooks."""
        for name, parameter in self._named.items() if not self._handles else ():
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_hook(functools.partial(self._note_arriving_gradient, name)))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._followed.clear()

    def end_step(self) -> None:
        """Forget what belongs to one step."""
        self.arrived.clear()
        self._addends.clear()

    @make_safe_method
    def _note_arriving_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Count a gradient that arrives, and keep samples of it and of the one that it is added to, if there is one."""
        if not self.recorder.sampling:
            return
        kind, parameter = self.recorder.record.parameters[name].kind, self._named[name]
        if self.recorder.count_tensor("weight gradient", name, kind, gradient, self.recorder.scale) is not None:
            self.arrived.add(name)
        self._addends.pop(name, None)
        held = None if parameter.grad is None else read_numbers(parameter.grad)
        incoming = None if held is None else read_numbers(gradient)
        if held is None or incoming is None or held.flat.numel() != incoming.flat.numel():
            return
        key = self.recorder.get_sampling_key(name)
        self._addends[name] = take_sample(held.flat, key), take_sample(incoming.flat, key)
        if name not in self._followed:
            self._followed.add(name)
            hook = functools.partial(self._compare_sum, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            # First of all: another hook may step by the gradient and free it. torch runs them in the order of a dict.
            hooks: Any = parameter._post_accumulate_grad_hooks
            for other in [*hooks][:-1]:
                hooks[other] = hooks.pop(other)

    @make_safe_method
    def _compare_sum(self, name: str, parameter: torch.Tensor) -> None:
        """Compare a gradient that has been added with the exact sum."""
        addends = self._addends.pop(name, None)
        found = None if addends is None or parameter.grad is None else read_numbers(parameter.grad)
        # Zeros that `zero_grad(set_to_none=False)` left swallow nothing.
        if found is None or addends is None or not addends[0].any():
            return
        held, incoming = addends
        now = take_sample(found.flat, self.recorder.get_sampling_key(name))
        record = self.recorder.record.parameters[name]
        record.accumulation = record.accumulation or RealisedChanges()
        count_changes(record.accumulation, held, now, incoming)
