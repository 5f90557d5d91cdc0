"""The base class of both tensor subclasses: memory and copies, pickle, DataLoader, keys of cached compiled graphs."""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self, TypeVar

import torch
from torch import Tensor

from . import _rule_table as _fallback

Subclass = TypeVar("Subclass", bound=Tensor)


def _refuse_fully_shard(x: Tensor) -> NoReturn:
    raise NotImplementedError(
        f"fully_shard of {type(x).__name__} parameters: it gathers and reduces one plain tensor per parameter, and "
        "these have several. Use DistributedDataParallel, or shard plain parameters of a model made again "
        "(param_dtype= of hu.optim and hu.AdaptiveGradScaler work with fully_shard)"
    )


class CompositeTensor(torch.Tensor):
    """A tensor whose value several plain tensors hold together."""

    # What the value is, the expressions that give the plain tensors, and the attributes of `__dict__` that hold them.
    _value_description: ClassVar[str]
    _parts_expression: ClassVar[str]
    _value_attributes: ClassVar[tuple[str, ...]]

    __torch_function__: ClassVar[Callable[..., Any]] = torch._C._disabled_torch_function_impl

    if TYPE_CHECKING:  # torch types these as a plain tensor's

        def clone(self, *, memory_format: torch.memory_format | None = None) -> Self: ...
        def detach(self) -> Self: ...
        def decode(self, dtype: torch.dtype = torch.float64) -> Tensor: ...

    # fully_shard asks for the first of these before it changes a parameter, and older versions for the others.
    _fsdp_orig_uid = fsdp_pre_all_gather = fsdp_post_all_gather = property(_refuse_fully_shard)

    def __init_subclass__(cls) -> None:
        torch.utils.data._utils.collate.default_collate_fn_map[cls] = _stack_batch

    def _list_plain_tensors(self) -> list[Tensor]:
        """Return the plain tensors."""
        raise NotImplementedError

    def _make_like(self, inner: list[Tensor], requires_grad: bool) -> Self:
        """Return a leaf made of other plain tensors, otherwise like this one."""
        raise NotImplementedError

    @staticmethod
    def _from_plain_tangent(x: Tensor, context: Any) -> Tensor:
        """Return a plain gradient as a compiled backward pass was traced for: `context` is of `__tensor_flatten__`."""
        raise NotImplementedError

    def share_memory_(self) -> Self:
        """Move the plain tensors to memory that processes share, in place."""
        for part in self._list_plain_tensors():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether processes share the memory."""
        return all(part.is_shared() for part in self._list_plain_tensors())

    def tolist(self) -> float | list[Any]:  # type: ignore[override]
        """Return the values, rounded to float64, as Python floats in nested lists."""
        return self.detach().decode(torch.float64).tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise TypeError: NumPy has no such type."""
        raise TypeError(
            f"NumPy has no type for {self._value_description}: x.decode().numpy(), or {self._parts_expression}"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **options: Any) -> Any:
        raise TypeError(
            f"DLPack has no type for {self._value_description}: hand over x.decode(), or {self._parts_expression}"
        )

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if self.dim() == 0 and specification else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            copied: Self = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError("deepcopy takes leaves only, as for every tensor: copy x.detach(), or use x.clone()")
        with torch._C._DisableFuncTorch():  # inside a transform too a copy is no part of what is transformed
            made = self._make_like([deepcopy(part, memo) for part in self._list_plain_tensors()], self.requires_grad)
        memo[id(self)] = made
        own = self._value_attributes
        made.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in own})
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        return made


def get_saved_marks(x: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor requires a gradient and is a parameter: what pickle stores of its autograd state.

    Raises:
        RuntimeError: it is no leaf.
    """
    if not x.is_leaf:
        raise RuntimeError("only leaves can be pickled, as for every tensor: save x.detach()")
    return x.requires_grad, getattr(x, "_is_param", False)


def restore_saved_marks(x: Subclass, requires_grad: bool, is_parameter: bool) -> Subclass:
    """Set the autograd marks that `get_saved_marks` returned, and return the tensor."""
    x.requires_grad_(requires_grad)
    if is_parameter:
        x._is_param = True
    return x


def check_layout(layout: int, own: int, kind: str, parts: str) -> None:
    """Raise unless a file has the layout that this version reads; `parts` says what gives the class's plain tensors."""
    if layout != own:
        raise ValueError(
            f"this file holds {kind}s of layout {layout}, and this version of halfulp reads layout {own}: load "
            f"it with the version that wrote it and save {parts}, which are plain tensors"
        )


def _stack_batch(batch: list[Tensor], *, collate_fn_map: dict[Any, Any] | None = None) -> Tensor:
    """Stack a DataLoader's batch of tensors of a subclass.

    torch's own makes plain memory for it in a worker, which would hold one component, or values without their scale.
    """
    return torch.stack(batch)


_PACKAGE = __name__.partition(".")[0]
_PROCESS_ID = uuid.uuid4().hex


class FlattenableTensor(Protocol):
    """A tensor subclass that names its inner tensors to compilers."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]: ...


def graph_key(x: FlattenableTensor, rules: Iterable[Callable[..., Any]]) -> str:
    """Return the cache key of graphs of a tensor: its kind, its shapes, and the rules' sources.

    torch keeps compiled graphs between processes under its own tensors' properties. The graph of ours also follows from
    this library's code; with rules of somebody else's the graph is kept for this process alone, as their code, and what
    it closes over, may be another in the next.
    """
    names, context = x.__tensor_flatten__()
    foreign = any(rule.__module__.partition(".")[0] != _PACKAGE for rule in rules)
    kind = (
        type(x).__name__,
        _digest_sources(),
        _PROCESS_ID if foreign else "",
        bool(_fallback._strict_contexts),
        context,
    )
    return repr((kind, _read_layout(x), [(name, _read_layout(getattr(x, name))) for name in names]))


def _read_layout(x: Any) -> tuple[object, ...]:
    layout = (x.dtype, x.shape, x.stride(), x.storage_offset(), x.device)
    return *layout, x.requires_grad, x.is_leaf, x.is_inference()


@functools.cache
def _digest_sources() -> str:
    """Return a digest of this library's code."""
    found = hashlib.blake2b(digest_size=16)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()
