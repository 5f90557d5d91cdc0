"""Whether an operator's result is a gradient, which gradients="first" rounds to a plain tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch_versions import saved_tensor_hooks

FIRST, COMPONENTS = "first", "components"
_graph_task = torch._C._current_graph_task_id
_unrounded = threading.local()


def check_gradients(gradients: str) -> str:
    """Raise unless this is a way of keeping gradients."""
    if gradients not in (FIRST, COMPONENTS):
        raise ValueError(
            f"gradients={gradients!r}: allowed are 'first' (a plain tensor) and 'components' (an MCTensor)"
        )
    return gradients


def in_backward() -> bool:
    """Return whether a backward pass is running."""
    return _graph_task() != -1


def gives_plain_gradient(gradients: str, has_gradient: bool) -> bool:
    """Return whether a result is a gradient that is to be rounded to a plain tensor.

    has_gradient: whether an operand may be a gradient: a plain one, or the ones that a backward pass begins with. What
    is computed of saved values alone keeps all components: a difference or a comparison of them needs every digit.
    """
    return has_gradient and _graph_task() != -1 and gradients == FIRST and _is_gradient() and not _is_accumulating()


def gives_plain_gradient_of(x: Any) -> bool:
    """Return whether the gradient of a function of one MCTensor is a plain tensor."""
    return gives_plain_gradient(x._gradients, x._seeds_backward or len(x._parts) == 1)


def stores_plain_gradient(gradients: str) -> bool:
    """Return whether a gradient is being stored in a leaf of plain gradients: one in the mode "first", or plain."""
    if _graph_task() == -1 or not _is_accumulating():
        return False
    is_gradient = gradients == FIRST and _is_gradient()
    return is_gradient or not hasattr(getattr(torch._C._current_autograd_node(), "variable", None), "_parts")


@contextmanager
def unrounded_results() -> Iterator[None]:
    """Return a context in which no result is rounded, for the steps of one operator."""
    before = getattr(_unrounded, "on", False)
    _unrounded.on = True
    try:
        yield
    finally:
        _unrounded.on = before


def _node_name() -> str:
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def _is_accumulating() -> bool:
    """Return whether a leaf's gradient is being stored; other code that runs then is a hook (an optimizer step)."""
    return _node_name().endswith("AccumulateGrad")


def _is_gradient() -> bool:
    """Return whether results are gradients here; not where activation checkpointing runs the forward pass again."""
    if getattr(_unrounded, "on", False):
        return False
    if not torch.is_grad_enabled():
        return True
    return saved_tensor_hooks() is None and not _node_name().startswith("Checkpoint")
