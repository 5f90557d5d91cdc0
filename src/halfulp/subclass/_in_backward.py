"""Autograd of the tensor subclasses: which results are gradients, conversion of plain ones, refused recorders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from .._torch_versions import get_saved_tensor_hooks
from ..kernels import hide_own_frames_from_compiler, is_under_transform

FIRST_GRADIENTS_MODE, COMPONENTS_GRADIENTS_MODE = "first", "components"
_get_graph_task_id = torch._C._current_graph_task_id
_rounding_state = threading.local()


def check_gradients_mode(gradients: str) -> str:
    """Raise unless this is a way of keeping gradients."""
    if gradients not in (FIRST_GRADIENTS_MODE, COMPONENTS_GRADIENTS_MODE):
        raise ValueError(
            f"gradients={gradients!r}: allowed are 'first' (a plain tensor) and 'components' (an MCTensor)"
        )
    return gradients


def is_in_backward() -> bool:
    """Return whether a backward pass is running."""
    return _get_graph_task_id() != -1


def wants_plain_result(gradients: str, has_gradient: bool) -> bool:
    """Return whether a result is a gradient that is to be rounded to a plain tensor."""
    # Only where an operand may be a gradient: a plain one, or the ones that a backward pass begins with. What is
    # computed of saved values alone keeps all components: a difference or a comparison of them needs every digit.
    return (
        has_gradient
        and _get_graph_task_id() != -1
        and gradients == FIRST_GRADIENTS_MODE
        and _is_computing_gradient()
        and not _is_in_accumulate_grad_node()
    )


def wants_plain_result_from(x: Any) -> bool:
    """Return whether the gradient of a function of one MCTensor is a plain tensor."""
    return wants_plain_result(x._gradients, x._is_filled_with_ones or len(x._parts) == 1)


def is_storing_plain_gradient(gradients: str) -> bool:
    """Return whether a gradient is being stored in a leaf of plain gradients: one in the mode "first", or plain."""
    if _get_graph_task_id() == -1 or not _is_in_accumulate_grad_node():
        return False
    is_gradient = gradients == FIRST_GRADIENTS_MODE and _is_computing_gradient()
    return is_gradient or not hasattr(getattr(torch._C._current_autograd_node(), "variable", None), "_parts")


@contextmanager
def disable_result_rounding() -> Iterator[None]:
    """Return a context in which no result is rounded, for the steps of one operator."""
    before = getattr(_rounding_state, "is_disabled", False)
    _rounding_state.is_disabled = True
    try:
        yield
    finally:
        _rounding_state.is_disabled = before


def _get_node_name() -> str:
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def _is_in_accumulate_grad_node() -> bool:
    """Return whether a leaf's gradient is being stored; other code that runs then is a hook (an optimizer step)."""
    return _get_node_name().endswith("AccumulateGrad")


def _is_computing_gradient() -> bool:
    """Return whether results are gradients here; not where activation checkpointing runs the forward pass again."""
    if getattr(_rounding_state, "is_disabled", False):
        return False
    if not torch.is_grad_enabled():
        return True
    return get_saved_tensor_hooks() is None and not _get_node_name().startswith("Checkpoint")


# torch calls this method of a gradient.
_GRADIENT_CONVERSION_METHOD = "__coerce_same_metadata_as_tangent__"


@hide_own_frames_from_compiler
def _convert_plain_gradient(gradient: Tensor, context: Any, expected: type | None = None) -> Tensor | None:
    """Convert a plain gradient to the class that torch expects; None (torch's error) where that is none of ours."""
    convert = getattr(expected, "_from_plain_tangent", None)
    return None if convert is None else convert(gradient.detach(), context)


# Of an output that the loss does not use, autograd hands over plain zeros.
setattr(torch.Tensor, _GRADIENT_CONVERSION_METHOD, _convert_plain_gradient)


def make_differentiable(
    operator: OpOverload, setup_context: Callable[..., None], backward: Callable[..., Any], jvp: Callable[..., Tensor]
) -> Callable[..., Any]:
    """Register the derivatives of an operator of halfulp's, and return a function that calls it."""
    # In transforms of torch.func and in forward mode operators have no derivatives of their own: there it is called as
    # an autograd function with `setup_context` and `jvp`.
    torch.library.register_autograd(operator, backward, setup_context=setup_context)

    class OperatorUnderTransform(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

    for name, function in (("setup_context", setup_context), ("backward", backward), ("jvp", jvp)):
        setattr(OperatorUnderTransform, name, staticmethod(function))

    def call(*arguments: Any) -> Any:
        return (OperatorUnderTransform.apply if is_under_transform() else operator)(*arguments)

    return call


_PROXY_MODE_KEY, _FAKE_MODE_KEY = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE
# How a model becomes plain, by the tensor class.
_PLAIN_MODEL_MAKER_BY_CLASS = {
    "ScaledTensor": "halfulp.scaled.unscalify",
    "MCTensor": "halfulp.mctensor.single_component",
}


def refuse_make_fx(kind: str) -> None:
    """Raise where make_fx records operators of real tensors. A compiler records those of tensors without values."""
    if torch._C._get_dispatch_mode(_PROXY_MODE_KEY) is not None and torch._C._get_dispatch_mode(_FAKE_MODE_KEY) is None:
        _refuse_recorder("make_fx", kind)


def refuse_jit_trace(kind: str) -> None:
    """Raise where torch.jit.trace records, which keeps what it cannot see as a constant, or fails at a shape."""
    if torch._C._is_tracing():
        _refuse_recorder("torch.jit.trace", kind)


def refuse_jit_trace_of_model(model: nn.Module) -> None:
    """Raise where torch.jit.trace records a call of a model with parameters of these classes."""
    if torch._C._is_tracing():
        for kind in {type(p.data).__name__ for p in model.parameters()} & _PLAIN_MODEL_MAKER_BY_CLASS.keys():
            refuse_jit_trace(kind)


def _refuse_recorder(recorder: str, kind: str) -> NoReturn:
    raise NotImplementedError(
        f"{recorder} would record constants in place of {kind}s, which are made of several tensors: record a plain "
        f"copy of the model, {_PLAIN_MODEL_MAKER_BY_CLASS[kind]}(copy.deepcopy(model)), or run the model as it is by "
        "torch.compile"
    )
