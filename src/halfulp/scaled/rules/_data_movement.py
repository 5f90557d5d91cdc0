"""Rules of operators that make or move elements: constants, random numbers, views, copies, indexing, lists.

Complex results are plain values: complex numbers carry no scale. What follows in them is torch's own, and real parts
and inverse transforms come back plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import list_present_operators, require_float64
from ...subclass._derivation import aten, make_foreach_rule, parse_operators
from .. import _powers_of_two as _powers
from .._operands import encode_operand, encode_plain_tensor, find_scaled_tensor
from .._registry import EIGHT_BIT_DTYPES, LOGICAL_DTYPES, implements, implements_each
from .._scaled_tensor import ScaledTensor, decode_if_scaled, decode_values, wrap_payload
from .._write import refuse_vanishing_indexed_write, write_values
from ._aligned import move_power_of_factor_to_scale
from ._vocabulary import (
    LEAST_LARGE_CONSTANT,
    align_with_constants,
    convert_argument_to_float32,
    encode_results,
    is_marked_large_fill,
    is_number_or_0d_tensor,
    make_scaled_results,
    mark_as_filled_with_large_number,
)


def encode_filled_tensor(x: ScaledTensor, plain: Tensor, value: float, storage: torch.dtype | None = None) -> Tensor:
    """Return a plain tensor of one number as it is, or of x's storage, or another, where its dtype is a logical one."""
    if plain.dtype not in LOGICAL_DTYPES:
        return plain.fill_(value)
    storage = storage or x._payload.dtype
    finite = value == value and abs(value) != float("inf")
    # An infinity has the scale of zeros, so that it decides no other scale.
    power = (
        _powers.round_number_to_power(abs(value))
        if value and finite
        else (1.0 if value != value else _powers.SCALE_OF_ZEROS)
    )
    mantissa = value / power if finite else value
    if power == _powers.LARGEST_SCALE:  # the next number above float32's largest would be infinity
        mantissa = math.copysign(min(abs(mantissa), 2 - torch.finfo(storage).eps), mantissa)
    payload = torch.empty_like(plain, dtype=storage).fill_(mantissa)
    scale = torch.full((), power, dtype=torch.float32, device=plain.device)
    made = wrap_payload(payload, scale, plain.dtype)
    return mark_as_filled_with_large_number(made) if finite and abs(value) >= LEAST_LARGE_CONSTANT else made


# Empty tensors hold zeros of any scale: elements that are never written must not be read.
_FILL_VALUE_BY_OPERATOR = {
    **dict.fromkeys((aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default), 0.0),
    **{aten.new_empty.default: 0.0, aten.ones_like.default: 1.0, aten.new_ones.default: 1.0},
}


