"""A context in which every operator's output is rounded, forward and backward, on this thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch_versions import get_saved_tensor_hooks, is_exporting
from ..arithmetic._float32_products import iterate_tensors
from ..formats import Format
from ..rounding import Nearest, Rounding
from ..subclass import is_written_argument
from ..subclass.models._conversion import wrap_recomputed_function, wrap_reentrant_recomputed_function
from ._rounder import Rounder

# Outputs other than the first that only the backward pass reads: they are inside the operator, in float32.
_BACKWARD_ONLY_OUTPUTS_BY_OPERATOR = {
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm"), (1, 2)),
    **dict.fromkeys(("_native_batch_norm_legit", "_batch_norm_with_update", "miopen_batch_norm"), (1, 2)),
    **dict.fromkeys(("_fused_rms_norm", "_weight_norm_interface", "nll_loss_forward", "nll_loss2d_forward"), (1,)),
    **dict.fromkeys(("_ctc_loss", "_cudnn_ctc_loss", "_thnn_fused_gru_cell", "_efficient_attention_forward"), (1,)),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"), (1,)),
    **dict.fromkeys(("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"), (1, 8)),
    **dict.fromkeys(("_scaled_dot_product_fused_attention_overrideable", "_cudnn_attention_forward"), (1, 8)),
    **{"_thnn_fused_lstm_cell": (2,), "_flash_attention_forward": (1, 4)},
}
# Arguments that are written although the schema does not say so.
_RUNNING_STATISTICS_BY_OPERATOR = dict.fromkeys(
    ("native_batch_norm", "miopen_batch_norm", "cudnn_batch_norm"), ((3, "running_mean"), (4, "running_var"))
)
# Views although the schema does not say so, and memory without numbers.
_OPERATORS_WITHOUT_NEW_NUMBERS = frozenset(
    {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "empty", "empty_like", "empty_strided"}
    | {"empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_", "set_"}
)


class OperatorResultKinds(NamedTuple):
    """Which results of an operator are new, or written into an argument."""

    name: str  # such as "aten.addmm"
    new_result_positions: tuple[int, ...]  # of tensors, or lists of tensors, in new memory that are to be rounded
    written_arguments: tuple[tuple[int, str], ...]  # position and name


@cache
def read_operator_result_kinds(operator: torch._ops.OpOverload) -> OperatorResultKinds:
    """Return an operator's results by its schema, with exceptions that schemas do not tell.

    >>> read_operator_result_kinds(torch.ops.aten.addmm.default).new_result_positions
    (0,)
    >>> read_operator_result_kinds(torch.ops.aten.relu_.default).written_arguments
    ((0, 'self'),)
    >>> read_operator_result_kinds(torch.ops.aten.transpose.int).new_result_positions
    ()
    >>> read_operator_result_kinds(torch.ops.aten.native_layer_norm.default).new_result_positions
    (0,)
    """
    schema = operator._schema
    namespace, _, base = schema.name.partition("::")
    name = f"{namespace}.{base}"
    known = namespace == "aten"
    if known and base in _OPERATORS_WITHOUT_NEW_NUMBERS:
        return OperatorResultKinds(name, (), ())
    statistics = _BACKWARD_ONLY_OUTPUTS_BY_OPERATOR.get(base, ()) if known else ()
    fresh = (i for i, value in enumerate(schema.returns) if value.alias_info is None and "Tensor" in str(value.type))
    written = tuple((i, argument.name) for i, argument in enumerate(schema.arguments) if is_written_argument(argument))
    written = written or (_RUNNING_STATISTICS_BY_OPERATOR.get(base, ()) if known else ())
    return OperatorResultKinds(name, tuple(i for i in fresh if i not in statistics), written)


_LEAF_SEQUENCE_NUMBER = 2**64 - 1


class _RoundingMode(TorchDispatchMode):
    """Rounds below autograd, where composite functions have been taken apart and nothing is fused.

    It hooks the autograd nodes made since it was created, on one thread, to round their gradients. The roundings are
    attached to the nodes, not to the time at which they run, so a backward pass from anywhere passes through them, and
    they go when the graph goes. No node is held here.
    """

    def __init__(self, rounder: Rounder) -> None:
        super().__init__()
        self.rounder = rounder
        # Of the backward pass in which it was entered, and of the one that runs through its nodes.
        self.graph_task_id, self._backward_graph_task_id = torch._C._current_graph_task_id(), -1
        self._wrap_recomputation = partial(_emulate_recomputation, rounder)
        self._unhooked_outputs: list = []
        self._unhooked_output_refs: list[weakref.ref] = []
        self._wrapped_pack_hook: Callable | None = None
        self._was_entered_with_grad = torch.is_grad_enabled()
        self._first_sequence_number = torch.autograd._get_sequence_nr()
        self._hooked_sequence_numbers: set[int] = set()
        self._hooked_leaf_by_id: dict[int, weakref.ref[Tensor]] = {}
        self._leaf_hook_handles: list = []

    def __del__(self) -> None:
        for handle in self._leaf_hook_handles:
            handle.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != self.graph_task_id:
            return func(*args, **kwargs)
        self.hook_last_outputs()
        out = func(*args, **kwargs)
        out = self._round_results(read_operator_result_kinds(func), out, args, kwargs)
        if torch.is_grad_enabled():
            self._unhooked_outputs.append(out)
        elif self._was_entered_with_grad:
            self._unhooked_output_refs += [weakref.ref(value) for value in iterate_tensors(out)]
        return out

    def hook_last_outputs(self) -> None:
        """Hook the nodes of the last outputs, which autograd has created by now.

        What a custom Function makes without gradients may get the Function's node when that returns.
        """
        if not torch.is_grad_enabled():
            return
        promised = (promise() for promise in self._unhooked_output_refs)
        for value in (*self._unhooked_outputs, *promised):
            for tensor in iterate_tensors(value):
                self.hook_backward_graph(tensor)
        self._unhooked_outputs.clear()
        self._unhooked_output_refs.clear()
        hooks = get_saved_tensor_hooks()
        if hooks is not None and hooks[0] is not self._wrapped_pack_hook:
            self._wrapped_pack_hook = hooks[0]
            wrap_recomputed_function(self._wrapped_pack_hook, self._wrap_recomputation, "emulate")

    def release_graphs(self) -> None:
        """Release the last outputs and the pack hook, which hold graphs whose nodes hold the mode."""
        self._unhooked_outputs.clear()
        self._wrapped_pack_hook = None

    def _round_results(self, results: OperatorResultKinds, out, args: tuple, kwargs: dict):
        """Round an operator's results, and return its output."""
        name = results.name
        if name == "aten.lift_fresh":  # hands out memory that Python's caller may own, which must not be written
            out = self.rounder.round_copy(out, name)
        else:
            values = out if isinstance(out, tuple) else (out,)
            for i in results.new_result_positions:
                self._round_tensors(values[i], name)
        for position, key in results.written_arguments:
            value = args[position] if position < len(args) else kwargs.get(key)
            self._round_tensors(value, name)
            if torch.is_grad_enabled():
                # A write through a view gives the tensor that is viewed a new node.
                self._unhooked_outputs += [
                    tensor._base for tensor in iterate_tensors(value) if tensor._base is not None
                ]
        return out

    def _round_tensors(self, value, name: str) -> None:
        for tensor in iterate_tensors(value):
            self.rounder.round_in_place(tensor, name)

    def hook_backward_graph(self, tensor: Tensor) -> None:
        """Hook the node that made a tensor, and all nodes before it without hooks."""
        todo: list[Any] = [tensor.grad_fn]
        while todo:
            node = todo.pop()
            number = -1 if node is None else node._sequence_nr()
            if number == _LEAF_SEQUENCE_NUMBER:
                self._hook_leaf(node.variable)
            elif number >= self._first_sequence_number and number not in self._hooked_sequence_numbers:
                self._hooked_sequence_numbers.add(number)
                self._hook_node(node)
                todo += [child for child, _ in node.next_functions]

    def _hook_node(self, node) -> None:
        """Register both hooks of a node: on the gradients that arrive, and on those that it gives."""
        name = node.name()
        if name == "CompiledFunctionBackward":
            raise NotImplementedError(
                "emulate met code that torch.compile has compiled, whose operators cannot be rounded one by one: "
                "call the module as it was before torch.compile"
            )
        wrap_reentrant_recomputed_function(node, name, self._wrap_recomputation, "emulate")
        node.register_prehook(partial(self._round_incoming_gradients, name))
        # Before the results of several nodes are summed.
        node.register_hook(lambda gradients, _: self._round_gradients(gradients, name))

    def _hook_leaf(self, leaf: Tensor) -> None:
        """Hook a leaf so that the sums of its gradients are rounded, over its uses and over backward passes."""
        known = self._hooked_leaf_by_id.get(id(leaf))
        if known is not None and known() is leaf:
            return
        self._hooked_leaf_by_id[id(leaf)] = weakref.ref(leaf)
        me = weakref.ref(self)

        def get_mode_in_backward() -> _RoundingMode | None:
            """Return the graph's roundings while a backward pass through it runs."""
            owner = me()
            is_running = owner is not None and owner._backward_graph_task_id == torch._C._current_graph_task_id()
            return owner if is_running else None

        def round_gradient_sum(gradient: Tensor | None) -> Tensor | None:
            owner = get_mode_in_backward()
            return None if owner is None or gradient is None else owner.rounder.round_copy(gradient, "AccumulateGrad")

        def round_accumulated_gradient(leaf: Tensor) -> None:
            owner = get_mode_in_backward()
            if owner is not None and leaf.grad is not None:
                owner.rounder.round_in_place(leaf.grad, "AccumulateGrad")

        self._leaf_hook_handles.append(leaf.register_post_accumulate_grad_hook(round_accumulated_gradient))
        self._leaf_hook_handles.append(leaf.register_hook(round_gradient_sum))

    def _round_incoming_gradients(self, name: str, gradients: tuple[Tensor | None, ...]) -> tuple:
        """Round incoming gradients, which may be sums or come from outside (a node's pre-hook)."""
        self._backward_graph_task_id = torch._C._current_graph_task_id()
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "emulate rounds first gradients only: create_graph=True asks for gradients of gradients"
            )
        return self._round_gradients(gradients, f"the gradient for {name}")

    def _round_gradients(self, gradients: tuple[Tensor | None, ...], source: str) -> tuple:
        # A number of the format stays as it is, so that rounding twice changes nothing.
        return tuple(None if one is None else self.rounder.round_copy(one, source) for one in gradients)


