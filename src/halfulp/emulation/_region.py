"""A context in which every operator's output is rounded, on this thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch_versions import is_exporting, saved_tensor_hooks
from ..formats import Format
from ..rounding import Nearest, Rounding
from ..subclass.models._checkpointing import capture_hooks
from ._backward import Graph
from ._new_numbers import Results, read_results
from ._rounder import Rounder


class _Mode(TorchDispatchMode):
    """Rounds below autograd, where composite functions have been taken apart and nothing is fused."""

    def __init__(self, rounder: Rounder) -> None:
        super().__init__()
        self.rounder = rounder
        self.task = torch._C._current_graph_task_id()
        self._emulated = partial(_emulate_function, rounder)
        self._graph = Graph(rounder, self._emulated)
        self._pending: list = []
        self._promised: list[weakref.ref] = []
        self._pack: Callable | None = None
        self._with_gradients = torch.is_grad_enabled()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != self.task:
            return func(*args, **kwargs)
        self.link()
        out = func(*args, **kwargs)
        out = self._settle(read_results(func), out, args, kwargs)
        if torch.is_grad_enabled():
            self._pending.append(out)
        elif self._with_gradients:
            self._promised += [weakref.ref(value) for value in _list_tensors(out)]
        return out

    def link(self) -> None:
        """Hook the nodes of the last outputs, which autograd has created by now.

        What is made without gradients inside a custom Function may get the Function's node when that returns.
        """
        if not torch.is_grad_enabled():
            return
        for value in self._pending:
            if isinstance(value, Tensor):
                self._graph.add(value)
            else:
                for tensor in _list_tensors(value):
                    self._graph.add(tensor)
        self._pending.clear()
        for promise in self._promised:
            promised = promise()
            if promised is not None:
                self._graph.add(promised)
        self._promised.clear()
        hooks = saved_tensor_hooks()
        if hooks is not None and hooks[0] is not self._pack:
            self._pack = hooks[0]
            capture_hooks(self._pack, self._emulated, "emulate")

    def _settle(self, results: Results, out, args: tuple, kwargs: dict):
        """Round an operator's results, and return its output."""
        rounder, name = self.rounder, results.name
        count = 0
        if results.aliases_caller:
            out = rounder.rounded(out, name)
            count = int(out.is_floating_point() or out.is_complex())
        elif type(out) is Tensor:
            if results.fresh:
                count = rounder.round_in_place(out, name)
        elif results.fresh:
            values = out if isinstance(out, tuple) else (out,)
            count = sum(self._round(values[i], name) for i in results.fresh)
        for position, key in results.written:
            value = args[position] if position < len(args) else kwargs.get(key)
            count += self._round(value, name)
            if torch.is_grad_enabled():
                # A write through a view gives the tensor that is viewed a new node.
                self._pending += [tensor._base for tensor in _list_tensors(value) if tensor._base is not None]
        rounder.forward[name] += count
        rounder.plain[name] += not count
        if results.kept:
            rounder.kept[name] += results.kept
        return out

    def _round(self, value, name: str) -> int:
        if isinstance(value, Tensor):
            return self.rounder.round_in_place(value, name)
        if isinstance(value, list | tuple):
            return sum(self._round(item, name) for item in value)
        return 0


def _list_tensors(value) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list | tuple) else ()


_local = threading.local()


def _get_modes() -> list[_Mode]:
    if not hasattr(_local, "modes"):
        _local.modes = []
    return _local.modes


class Region:
    """A `with` block in which operators are rounded; inside a block of the same settings it joins that one.

    Entering raises RuntimeError inside a block of other settings, a transform of torch.func and forward mode, and
    NotImplementedError where a graph is recorded (torch.export, torch.jit.trace, make_fx).
    """

    def __init__(self, rounder: Rounder) -> None:
        self.rounder = rounder
        self._entered: list[tuple[_Mode, bool] | None] = []

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    def __enter__(self) -> Region:
        modes = _get_modes()
        if modes and modes[-1].task == torch._C._current_graph_task_id():
            _check_joins(self.rounder, modes[-1].rounder)
            self._entered.append(None)
            return self
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            raise RuntimeError(
                "emulation inside grad, vmap or another transform of torch.func, or in forward mode, is not possible: "
                "derivatives could not be rounded; use loss.backward()"
            )
        refuse_recording()
        mode = _Mode(self.rounder)
        self._entered.append((mode, torch.backends.mha.get_fastpath_enabled()))
        modes.append(mode)
        # The fast path makes one operator of a whole transformer layer, in evaluation only.
        torch.backends.mha.set_fastpath_enabled(False)
        mode.__enter__()
        return self

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    def __exit__(self, kind, error, trace) -> None:
        entered = self._entered.pop()
        if entered is None:
            return
        mode, fast = entered
        mode.__exit__(kind, error, trace)
        _get_modes().pop()
        torch.backends.mha.set_fastpath_enabled(fast)
        if kind is None:
            mode.link()


def describe_refusal(recorder: str) -> str:
    """Return the error message for recording an emulated model as a graph."""
    return (
        f"{recorder} would record an emulated model without its roundings: end the emulation (its remove(); the handle "
        "is the model's forward) and record the plain model, whose numbers are float32's, or run the model as it is"
    )


def refuse_recording() -> None:
    """Raise if the operators that run are being recorded as a graph."""
    if is_exporting():
        raise NotImplementedError(describe_refusal("torch.export"))
    if torch.jit.is_tracing():
        raise NotImplementedError(describe_refusal("torch.jit.trace"))
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise NotImplementedError(describe_refusal("make_fx"))


def _check_joins(rounder: Rounder, around: Rounder) -> None:
    if around.settings != rounder.settings:
        raise RuntimeError(
            f"emulation of {rounder.format.name} inside an emulation of {around.format.name} with other settings: each "
            "operator is rounded once, so one of them has to end first"
        )


def _emulate_function(rounder: Rounder, function: Callable) -> Callable:
    """Return a function that runs under emulation, for what checkpointing computes again."""
    if not rounder.replayable:
        raise NotImplementedError(
            f"emulate with {rounder.rounding!r} under activation checkpointing: the recomputation would draw other bits"
            "; take Stochastic() and torch.manual_seed"
        )

    @wraps(function)
    def under(*args, **kwargs):
        with Region(rounder):
            return function(*args, **kwargs)

    return under


def region(
    format: Format | str | torch.dtype,
    rounding: Rounding | str = Nearest(),  # noqa: B008  frozen
    *,
    overflow: str | None = None,
) -> Region:
    """Return a `with` block in which every operator's floating output is rounded, and the gradients of what it made.

    For losses and other code outside a model. The backward pass may run later and elsewhere: gradients are rounded
    because of the graph they pass through. Tensors that come from outside are read as they are, and a backward pass
    that runs inside the block is rounded just as one outside. Leave an optimizer's step out of the block: it would be
    rounded too.

    Args:
        format: a `Format`, its name or a torch dtype.
        rounding: a mode or its name.
        overflow: "inf", "nan" or "saturate" in place of the format's own policy.

    Returns:
        A context manager.

    Raises:
        ValueError: If the format is a block format, or lacks zero or negative numbers.

    >>> with region("e8m1"):
    ...     torch.ones(1) + 1.3
    tensor([2.])
    """
    return Region(Rounder(format, rounding, overflow))
