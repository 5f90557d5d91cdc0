"""Writing into an MCTensor in place: all views see the new components, or an error is raised and none changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import Parts, renormalize
from ..subclass._composite_tensor import list_plain_tensors, owns_all_memory
from ._encode import HEADROOM_BINADES, choose_scale, divide_by_scale, find_largest_finite_magnitude
from ._mctensor import MCTensor, decode_to_plain
from ._result_type import ResultType, count_float64_components, to_components

# A payload whose largest magnitude has fallen by so many binades is rescaled, so that small values keep their digits.
_RESCALED_BELOW_HEADROOM_BINADES = 8
_DTYPES_WITHOUT_ADDITION = (torch.uint16, torch.uint32, torch.uint64)  # in torch


def copy_collective_result(x: Tensor, value: Tensor) -> None:
    """Copy what a collective delivered into a tensor: bit for bit between MCTensors alike that own their memory."""
    mine, arrived = list_plain_tensors(x), list_plain_tensors(value)
    alike = isinstance(x, MCTensor) and isinstance(value, MCTensor) and x.shape == value.shape
    alike = alike and [part.dtype for part in mine] == [part.dtype for part in arrived]
    if alike and all(map(owns_all_memory, mine)):
        for part, received in zip(mine, arrived):
            part.copy_(received)
    else:
        x.copy_(value)


def choose_write_type(x: MCTensor) -> ResultType:
    """Return the result type to compute in before writing into x: without a scale, in float64 where x has one."""
    form = ResultType(x.dtype, len(x._parts), x._gradients, False, x.device)
    if x._scale is None:
        return form
    return form._replace(dtype=torch.float64, components=count_float64_components(form))


def write_components(
    x: Tensor, parts: Parts, compute_exact_result: Callable[[], Tensor], keeps_nonzero: bool = False
) -> Tensor:
    """Copy a result's components, without a scale, into x; all its views see it."""
    # compute_exact_result: makes it in float64, to tell an infinity from a finite value that does not fit.
    # keeps_nonzero: whether no element becomes 0 beside large ones, as of a sum.
    if parts[0].shape != x.shape:
        check_shape(x, parts[0].shape)
    if not isinstance(x, MCTensor):
        return x.copy_(renormalize(parts, 1, x.dtype)[0])
    if x._scale is not None:
        wide = tuple(part.double() for part in parts)
        _rescale_memory_if_needed(x, x._scale, find_largest_finite_magnitude(wide[0]))
        for target, part in zip(x._parts, divide_by_scale(wide, x._scale, len(x._parts), x.dtype, keeps_nonzero)):
            target.copy_(part)
        return x
    if len(parts) != len(x._parts) or parts[0].dtype != x.dtype:
        parts = renormalize(parts, len(x._parts), x.dtype)
    check_no_overflow_in_place(x, parts[0], compute_exact_result)
    for target, part in zip(x._parts, parts):
        target.copy_(part)
    return x


def can_write_directly(x: MCTensor, operands: list[Parts]) -> bool:
    """Return whether a result may be written while operands are read: each is x, or not larger and in other memory."""
    own = x._parts
    memory = [part.untyped_storage()._cdata for part in own]
    shape = x.shape
    for parts in operands:
        if parts is own:
            continue
        for part in parts:
            if type(part) is not Tensor or part.untyped_storage()._cdata in memory:
                return False
        if parts[0].dim() and parts[0].shape != shape and torch.broadcast_shapes(parts[0].shape, shape) != shape:
            return False
    return type(own[0]) is Tensor


def write_value(x: Tensor, value: Any) -> Tensor:
    """Copy a value, a tensor of any kind or a number, into x."""
    if isinstance(x, MCTensor):
        parts = to_components(value, x.device)
        return write_components(x, parts, lambda: parts[0])
    check_shape(x, value.shape)
    return x.copy_(convert_to_plain(value, x.dtype))


def convert_to_plain(x: MCTensor, dtype: torch.dtype) -> Tensor:
    """Return the value as a plain tensor: floats rounded once, integers truncated toward zero, or booleans."""
    if dtype.is_floating_point:
        return decode_to_plain(x, dtype)
    if dtype == torch.bool:
        return x._parts[0] != 0
    if dtype.is_complex:
        raise TypeError(
            f"an MCTensor is real and {dtype} is not: torch.complex(x.decode(), zeros) makes one of its value"
        )
    parts = to_components(torch.trunc(x), x.device)
    if dtype in _DTYPES_WITHOUT_ADDITION:
        return sum(map(_reduce_modulo_64_bits, parts)).to(dtype)  # type: ignore[union-attr]  # int only of no parts
    first, *rest = parts
    return sum((part.to(dtype) for part in rest), first.to(dtype))


def _reduce_modulo_64_bits(integers: Tensor) -> Tensor:
    """Return float integers modulo 2^64 as int64."""
    # By halves: torch's conversion of what int64 does not hold differs between processors.
    wide = integers.double()
    high = torch.floor(wide * 2.0**-32)
    return (high.long() << 32) + (wide - high * 2.0**32).long()


def check_not_integer(x: Tensor) -> None:
    """Raise unless an operator's result can be written into x without being cut to an integer."""
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        raise RuntimeError(
            f"an MCTensor's result can't be cast to the desired output type {x.dtype}: write out of place, or copy_"
        )


def check_shape(x: Tensor, shape: torch.Size) -> None:
    """Raise unless a result of this shape can be written into x."""
    if shape != x.shape and (wide := torch.broadcast_shapes(shape, x.shape)) != x.shape:
        raise RuntimeError(f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(wide)}")


def check_no_overflow_in_place(x: MCTensor, first: Tensor, compute_exact_result: Callable[[], Tensor]) -> None:
    """Raise if a finite result became infinite in its components."""
    if type(first) is not Tensor or first.device.type == "meta" or bool(first.sum().isfinite()):
        return
    if bool((first.isinf() & compute_exact_result().isfinite()).any()):
        raise ValueError(
            f"the result is out of the range of {x.dtype} components, and this tensor has no scale to change: it is as "
            "it was. Give it one, MCTensor.encode(x, components, dtype, scale='auto'), or wider components"
        )


def _rescale_memory_if_needed(x: MCTensor, scale: Tensor, largest: Tensor) -> None:
    """Rescale all of the memory that x is a view of, unless x's scale leaves room for values up to `largest`."""
    if largest.numel() and not owns_all_memory(x._parts[0]):
        largest = torch.maximum(largest, find_largest_finite_magnitude(_view_whole_memory(x)[0]).double() * scale)
    ideal = choose_scale(largest, x.dtype)
    distance = torch.log2(ideal) - torch.log2(scale)
    fits = (distance < HEADROOM_BINADES) & (distance > -_RESCALED_BELOW_HEADROOM_BINADES)
    wanted = torch.where(fits | (largest == 0), scale, ideal)
    if type(wanted) is Tensor and wanted.device.type == "cpu" and bool(wanted == scale):
        return
    for part in _view_whole_memory(x):  # exact, except for values that become subnormal
        part.copy_(part.double() * (scale.double() / wanted.double()))
    scale.copy_(wanted)


def _view_whole_memory(x: MCTensor) -> Parts:
    """Return all elements of the memory that x's components are views of."""
    if owns_all_memory(x._parts[0]) and x.is_contiguous():
        return x._parts
    count = x._parts[0].untyped_storage().nbytes() // x.dtype.itemsize
    return tuple(part.as_strided((count,), (1,), 0) for part in x._parts)
