"""The base class of tensors that are made of several plain ones: their memory, copies and refusals."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor


class CompositeTensor(torch.Tensor):
    """A tensor whose value several plain tensors hold together."""

    # What the value is, the expressions that give the plain tensors, and the attributes of `__dict__` that hold them.
    _value_is: ClassVar[str]
    _parts_are: ClassVar[str]
    _own: ClassVar[tuple[str, ...]]

    __torch_function__: ClassVar[Callable[..., Any]] = torch._C._disabled_torch_function_impl

    if TYPE_CHECKING:  # torch types these as a plain tensor's

        def clone(self, *, memory_format: torch.memory_format | None = None) -> Self: ...
        def detach(self) -> Self: ...
        def decode(self, dtype: torch.dtype = torch.float64) -> Tensor: ...

    def _inner(self) -> list[Tensor]:
        """Return the plain tensors."""
        raise NotImplementedError

    def _like(self, inner: list[Tensor]) -> Self:
        """Return a tensor of other plain ones, with what else this one has."""
        raise NotImplementedError

    def share_memory_(self) -> Self:
        """Move the plain tensors to memory that processes share, in place."""
        for part in self._inner():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether processes share the memory."""
        return all(part.is_shared() for part in self._inner())

    def tolist(self) -> float | list[Any]:  # type: ignore[override]
        """Return the values, rounded to float64, as Python floats in nested lists."""
        return self.detach().decode(torch.float64).tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise TypeError: NumPy has no such type."""
        raise TypeError(f"NumPy has no type for {self._value_is}: x.decode().numpy(), or {self._parts_are}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **options: Any) -> Any:
        raise TypeError(f"DLPack has no type for {self._value_is}: hand over x.decode(), or {self._parts_are}")

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if self.dim() == 0 and specification else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            copied: Self = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError("deepcopy takes leaves only, as for every tensor: copy x.detach(), or use x.clone()")
        with torch._C._DisableFuncTorch():  # inside a transform too a copy is no part of what is transformed
            made = self._like([deepcopy(part, memo) for part in self._inner()])
            made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in self._own})
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        return made
