"""A mapping from tensors that keeps none of them alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Values by the identity of a tensor; an entry goes when its tensor does.

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
        self._references: dict[int, _Reference] = {}
        # A tensor that C++ still holds keeps its Python object, id included: the callback runs when both are gone.
        self._forget = functools.partial(_forget, self.by_id, self._references)
        for tensor, value in pairs:
            self[tensor] = value

    def __setitem__(self, tensor: torch.Tensor, value: Value) -> None:
        """Set a tensor's value."""
        self.reference(tensor)
        self.by_id[id(tensor)] = value

    def reference(self, tensor: torch.Tensor) -> weakref.ref:
        """A weak reference to a tensor that has a value, or is about to get one."""
        key = id(tensor)
        known = self._references.get(key)
        if known is None:
            known = self._references[key] = _Reference(tensor, self._forget)
            known.key = key
        return known

    def __getitem__(self, tensor: torch.Tensor) -> Value:
        """A tensor's value; raises KeyError where there is none."""
        return self.by_id[id(tensor)]

    def get(self, tensor: torch.Tensor, default: Value | None = None) -> Value | None:
        """A tensor's value, or the default."""
        return self.by_id.get(id(tensor), default)

    def pop(self, tensor: torch.Tensor, default: Value | None = None) -> Value | None:
        """Take a tensor's value out."""
        self._references.pop(id(tensor), None)
        return self.by_id.pop(id(tensor), default)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a value."""
        return id(tensor) in self.by_id

    def __len__(self) -> int:
        """How many living tensors have one."""
        return len(self.by_id)

    def values(self) -> Iterator[Value]:
        """The values, in the order in which their tensors came."""
        return iter(list(self.by_id.values()))


class _Reference(weakref.ref):
    """A weak reference that knows its tensor's id when the tensor is gone."""

    __slots__ = ("key",)


def _forget(values: dict, references: dict, reference: _Reference) -> None:
    values.pop(reference.key, None)
    references.pop(reference.key, None)
