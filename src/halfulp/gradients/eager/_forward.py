"""Forward: the replacement of a module's ``forward`` while a scaler is attached."""

from __future__ import annotations

import abc
import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..._torch_versions import is_exporting
from ...subclass.models._float32_products import GraphReader
from .._pytree import map_tensors
from ..compiled._runtime_operators import marked
from ._backward import Backward


class NotScriptedError(NotImplementedError, AttributeError):
    """Raised to torch.jit.script for an attribute that it needs; to others the attribute is missing."""


class Forward(GraphReader):
    """A module's ``forward``, watched. Copies of the module get the one that it had, and pickles its class's."""

    def __init__(self, module: nn.Module, backward: Backward) -> None:
        self._module = weakref.ref(module)
        self._backward = backward
        self._own = module.__dict__.get("forward")
        # Callers look at the signature, to know which columns of a data set a model takes, and at the source.
        self.inner = self.__wrapped__ = module.forward

    @property
    def __code__(self) -> types.CodeType:
        """The plain forward pass's, which torch.export reads."""
        return self.inner.__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raise: torch.jit.script reads this first, and would compile the source of this class."""
        raise NotScriptedError(
            "torch.jit.script cannot compile a model that has an AdaptiveGradScaler: give it a copy, which has none, "
            "torch.jit.script(copy.deepcopy(model)), or call scaler.detach() before"
        )

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

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of a module that this is bound to, as a method's: accelerate wraps it and binds it anew.

        Bound to a copy of the module it runs the copy, plainly.
        """

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watched = module is self._module()
            return self(*args, **kwargs) if watched else plain_forward(module)(*args, **kwargs)

        return forward

    @abc.abstractmethod
    def _with_edges(self, args: tuple, kwargs: dict) -> Any:
        """The forward pass with edges; the plain one where it is `traced`."""

    @abc.abstractmethod
    def _widens(self) -> bool:
        """Whether float16 outputs become float32."""

    def put(self) -> None:
        """Replace the module's forward."""
        module = self._module()
        assert module is not None  # who attaches a scaler holds it
        module.forward = self

    def restore(self) -> None:
        """Restore the module's previous forward."""
        module = self._module()
        if module is not None:
            module.__dict__.pop("forward", None)
            if self._own is not None:
                module.forward = self._own

    def __deepcopy__(self, memo: dict) -> Callable:
        return plain_forward(memo[id(self._module())]) if self._own is None else copy.deepcopy(self._own, memo)

    def __reduce__(self) -> tuple:
        return plain_forward, (self._module(),)


def plain_forward(module: nn.Module) -> types.MethodType:
    """The ``forward`` of a module's class."""
    return types.MethodType(type(module).forward, module)


def traced() -> bool:
    """Whether a forward pass is recorded or transformed as a function, and not run to be differentiated by autograd."""
    return torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
