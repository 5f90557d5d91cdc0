"""Views: the same view of every component, under the same scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from ....kernels import present, torch_operators
from ....subclass._in_backward import gives_plain_gradient_of, stores_plain_gradient
from ..._mctensor import MCTensor, to_plain, wrap
from ..._registry import implements

aten = torch_operators("aten")

_ONE = (
    *(aten.alias.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.t.default),
    *(aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.as_strided.default),
    *(aten.diagonal.default, aten.unfold.default, aten.lift_fresh.default),
)
_SEVERAL = (
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
    *(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default),
)


def _view(operator: OpOverload) -> Callable:
    def view(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
        if gives_plain_gradient_of(x):
            return operator(to_plain(x), *arguments, **options)
        return wrap(tuple(operator(part, *arguments, **options) for part in x._parts), x._scale, x._gradients)

    return view


def _views(operator: OpOverload) -> Callable:
    def views(x: MCTensor, *arguments: Any, **options: Any) -> list[Tensor]:
        if gives_plain_gradient_of(x):
            return operator(to_plain(x), *arguments, **options)
        pieces = zip(*(operator(part, *arguments, **options) for part in x._parts), strict=True)
        return [wrap(parts, x._scale, x._gradients) for parts in pieces]

    return views


@implements(aten.detach.default)
def detach(x: MCTensor) -> Tensor:
    """Return the same components; a gradient that is being stored in a leaf becomes the kind that the leaf keeps."""
    if stores_plain_gradient(x._gradients):
        return to_plain(x).detach()
    return wrap(tuple(aten.detach.default(part) for part in x._parts), x._scale, x._gradients)


def _on_first_components(operator: OpOverload) -> None:
    """Register what forward-mode derivatives ask of a tensor and its tangent: nothing of values."""
    implements(operator)(lambda *tensors: operator(*(x._parts[0] if isinstance(x, MCTensor) else x for x in tensors)))


for _operator in present((aten.is_same_size.default, aten._has_same_storage_numel.default)):
    _on_first_components(_operator)


def _in_place(operator: OpOverload, functional: OpOverload) -> Callable:
    def view(x: MCTensor, *arguments: Any, **options: Any) -> MCTensor:
        x._parts = tuple(functional(part, *arguments, **options) for part in x._parts)
        with no_dispatch():
            return operator(x, *arguments, **options)

    return view


_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
}
for _operator, _functional in _IN_PLACE.items():
    implements(_operator)(_in_place(_operator, _functional))
for _operator in _ONE:
    implements(_operator)(_view(_operator))
for _operator in _SEVERAL:
    implements(_operator)(_views(_operator))
