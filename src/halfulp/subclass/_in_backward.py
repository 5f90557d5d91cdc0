"""Whether an operator runs inside a backward pass, where results are gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FIRST, COMPONENTS = "first", "components"
_graph_task = torch._C._current_graph_task_id
_whole = threading.local()


def check_gradients(gradients: str) -> str:
    """Raise unless this is a way of keeping gradients."""
    if gradients not in (FIRST, COMPONENTS):
        raise ValueError(
            f"gradients={gradients!r}: allowed are 'first' (a plain tensor) and 'components' (an MCTensor)"
        )
    return gradients


def in_backward() -> bool:
    """Whether a backward pass is running."""
    return _graph_task() != -1


def rounds(gradients: str, has_gradient: bool) -> bool:
    """Whether a result with these gradients is one, to be rounded to a plain tensor.

    has_gradient: whether an operand may be a gradient: a plain one, or the ones that a backward pass begins with. What
    is computed of saved values alone keeps all components: a difference or a comparison of them needs every digit.
    """
    return has_gradient and _graph_task() != -1 and gradients == FIRST and _is_gradient() and not _stores()


def rounds_alone(x: Any) -> bool:
    """The same of a function of one MCTensor."""
    return rounds(x._gradients, x._begins or len(x._parts) == 1)


def stored_plain(gradients: str) -> bool:
    """Whether a gradient is being stored in a leaf that keeps plain ones: in the mode "first", or itself plain."""
    if _graph_task() == -1 or not _stores():
        return False
    is_gradient = gradients == FIRST and _is_gradient()
    return is_gradient or not hasattr(torch._C._current_autograd_node().variable, "_parts")


@contextmanager
def whole_results() -> Iterator[None]:
    """A block in which no result is rounded: the steps of one operator."""
    before = getattr(_whole, "on", False)
    _whole.on = True
    try:
        yield
    finally:
        _whole.on = before


def _node_name() -> str:
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def _stores() -> bool:
    """A leaf's gradient is being stored: what else runs then is a hook, which may step an optimizer."""
    return _node_name().endswith("AccumulateGrad")


def _is_gradient() -> bool:
    """Activation checkpointing runs the forward again inside the backward, with gradients enabled: that is none."""
    if getattr(_whole, "on", False):
        return False
    if not torch.is_grad_enabled():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None and not _node_name().startswith(
        "Checkpoint"
    )
