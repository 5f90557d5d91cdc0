"""Forward: the replacement of a module's ``forward`` while a scaler is attached."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import nn

from ..._torch_versions import is_exporting
from ...subclass.models._replaced_forward import ReplacedForward
from .._pytree import map_tensors
from ..compiled._runtime_operators import marked
from ._backward import Backward


class Forward(ReplacedForward):
    """A module's ``forward``, watched. Copies of the module get the one that it had, and pickles, too."""

    reads_graphs = True
    refusal = (
        "torch.jit.script cannot compile a model that has an AdaptiveGradScaler: give it a copy, which has none, "
        "torch.jit.script(copy.deepcopy(model)), or call scaler.detach() before"
    )

    def __init__(self, module: nn.Module, backward: Backward) -> None:
        super().__init__(module)
        self._backward = backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; the plain one where autograd does not differentiate it."""
        if not torch.is_grad_enabled() or is_exporting() or self._backward.idle:
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._marked(self.inner(*args, **kwargs))
        return self._with_edges(args, kwargs)

    def _marked(self, out: Any) -> Any:
        """Mark outputs in a compiled graph for the scaler's backend."""
        wide = self._widens()
        return map_tensors(out, lambda x: marked(x, self._backward.handle, wide))

    @abc.abstractmethod
    def _with_edges(self, args: tuple, kwargs: dict) -> Any:
        """The forward pass with edges; the plain one where it is `traced`."""

    @abc.abstractmethod
    def _widens(self) -> bool:
        """Whether float16 outputs become float32."""


def traced() -> bool:
    """Whether a forward pass is recorded or transformed as a function, and not run to be differentiated by autograd."""
    return torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
