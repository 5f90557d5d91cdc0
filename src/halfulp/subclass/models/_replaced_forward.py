"""ReplacedForward: a module's ``forward`` that runs under something, with the one that it had inside."""

from __future__ import annotations

import abc
import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class NotScriptedError(NotImplementedError, AttributeError):
    """Raised to torch.jit.script for an attribute that it needs; to others the attribute is missing."""


class ReplacedForward(abc.ABC):
    """A module's ``forward``, replaced. Copies and pickles of the module get the one that it had.

    Attributes:
        own: the forward that somebody else had given the module itself; None for that of its class.
        inner: what runs inside.
        reads_graphs: whether what compiles the model reads the products of its graph, which then are those it wrote.
        refusal: what torch.jit.script is told, which would compile the source of this class.
    """

    refusal: str
    reads_graphs = False

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        # Callers look at the signature, to know which columns of a data set a model takes, and at the source.
        self.inner = self.__wrapped__ = module.forward

    @property
    def __code__(self) -> types.CodeType:
        """The plain forward pass's, which torch.export reads."""
        return self.inner.__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raise: torch.jit.script reads this first."""
        raise NotScriptedError(self.refusal)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of a module that this is bound to, as a method's: accelerate wraps it and binds it anew.

        Bound to a copy of the module it runs the copy.
        """

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (self if module is self._module() else self._of(module))(*args, **kwargs)

        return forward

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""

    def put(self) -> None:
        """Replace the module's forward."""
        module = self._module()
        assert module is not None  # who replaces it holds it
        module.forward = self

    def restore(self) -> None:
        """Restore the module's previous forward."""
        module = self._module()
        if module is not None:
            module.__dict__.pop("forward", None)
            if self.own is not None:
                module.forward = self.own

    def _of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that a copy of the module has."""
        return plain_forward(module) if self.own is None else copy.deepcopy(self.own, {id(self._module()): module})

    def __deepcopy__(self, memo: dict) -> Callable[..., Any]:
        module = memo[id(self._module())]
        return plain_forward(module) if self.own is None else copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple:
        return _restored, (self._module(), self.own)


def plain_forward(module: nn.Module) -> types.MethodType:
    """Return the ``forward`` of a module's class."""
    return types.MethodType(type(module).forward, module)


def _restored(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    return plain_forward(module) if own is None else own
