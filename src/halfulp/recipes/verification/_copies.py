"""Copies of a model, each as it was when the first was made, for runs that must not change one another."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Every run begins with these random bits.
_SEED = 0


class _KeptTensors(TorchFunctionMode):
    """Lets `copy.deepcopy` copy activations that a module keeps; torch copies only leaves."""

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if function is Tensor.__deepcopy__ and not arguments[0].is_leaf:
            kept, memo = arguments
            if id(kept) not in memo:
                memo[id(kept)] = kept.detach().clone().requires_grad_(True)
            return memo[id(kept)]
        return function(*arguments, **(options or {}))


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that keeps what `copy.deepcopy` drops: the hooks of parameters and of buffers.

    Raises:
        ValueError: a parameter has a hook that runs after its gradient is accumulated: it acts on objects outside the
            model, such as an optimizer, which a copy must not touch; or an object of the model cannot be copied.
    """
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a hook that runs after its gradient is accumulated and may change what is "
                "outside the model: remove it for the proof (handle.remove()), and register it again afterwards"
            )
    try:
        with _KeptTensors():
            other = copy.deepcopy(model)
    except (RuntimeError, TypeError, copy.Error) as error:
        raise ValueError(f"the model cannot be copied, and the proof runs on copies: {error}") from error
    for ours, theirs in zip(_tensors(model), _tensors(other), strict=True):
        for hook in (ours._backward_hooks or {}).values():
            theirs.register_hook(hook)
    return other


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from (buffer for buffer in model.buffers() if buffer.requires_grad)


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """A block with the same state of Python's, NumPy's and torch's generators each time, restored afterwards."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            if numpy is not None:
                numpy.random.seed(_SEED)
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block in which runs of copies must not change the model; its gradients are put aside meanwhile.

    Raises:
        ValueError: they gave the model itself gradients, or wrote its parameters or buffers: a function that the model
            keeps (a lambda, a closure) reaches the model, and its copies are no copies.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: (tensor.grad, tensor._version) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    reached = []
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            grad, version = before[name]
            if tensor.grad is not None or tensor._version != version:
                reached.append(name)
            tensor.grad = grad
    if reached:
        raise ValueError(
            f"running a copy of the model reached the model's own {reached[0]!r}: a function that the model keeps "
            "refers to the model, so that its copies are no copies; make it a method or a module"
        )
