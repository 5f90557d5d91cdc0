"""A mapping from tensors that keeps none of them alive."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Values by the identity of a tensor; an entry is removed when its tensor is freed.

    Attributes:
        by_id: the values by `id(tensor)`, for loops that cannot pay for a method call.

    >>> import torch
    >>> tensor = torch.zeros(2)
    >>> known = TensorMap([(tensor, "zeros")])
    >>> known[tensor], len(known)
    ('zeros', 1)
    >>> del tensor
    >>> len(known)
    0
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, Value]] = ()) -> None:
        self.by_id: dict[int, Value] = {}
        self._references: dict[int, _KeyedReference] = {}
        # A tensor that C++ still holds keeps its Python object, id included: the callback runs when both are gone.
        self._forget = functools.partial(_forget_tensor, self.by_id, self._references)
        for tensor, value in pairs:
            self[tensor] = value

    def __setitem__(self, tensor: torch.Tensor, value: Value) -> None:
        """Set a tensor's value."""
        self.reference(tensor)
        self.by_id[id(tensor)] = value

    def reference(self, tensor: torch.Tensor) -> weakref.ref:
        """Return a weak reference to a tensor that has a value, or is about to get one."""
        key = id(tensor)
        known = self._references.get(key)
        if known is None:
            known = self._references[key] = _make_reference(tensor, self._forget)
            known.key = key
        return known

    def __getitem__(self, tensor: torch.Tensor) -> Value:
        """Return a tensor's value; raises KeyError where there is none."""
        return self.by_id[id(tensor)]

    def get(self, tensor: torch.Tensor) -> Value | None:
        """Return a tensor's value; None where there is none."""
        return self.by_id.get(id(tensor))

    def pop(self, tensor: torch.Tensor, default: Value | None = None) -> Value | None:
        """Remove and return a tensor's value."""
        self._references.pop(id(tensor), None)
        return self.by_id.pop(id(tensor), default)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has a value."""
        return id(tensor) in self.by_id

    def __len__(self) -> int:
        """Return how many living tensors have a value."""
        return len(self.by_id)

    def values(self) -> Iterator[Value]:
        """Return the values, in the order in which their tensors came."""
        return iter(list(self.by_id.values()))


class _KeyedReference(weakref.ref):
    """A weak reference that knows its tensor's id when the tensor is gone."""

    __slots__ = ("key",)
    key: int


class _TokenReference(_KeyedReference):
    """A reference to a tensor that must have no weak references, by its token."""

    __slots__ = ()

    def __call__(self) -> torch.Tensor | None:
        """The tensor, or None once it is gone."""
        token = super().__call__()
        return None if token is None else token.tensor


class _TensorToken:
    """An object with its tensor's lifetime, referenced weakly in its place."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _TokenKeeper:
    """Keeps a tensor's token among its attributes, and restores it after a swap of attributes.

    `torch.utils.swap_tensors`, by which nn.Module converts wrapper subclasses in place, exchanges the attributes of
    two tensors; those that belonged to the parameter then die with the other one.
    """

    __slots__ = ("token",)

    def __init__(self, token: _TensorToken) -> None:
        self.token = token

    def __del__(self) -> None:
        """Attach to the tensor again, if it lives and has no keeper."""
        attributes = self.token.tensor.__dict__
        if _KEEPER_ATTRIBUTE not in attributes:
            attributes[_KEEPER_ATTRIBUTE] = _TokenKeeper(self.token)

    def __reduce__(self) -> tuple:
        """A copy of a tensor is another tensor: nothing is copied or saved."""
        return OrderedDict, ()


_KEEPER_ATTRIBUTE = "_halfulp_keeper"


def _make_reference(tensor: torch.Tensor, forget: Callable[[_KeyedReference], None]) -> _KeyedReference:
    """Return a weak reference, through a token only where torch swaps tensors: a token's cycle is freed late."""
    if not (is_traceable_wrapper_subclass(tensor) or torch.__future__.get_swap_module_params_on_conversion()):
        return _KeyedReference(tensor, forget)
    keeper = tensor.__dict__.get(_KEEPER_ATTRIBUTE)
    if not isinstance(keeper, _TokenKeeper) or keeper.token.tensor is not tensor:
        keeper = tensor.__dict__[_KEEPER_ATTRIBUTE] = _TokenKeeper(_TensorToken(tensor))
    return _TokenReference(keeper.token, forget)


def _forget_tensor(values: dict, references: dict, reference: _KeyedReference) -> None:
    values.pop(reference.key, None)
    references.pop(reference.key, None)
