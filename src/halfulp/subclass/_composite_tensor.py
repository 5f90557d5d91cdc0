"""The base class of both tensor subclasses: memory and copies, pickle, DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import torch
from torch import Tensor

SubclassType = TypeVar("SubclassType", bound=Tensor)


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
    fsdp_pre_all_gather: property = property(_refuse_fully_shard)
    _fsdp_orig_uid: property = fsdp_pre_all_gather
    fsdp_post_all_gather: property = fsdp_pre_all_gather

    def __init_subclass__(cls) -> None:
        # torch's own makes plain memory in a worker, which would hold one component, or values without their scale.
        collate = torch.utils.data._utils.collate
        collate.default_collate_fn_map[cls] = lambda batch, *, collate_fn_map=None: torch.stack(batch)

    def _list_plain_tensors(self) -> list[Tensor]:
        """Return the plain tensors."""
        raise NotImplementedError

    def _rebuild_like(self, inner: list[Tensor], requires_grad: bool) -> Self:
        """Return a leaf made of other plain tensors, otherwise like this one."""
        raise NotImplementedError

    def _replace_by_views(self, view: Callable[[Tensor], Tensor]) -> None:
        """Replace the plain tensors that have this tensor's shape by views of them."""
        raise NotImplementedError

    @staticmethod
    def _from_plain_tangent(x: Tensor, context: Any) -> Tensor:
        """Return a plain gradient as a compiled backward pass was traced for: `context` is of `__tensor_flatten__`."""
        raise NotImplementedError

    def _stable_hash_for_caching(self) -> NoReturn:
        """Keep graphs of such tensors out of torch's cache on disk: they also follow from this library's code."""
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        raise BypassAOTAutogradCache(f"graphs of {type(self).__name__}s are traced in every process")

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

    def apply_(self, function: Callable[..., Any]) -> NoReturn:
        """Raise TypeError: torch would call the function on memory that is not there."""
        raise TypeError("x.apply_ calls a Python function on one plain number after another: use x.decode().apply_")

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
            made = self._rebuild_like([deepcopy(part, memo) for part in self._list_plain_tensors()], self.requires_grad)
        memo[id(self)] = made
        own = self._value_attributes
        made.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in own})
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        return made


def refuse_mixed_classes(operator: Any, types: Iterable[type]) -> None:
    """Raise if an operator's tensors are of several classes here: no rule of either reads the other's parts."""
    names = sorted(one.__name__ for one in types if issubclass(one, CompositeTensor))
    if len(names) > 1:
        raise NotImplementedError(  # a TypeError would end in Python's own words in a + b
            f"{operator} takes no {' beside a '.join(names)}: give one as x.decode(), a plain tensor of its values"
        )


def list_plain_tensors(x: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a tensor's value together, or the tensor itself."""
    return x._list_plain_tensors() if isinstance(x, CompositeTensor) else [x]


def allow_views(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which x can be viewed: outside of inference mode, unless x was made inside."""
    # torch gives a view the version counter of what it views; tensors made inside have none, and others one.
    if torch.is_inference_mode_enabled() and not x.is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def owns_all_memory(x: Tensor) -> bool:
    """Return whether a plain tensor is all of its memory, so that no view holds elements outside of it."""
    return x.numel() * x.element_size() == x.untyped_storage().nbytes()


def get_autograd_flags(x: Tensor) -> tuple[bool, bool]:
    """Return whether a leaf requires a gradient and is a parameter: what pickle stores of its autograd state."""
    if not x.is_leaf:
        raise RuntimeError("only leaves can be pickled, as for every tensor: save x.detach()")
    return x.requires_grad, getattr(x, "_is_param", False)


def restore_autograd_flags(x: SubclassType, requires_grad: bool, is_parameter: bool) -> SubclassType:
    """Set the flags that `get_autograd_flags` returned, and return the tensor."""
    x.requires_grad_(requires_grad)
    if is_parameter:
        x._is_param = True
    return x


def check_pickled_layout(version: int, supported_version: int, kind: str, parts: str) -> None:
    """Raise unless a file has the layout that this version reads; `parts` says what gives the class's plain tensors."""
    if version != supported_version:
        raise ValueError(
            f"this file holds {kind}s of layout {version}, and this version of halfulp reads layout "
            f"{supported_version}: load it with the version that wrote it and save {parts}, which are plain tensors"
        )
