"""Rules of operators that write at indices: what is written comes under the scale of what it is written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ..._operands import decode_values, first_scaled, operand
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from ..._write import check_written_at, write
from .._constants import align_with_constants, is_constant
from .._results import measured_like, payloads_under, value_of
from .._vocabulary import homogeneous
from ..elementwise._aligned import scaled_by_number

aten = torch_operators("aten")


def write_aligned(x: Any, source: Any, compute: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """Return compute(payload, source's payload) under the larger scale, which constants do not decide."""
    like = first_scaled((x, source))
    if is_constant(source) and not isinstance(x, ScaledTensor):
        x = operand(x, like)
    (base, values), scale = align_with_constants([operand(x, like) if is_constant(x) else x, source])
    return payloads_under(compute(base, values), [scale], [x, source])


@implements(aten.index_put.default, aten._unsafe_index_put.default, family="indexing")
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Tensor:
    """Values at indices, or added there."""
    operator = aten.index_put.default
    return write_aligned(x, values, lambda p, v: operator(p, indices, v, accumulate))


@implements(aten._index_put_impl_.default, family="indexing")
def index_put_impl_(x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    """As `index_put`, in place."""
    result = index_put(x, indices, values, accumulate)
    given = {"indices": indices, "values": values, "accumulate": accumulate}
    check_written_at("_index_put_impl_", given, x, result)
    return write(x, result)


@implements(aten.scatter.src, family="indexing")
def scatter(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """A source at indices."""
    return write_aligned(x, source, lambda p, v: aten.scatter.src(p, dim, index, v))


@implements(aten.scatter_add.default, family="indexing")
def scatter_add(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """A source added at indices."""
    return write_aligned(x, source, lambda p, v: aten.scatter_add.default(p, dim, index, v))


@implements(aten.scatter_reduce.two, family="indexing")
def scatter_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Combine a source with the elements at indices: sums and extrema under the larger scale, products by value."""
    return _reduced(aten.scatter_reduce.two, x, dim, index, source, reduce, include_self)


@implements(aten.index_reduce.default, family="indexing")
def index_reduce(x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """As `scatter_reduce`, along a dimension."""
    return _reduced(aten.index_reduce.default, x, dim, index, source, reduce, include_self)


def _reduced(operator: OpOverload, x: Any, dim: int, index: Tensor, source: Any, reduce: str, include: bool) -> Tensor:
    def compute(p: Tensor, v: Tensor) -> Tensor:
        return operator(p, dim, index, v, reduce, include_self=include)

    if reduce == "prod":
        return measured_like(compute(value_of(x), value_of(source)), [t for t in (x, source) if t.dim()] or [x])
    return write_aligned(x, source, compute)


@implements(aten.scatter.value, family="indexing")
def scatter_value(x: Any, dim: int, index: Tensor, value: Any) -> Tensor:
    """A constant at indices, under x's scale."""
    constant = operand(value, x) if isinstance(value, ScaledTensor) else _constant(value, x)
    return write_aligned(x, constant, lambda p, v: aten.scatter.src(p, dim, index, v.expand(index.shape).clone()))


@implements(aten.scatter.reduce, family="indexing")
def scatter_with(x: Any, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    """A source added to or multiplied with what is at indices."""
    if reduce == "add":
        return write_aligned(x, source, lambda p, v: torch.scatter(p, dim, index, v, reduce="add"))
    return measured_like(torch.scatter(value_of(x), dim, index, value_of(source), reduce=reduce), [x])


@implements(aten.scatter.value_reduce, family="indexing")
def scatter_value_with(x: Any, dim: int, index: Tensor, value: Any, *, reduce: str) -> Tensor:
    """A number added to or multiplied with what is at indices."""
    return measured_like(torch.scatter(value_of(x), dim, index, value, reduce=reduce), [x])


@implements(aten.index_add.default, family="indexing")
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor:
    """A source, alpha times, added at indices of a dimension."""
    moved, factor = (source, 1.0) if alpha == 1 else scaled_by_number(source, alpha, first_scaled((x, source)))
    return write_aligned(x, moved, lambda p, v: aten.index_add.default(p, dim, index, v, alpha=factor))


@implements(aten.index_copy.default, family="indexing")
def index_copy(x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """A source at indices of a dimension."""
    operator = aten.index_copy.default
    return write_aligned(x, source, lambda p, v: operator(p, dim, index, v))


@implements(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, family="indexing")
def index_fill(x: Any, dim: int, index: Tensor, value: Any) -> Tensor:
    """A constant at indices of a dimension, under x's scale."""
    if not isinstance(x, ScaledTensor):
        return aten.index_fill.int_Tensor(x, dim, index, decode_values(value, x.dtype))
    if isinstance(value, ScaledTensor):
        value = decode_values(value, torch.float32)
    constant = value if isinstance(value, Tensor) else _constant(value, x)
    return write_aligned(x, constant, lambda p, v: _index_filled(p, dim, index, v))


def _index_filled(payload: Tensor, dim: int, index: Tensor, constant: Tensor) -> Tensor:
    """Return a payload with a constant at indices: index_fill would read it, and wait for its device."""
    if not payload.dim():
        return aten.index_copy.default(payload, dim, index, constant.expand(index.numel()).reshape(index.shape))
    size = list(payload.shape)
    size[dim] = index.numel()
    return aten.index_copy.default(payload, dim, index, constant.expand(size))


@implements(aten.put.default, family="indexing")
def put(x: Any, index: Tensor, source: Any, accumulate: bool = False) -> Tensor:
    """Return x with a source written, or added, at indices into the flattened x."""
    return write_aligned(x, source, lambda p, v: aten.put.default(p, index, v, accumulate))


homogeneous(aten.embedding_dense_backward.default, family="indexing", grad_output=1)


def _constant(value: Any, x: Tensor) -> Tensor:
    """A number as a float32 tensor without dimensions, beside x."""
    return torch.full((), value, dtype=torch.float32, device=x.device)
