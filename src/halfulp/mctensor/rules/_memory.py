"""Operators that make, move, view or send elements, component by component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...arithmetic import PRECISION_BY_DTYPE
from ...kernels import require_float64
from ...subclass._collectives import register_collectives
from ...subclass._composite_tensor import allow_views
from ...subclass._derivation import aten, parse_operators
from ...subclass._in_backward import is_storing_plain_gradient, wants_plain_result_from
from .._encode import choose_scale, divide_by_scale, find_largest_finite_magnitude
from .._mctensor import MCTensor, decode_to_plain, implements, implements_each, round_to_plain, wrap_components
from .._result_type import ResultType, make_result, result_type, to_components
from .._write import convert_to_plain, copy_collective_result, write_value
from ._comparison import apply_per_component, map_components

# From this magnitude on a value becomes infinite in float16 components, as in conversions of torch's; it does not
# choose their scale.
_FLOAT16_OVERFLOW_THRESHOLD = 2.0**132


@implements(aten.clone.default)
def clone(x: MCTensor, *, memory_format: Any = None) -> Tensor:
    """Copy every component and the scale."""
    if wants_plain_result_from(x) or is_storing_plain_gradient(x._gradients):
        return round_to_plain(x).clone(memory_format=memory_format)
    scale = None if x._scale is None else x._scale.clone()
    return wrap_components(tuple(part.clone(memory_format=memory_format) for part in x._parts), scale, x._gradients)


@implements(aten._to_copy.default)
def to_copy(x: MCTensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **options: Any) -> Any:
    """Convert to another device or to components of another dtype, as many as before; to others as a plain tensor."""
    if memory_format not in (None, torch.preserve_format):
        return to_copy(x, dtype=dtype, device=device, **options).contiguous(memory_format=memory_format)
    if dtype is not None and dtype not in PRECISION_BY_DTYPE:
        return convert_to_plain(x, dtype).to(device=device)
    if wants_plain_result_from(x):
        return decode_to_plain(x, dtype or x.dtype).to(device=device)
    if device is not None and torch.device(device) != x.device:
        require_float64(torch.device(device), "MCTensors")
        move = {"device": device, "non_blocking": options.get("non_blocking", False)}
        scale = None if x._scale is None else x._scale.to(**move)
        x = wrap_components(tuple(part.to(**move) for part in x._parts), scale, x._gradients)
    if dtype is None or dtype == x.dtype:
        return clone(x)
    parts = to_components(x, x.device)
    if dtype == torch.float16:
        wide = tuple(part.double() for part in parts)
        scale = choose_scale(
            find_largest_finite_magnitude(wide[0].where(wide[0].abs() < _FLOAT16_OVERFLOW_THRESHOLD, 0.0)), dtype
        )
        return wrap_components(divide_by_scale(wide, scale, len(x._parts), dtype), scale, x._gradients)
    return make_result(parts, ResultType(dtype, len(x._parts), x._gradients, False, x.device))


implements(aten._local_scalar_dense.default)(lambda x: decode_to_plain(x, torch.float64).item())


@implements(aten.copy_.default)
def copy_(x: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """Copy the values of an MCTensor or plain tensor into another, rounded to what that holds."""
    if isinstance(source, Tensor) and source.device != x.device:
        source = source.to(x.device, non_blocking=non_blocking)
    return write_value(x, source)


implements(aten.fill_.Scalar, aten.fill_.Tensor)(write_value)


@implements(aten.zero_.default)
def zero_(x: MCTensor) -> Tensor:
    """Write 0 into every element."""
    for part in x._parts:
        part.zero_()
    return x


implements(aten.eye.out, aten.eye.m_out)(
    lambda *sizes, out: write_value(out, torch.eye(*sizes, dtype=torch.float64, device=out.device))
)
_RANDOM_LIKE_OPERATORS = parse_operators("rand_like randn_like randint_like randint_like.low_dtype")
_FILLED_OPERATORS = parse_operators("empty_like zeros_like ones_like new_empty new_empty_strided new_zeros new_ones")


@implements_each(*_RANDOM_LIKE_OPERATORS, *_FILLED_OPERATORS)
def make_like(operator: OpOverload, x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """Make a tensor like a given one: its first component; the others are zero."""
    dtype = options.get("dtype") or x.dtype
    if dtype not in PRECISION_BY_DTYPE or wants_plain_result_from(x) or is_storing_plain_gradient(x._gradients):
        return operator(x._parts[0], *arguments, **options)
    options["dtype"] = torch.float64 if operator in _RANDOM_LIKE_OPERATORS else dtype
    first = operator(x._parts[0], *arguments, **options)
    form = ResultType(dtype, len(x._parts), x._gradients, x._scale is not None and dtype == x.dtype, first.device)
    if operator in _RANDOM_LIKE_OPERATORS:
        return make_result((first,), form)
    rest = tuple(torch.zeros_like(first) for _ in range(form.components - 1))
    scale = torch.ones((), dtype=torch.float32, device=first.device) if form.is_scaled else None
    filled = wrap_components((first, *rest), scale, x._gradients)
    # One component holds them: where a backward pass begins with these, its gradients are plain from there on.
    filled._is_filled_with_ones = operator is aten.ones_like.default
    return filled


@implements(aten.full_like.default, aten.new_full.default)
def full_like(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """Fill with one number, with all its digits."""
    size, value = arguments if len(arguments) == 2 else (None, *arguments)
    value = options.pop("fill_value", value)
    blank = aten.empty_like.default(x, **options) if size is None else aten.new_empty.default(x, size, **options)
    return blank.fill_(value)


@implements_each(
    *parse_operators("""
        normal_ uniform_ bernoulli_.float exponential_ log_normal_ cauchy_ geometric_ random_ random_.to random_.from
    """)
)
def draw_random_values(operator: OpOverload, x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """Write random values, drawn in float64."""
    # torch draws in the order of the memory: with the strides of the components one seed gives one mask.
    return write_value(x, operator(torch.empty_like(x._parts[0], dtype=torch.float64), *arguments, **options))


# The value is the first argument; what they fill in is 0, in every component.
_OPERATORS_MOVING_ELEMENTS = parse_operators("""
    index.Tensor _unsafe_index.Tensor index_select gather take masked_select repeat flip roll tril triu diag_embed rot90
    im2col pixel_shuffle pixel_unshuffle channel_shuffle select_backward slice_backward diagonal_backward
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest1d.vec upsample_nearest2d.vec
    upsample_nearest3d.vec embedding view_copy expand_copy permute_copy transpose_copy.int t_copy slice_copy.Tensor
    select_copy.int unsqueeze_copy squeeze_copy squeeze_copy.dim as_strided_copy alias_copy detach_copy unfold_copy
    _reshape_copy diagonal_copy