@implements_each(*_FILL_VALUE_BY_OPERATOR, aten.full_like.default, aten.new_full.default, family="creation")
def make_filled_tensor(operator: OpOverload, x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
    """Make a tensor of one number with x's dtype and device: of its shape and memory format, or of another shape."""
    number = float(arguments[-1]) if operator not in _FILL_VALUE_BY_OPERATOR else _FILL_VALUE_BY_OPERATOR[operator]
    options["dtype"] = options.get("dtype") or x.dtype
    if operator._opname.startswith("new_"):
        return encode_filled_tensor(x, x._payload.new_empty(arguments[0], **options), number)
    # Tensors made like a parameter are mostly moments of torch.optim, which divides by their roots: eight bits cannot
    # hold squares.
    is_narrow = x._payload.dtype in EIGHT_BIT_DTYPES and getattr(x, "_is_param", False)
    storage = torch.float16 if is_narrow else x._payload.dtype
    return encode_filled_tensor(x, torch.empty_like(x._payload, **options), number, storage)


@implements(aten.eye.out, aten.eye.m_out, family="creation")
def eye_out(*sizes: int, out: Tensor) -> Tensor:
    """Write ones into the diagonal, zeros elsewhere."""
    return write_values(out, torch.eye(*sizes, dtype=torch.float32, device=out.device))


@implements(aten.new_empty_strided.default, family="creation")
def new_empty_strided(x: ScaledTensor, size: Any, stride: Any, **options: Any) -> Tensor:
    """Return zeros; their scale decides nothing."""
    options["dtype"] = options.get("dtype") or x.dtype
    plain = x._payload.new_empty_strided(size, stride, **options)
    if plain.dtype not in LOGICAL_DTYPES:
        return plain.zero_()
    payload = x._payload.new_empty_strided(size, stride, **(options | {"dtype": x._payload.dtype})).zero_()
    scale = torch.full((), _powers.SCALE_OF_ZEROS, dtype=torch.float32, device=plain.device)
    return wrap_payload(payload, scale, plain.dtype)


@implements_each(
    *parse_operators("""
        uniform normal_functional exponential log_normal cauchy geometric random random.to random.from
    """),
    family="random",
)
def draw_numbers_out_of_place(operator: OpOverload, x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
    """Return random numbers in x's shape, under a measured scale."""
    return encode_results(operator(torch.empty_like(x._payload, dtype=torch.float32), *arguments, **options), [x])


@implements(aten.normal_.default, family="random")
def normal_(x: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    """Write normal numbers in place."""
    return write_values(x, aten.normal_functional.default(x, mean, std, generator=generator))


@implements(aten.bernoulli_.float, family="random")
def bernoulli_(x: Any, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """Write zeros and ones in place, drawn in the order of memory as torch draws them."""
    like = torch.empty_like(x._payload if isinstance(x, ScaledTensor) else x, dtype=torch.float32)
    return write_values(x, like.bernoulli_(p, generator=generator))


@implements_each(
    *(
        getattr(packet, name)
        for packet in (aten.rand_like, aten.randn_like, aten.randint_like)
        for name in packet.overloads()
        if not name.endswith("out") and "Tensor" not in name
    ),
    family="random",
)
def draw_numbers_like(operator: OpOverload, x: ScaledTensor, *arguments: Any, **options: Any) -> Tensor:
    """Return random numbers in x's shape and dtype, or in another dtype."""
    dtype = options.get("dtype") or x.dtype
    if dtype not in LOGICAL_DTYPES:
        return operator(torch.empty_like(x._payload, dtype=dtype), *arguments, **options)
    options["dtype"] = torch.float32
    values = operator(torch.empty_like(x._payload, dtype=torch.float32), *arguments, **options)
    return encode_plain_tensor(values, x._payload.dtype, dtype=dtype)


@implements(aten._to_copy.default, family="pass-through")
def to_copy(
    x: ScaledTensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **layout: Any
) -> Tensor:
    """Change logical dtype or device, keeping payload and scale; for integers and booleans convert the value."""
    if dtype is not None and dtype not in LOGICAL_DTYPES:
        return aten._to_copy.default(decode_values(x), dtype=dtype, device=device, memory_format=memory_format)
    if device is not None:
        require_float64(torch.device(device), "ScaledTensors")
    payload = aten._to_copy.default(x._payload, device=device, memory_format=memory_format)
    scale = aten._to_copy.default(x._scale, device=device)
    made = wrap_payload(payload, scale, dtype or x.dtype)
    return mark_as_filled_with_large_number(made) if is_marked_large_fill(x) else made


@implements(aten._local_scalar_dense.default, family="pass-through")
def local_scalar_dense(x: ScaledTensor) -> float:
    """Return the value as a Python number."""
    return aten._local_scalar_dense.default(decode_values(x, torch.float64))


@implements_each(
    aten.is_same_size.default, aten._has_same_storage_numel.default, aten.is_pinned.default, family="pass-through"
)
def query_payload_memory(operator: OpOverload, *given: Any, **options: Any) -> bool:
    """Answer what is asked of a tensor's memory, or of its and its tangent's shapes, and not of values."""
    return operator(*(x._payload if isinstance(x, ScaledTensor) else x for x in given), **options)


def compute_aligned_write(x: Any, source: Any, compute: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """Return compute(payload, source's payload) under the larger scale, which constants do not decide."""
    like = find_scaled_tensor((x, source))
    if is_number_or_0d_tensor(source) and not isinstance(x, ScaledTensor):
        x = encode_operand(x, like)
    (base, values), scale = align_with_constants([encode_operand(x, like) if is_number_or_0d_tensor(x) else x, source])
    return make_scaled_results(compute(base, values), [scale], [x, source])


@implements(aten.index_put.default, aten._unsafe_index_put.default, family="indexing")
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Tensor:
    """Write values at indices, or add them there."""
    return compute_aligned_write(x, values, lambda p, v: aten.index_put.default(p, indices, v, accumulate))


@implements(aten._index_put_impl_.default, family="indexing")
def index_put_impl_(x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    """Write values at indices, or add them, in place: `index_put`."""
    result = index_put(x, indices, values, accumulate)
    given = {"indices": indices, "values": values, "accumulate": accumulate}
    refuse_vanishing_indexed_write("_index_put_impl_", given, x, result)
    return write_values(x, result)


@implements_each(aten.scatter.src, aten.scatter_add.default, aten.index_copy.default, family="indexing")
def write_at_indices(operator: OpOverload, x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    """Return x with a source written, or added, at indices of a dimension."""
    return compute_aligned_write(x, source, lambda p, v: operator(p, dim, index, v))


@implements(aten.scatter.value, family="indexing")
def scatter_value(x: Any, dim: int, index: Tensor, value: Any) -> Tensor:
    """Return a constant at indices, under x's scale."""
    is_scaled = isinstance(value, ScaledTensor)
    constant = value if is_scaled else torch.full((), value, dtype=torch.float32, device=x.device)
    return compute_aligned_write(
        x, constant, lambda p, v: aten.scatter.src(p, dim, index, v.expand(index.shape).clone())
    )


@implements(aten.index_add.default, family="indexing")
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor:
    """Return a source, alpha times, added at indices of a dimension."""
    factor = 1.0
    if alpha != 1:
        source, factor = move_power_of_factor_to_scale(source, alpha, find_scaled_tensor((x, source)))
    return compute_aligned_write(x, source, lambda p, v: aten.index_add.default(p, dim, index, v, alpha=factor))


@implements(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, family="indexing")
def index_fill(x: Any, dim: int, index: Tensor, value: Any) -> Tensor:
    """Return a constant at indices of a dimension, under x's scale."""
    if not isinstance(x, ScaledTensor):
        return aten.index_fill.int_Tensor(x, dim, index, decode_values(value, x.dtype))
    if isinstance(value, ScaledTensor):
        value = decode_values(value, torch.float32)
    is_tensor = isinstance(value, Tensor)
    constant = value if is_tensor else torch.full((), value, dtype=torch.float32, device=x.device)

    def fill_at_indices(payload: Tensor, v: Tensor) -> Tensor:  # index_fill would read it, and wait for its device
        size = list(payload.shape)
        if size:
            size[dim] = index.numel()
        values = v.expand(size) if size else v.expand(index.numel()).reshape(index.shape)
        return aten.index_copy.default(payload, dim, index, values)

    return compute_aligned_write(x, constant, fill_at_indices)


@implements(aten.put.default, family="indexing")
def put(x: Any, index: Tensor, source: Any, accumulate: bool = False) -> Tensor:
    """Return x with a source written, or added, at indices into the flattened x."""
    return compute_aligned_write(x, source, lambda p, v: aten.put.default(p, index, v, accumulate))


@implements(aten.view_as_complex.default, family="complex")
def view_as_complex(x: ScaledTensor) -> Tensor:
    """Return the values as complex numbers: a copy, as the payload's memory does not hold them."""
    return torch.view_as_complex(convert_argument_to_float32(x).contiguous())


_FOREACH_NAMES = [
    name.removeprefix("aten::").partition(".")
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if name.startswith("aten::_foreach_") and not name.endswith("out")
]
for _operator in list_present_operators(
    getattr(getattr(aten, name), kind or "default") for name, _, kind in _FOREACH_NAMES
):
    if (_rule := make_foreach_rule(_operator)) is not None:
        implements(_operator, family="foreach")(_rule)


@implements(aten._amp_foreach_non_finite_check_and_unscale_.default, family="foreach")
def unscale_(gradients: Any, found: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by a number, in place, and record whether one is infinite or NaN."""
    factor = decode_if_scaled(inverse)
    for gradient in gradients:
        payload = gradient._payload if isinstance(gradient, ScaledTensor) else gradient
        found.copy_(torch.maximum(found, (~payload.to(torch.float32).isfinite()).any().to(found.dtype)))
        gradient.mul_(factor)