_thread_state = threading.local()


def _get_entered_modes() -> list[_RoundingMode]:
    """Return the modes that are entered on this thread, the innermost last."""
    modes: list[_RoundingMode] = _thread_state.__dict__.setdefault("modes", [])
    return modes


class RoundingRegion:
    """A `with` block in which operators are rounded; inside a block of the same settings it joins that one.

    Entering raises RuntimeError inside a block of other settings, a transform of torch.func and forward mode, and
    NotImplementedError where a graph is recorded (torch.export, torch.jit.trace, make_fx).
    """

    def __init__(self, rounder: Rounder) -> None:
        self.rounder = rounder
        self._entered_modes: list[tuple[_RoundingMode, bool] | None] = []

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    def __enter__(self) -> RoundingRegion:
        modes = _get_entered_modes()
        if modes and modes[-1].graph_task_id == torch._C._current_graph_task_id():
            rounder, around = self.rounder, modes[-1].rounder
            if around.settings != rounder.settings:
                raise RuntimeError(
                    f"emulation of {rounder.format.name} inside an emulation of {around.format.name} with other "
                    "settings: each operator is rounded once, so one of them has to end first"
                )
            self._entered_modes.append(None)
            return self
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            raise RuntimeError(
                "emulation inside grad, vmap or another transform of torch.func, or in forward mode, is not possible: "
                "derivatives could not be rounded; use loss.backward()"
            )
        refuse_recording()
        mode = _RoundingMode(self.rounder)
        self._entered_modes.append((mode, torch.backends.mha.get_fastpath_enabled()))
        modes.append(mode)
        # The fast path makes one operator of a whole transformer layer, in evaluation only.
        torch.backends.mha.set_fastpath_enabled(False)
        mode.__enter__()
        return self

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    def __exit__(self, kind, error, trace) -> None:
        entered = self._entered_modes.pop()
        if entered is None:
            return
        mode, fast = entered
        mode.__exit__(kind, error, trace)
        _get_entered_modes().pop()
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            if kind is None:
                mode.hook_last_outputs()
        finally:
            mode.release_graphs()


def describe_recording_refusal(recorder: str) -> str:
    """Return the error message for recording an emulated model as a graph."""
    return (
        f"{recorder} would record an emulated model without its roundings: end the emulation (its remove(); the handle "
        "is the model's forward) and record the plain model, whose numbers are float32's, or run the model as it is"
    )


def refuse_recording() -> None:
    """Raise if the operators that run are being recorded as a graph."""
    if is_exporting():
        raise NotImplementedError(describe_recording_refusal("torch.export"))
    if torch.jit.is_tracing():
        raise NotImplementedError(describe_recording_refusal("torch.jit.trace"))
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise NotImplementedError(describe_recording_refusal("make_fx"))


def _emulate_recomputation(rounder: Rounder, function: Callable) -> Callable:
    """Return a function that runs under emulation, for what checkpointing computes again."""

    @wraps(function)
    def run_emulated(*args, **kwargs):
        with RoundingRegion(rounder):
            return function(*args, **kwargs)

    return run_emulated


def region(
    format: Format | str | torch.dtype,
    rounding: Rounding | str = Nearest(),  # noqa: B008  frozen
    *,
    overflow: str | None = None,
) -> RoundingRegion:
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
    return RoundingRegion(Rounder(format, rounding, overflow))