""")


@implements_each(*_OPERATORS_MOVING_ELEMENTS)
def move_elements(operator: OpOverload, x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """Move the elements of every component."""
    if any(isinstance(value, MCTensor) for value in arguments):
        raise TypeError("an MCTensor is no index: give an integer tensor")
    return map_components(x, lambda part: operator(part, *arguments, **options))


# Position of the argument that is a value beside the first one; both come to one result type.
_SECOND_VALUE_POSITION_BY_OPERATOR = {
    **dict.fromkeys((aten.scatter.src, aten.index_copy.default, aten.index_fill.int_Tensor), 3),
    aten.masked_scatter.default: 2,
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default), 1),
    **dict.fromkeys((aten.as_strided_scatter.default, aten.fill.Tensor, aten.copy.default), 1),
}
# Overloads that take a number where another takes a tensor.
_TENSOR_OVERLOAD_BY_NUMBER_OVERLOAD = {
    aten.scatter.value: aten.scatter.src,
    aten.index_fill.int_Scalar: aten.index_fill.int_Tensor,
    aten.fill.Scalar: aten.fill.Tensor,
}


@implements_each(*_SECOND_VALUE_POSITION_BY_OPERATOR)
def insert_elements(operator: OpOverload, *arguments: Any, **options: Any) -> Tensor:
    """Take elements from two values, component by component, brought to one result type."""
    position = _SECOND_VALUE_POSITION_BY_OPERATOR[operator]
    values = arguments[0], arguments[position]

    def insert(first: Any, second: Any) -> Tensor:
        return operator(first, *arguments[1:position], second, *arguments[position + 1 :], **options)

    return apply_per_component(insert, values, result_type(values))


@implements_each(*_TENSOR_OVERLOAD_BY_NUMBER_OVERLOAD)
def insert_number(operator: OpOverload, x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """Put a number, with all its digits, among the elements of every component."""
    *others, value = arguments
    number = torch.scalar_tensor(value, dtype=torch.float64, device=x.device)
    if operator is aten.scatter.value:
        number = number.expand(others[1].shape)
    return insert_elements(_TENSOR_OVERLOAD_BY_NUMBER_OVERLOAD[operator], x, *others, number, **options)


@implements_each(aten.cat.default, aten.stack.default, aten.block_diag.default)
def concatenate(operator: OpOverload, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Tensor:
    """Concatenate every component."""
    return apply_per_component(
        lambda *parts: operator(list(parts), *arguments, **options), tensors, result_type(tensors)
    )


@implements(aten.constant_pad_nd.default)
def pad_with_number(x: MCTensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Return the values with a border of one number."""
    padded = map_components(x, lambda part: aten.constant_pad_nd.default(part, pad, 0))
    if value == 0:
        return padded
    inside = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    return padded.masked_fill(~aten.constant_pad_nd.default(inside, pad, False), value)


_VIEW_OPERATORS = parse_operators("""
    alias view _unsafe_view _reshape_alias t transpose.int permute slice.Tensor select.int expand unsqueeze squeeze
    squeeze.dim squeeze.dims as_strided diagonal unfold lift_fresh split.Tensor split_with_sizes unbind.int
    unsafe_split.Tensor unsafe_split_with_sizes unsafe_chunk
""")


@implements_each(*_VIEW_OPERATORS)
def view(operator: OpOverload, x: MCTensor, *arguments: Any, **options: Any) -> Any:
    """View every component."""
    if wants_plain_result_from(x):
        return operator(round_to_plain(x), *arguments, **options)
    with allow_views(x):
        parts = tuple(operator(part, *arguments, **options) for part in x._parts)
        if isinstance(parts[0], Tensor):
            return wrap_components(parts, x._scale, x._gradients)
        return [wrap_components(pieces, x._scale, x._gradients) for pieces in zip(*parts, strict=True)]


@implements(aten.detach.default)
def detach(x: MCTensor) -> Tensor:
    """Return the same components; a gradient that is being stored in a leaf becomes the kind that the leaf keeps."""
    if is_storing_plain_gradient(x._gradients):
        return round_to_plain(x).detach()
    with allow_views(x):
        return wrap_components(tuple(aten.detach.default(part) for part in x._parts), x._scale, x._gradients)


@implements_each(aten.is_same_size.default, aten._has_same_storage_numel.default)
def compare_layouts(operator: OpOverload, *tensors: Tensor) -> Any:
    """Compare shapes or memory of a tensor and its tangent, as forward-mode derivatives ask: no values."""
    return operator(*(x._parts[0] if isinstance(x, MCTensor) else x for x in tensors))


register_collectives(implements, copy_collective_result)
