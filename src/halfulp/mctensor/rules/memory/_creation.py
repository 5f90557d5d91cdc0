"""Creation: copies, conversions, and new tensors like a given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....arithmetic import PRECISION
from ....kernels import require_float64, torch_operators
from ....subclass._in_backward import gives_plain_gradient_of, stores_plain_gradient
from ..._mctensor import MCTensor, decoded, to_plain, wrap
from ..._registry import implements
from ..._result_type import ResultType, make_result, parts_of
from ..._scale import divide_by_scale, magnitude, scale_for
from ..._write import integral, write_value

aten = torch_operators("aten")

_BEYOND = 2.0**132  # what float16 components under no scale of ours hold: it becomes infinite, the others keep theirs


@implements(aten.clone.default)
def clone(x: MCTensor, *, memory_format: Any = None) -> Tensor:
    """Copy every component and the scale."""
    if gives_plain_gradient_of(x) or stores_plain_gradient(x._gradients):
        return to_plain(x).clone(memory_format=memory_format)
    scale = None if x._scale is None else x._scale.clone()
    return wrap(tuple(part.clone(memory_format=memory_format) for part in x._parts), scale, x._gradients)


@implements(aten._to_copy.default)
def to_copy(x: MCTensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **options: Any) -> Any:
    """Convert to another device or to components of another dtype, as many as before; to integers as a plain tensor.

    What is out of the new dtype's range becomes infinite, as in every conversion of torch's.
    """
    if dtype is not None and dtype not in PRECISION:
        return integral(x, dtype).to(device=device)
    if gives_plain_gradient_of(x):
        return decoded(x, dtype or x.dtype).to(device=device)
    if device is not None and torch.device(device) != x.device:
        require_float64(torch.device(device), "MCTensors")
        move = {"device": device, "non_blocking": options.get("non_blocking", False)}
        scale = None if x._scale is None else x._scale.to(**move)
        x = wrap(tuple(part.to(**move) for part in x._parts), scale, x._gradients)
    if dtype is None or dtype == x.dtype:
        return clone(x, memory_format=memory_format)
    parts = parts_of(x, x.device)
    if dtype == torch.float16:
        wide = tuple(part.double() for part in parts)
        scale = scale_for(magnitude(wide[0].where(wide[0].abs() < _BEYOND, 0.0)), dtype)
        return wrap(divide_by_scale(wide, scale, len(x._parts), dtype), scale, x._gradients)
    return make_result(parts, ResultType(dtype, len(x._parts), x._gradients, False, x.device))


@implements(aten._local_scalar_dense.default)
def local_scalar_dense(x: MCTensor) -> float:
    """Return the one element as a Python float, rounded to float64."""
    return decoded(x, torch.float64).item()


@implements(aten.copy_.default)
def copy_(x: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """Copy the values of an MCTensor or plain tensor into another, rounded to what that holds."""
    if isinstance(source, Tensor) and source.device != x.device:
        source = source.to(x.device, non_blocking=non_blocking)
    return write_value(x, source)


@implements(aten.fill_.Scalar, aten.fill_.Tensor)
def fill_(x: Tensor, value: Any) -> Tensor:
    """Write one number into every element."""
    return write_value(x, value)


@implements(aten.zero_.default)
def zero_(x: MCTensor) -> Tensor:
    """Write 0 into every element."""
    for part in x._parts:
        part.zero_()
    return x


@implements(aten.eye.out, aten.eye.m_out)
def eye_out(*sizes: int, out: Tensor) -> Tensor:
    """Write ones into the diagonal, zeros elsewhere."""
    return write_value(out, torch.eye(*sizes, dtype=torch.float64, device=out.device))


def _new_like(operator: OpOverload) -> Callable:
    """Return the rule of an operator that makes a tensor like a given one: its first component; the others are zero."""

    def new(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
        dtype = options.get("dtype") or x.dtype
        if dtype not in PRECISION or gives_plain_gradient_of(x) or stores_plain_gradient(x._gradients):
            return operator(x._parts[0], *arguments, **options)
        options["dtype"] = torch.float64 if operator in _RANDOM else dtype
        first = operator(x._parts[0], *arguments, **options)
        form = ResultType(dtype, len(x._parts), x._gradients, x._scale is not None and dtype == x.dtype, first.device)
        if operator in _RANDOM:
            return make_result((first,), form)
        rest = tuple(torch.zeros_like(first) for _ in range(form.components - 1))
        scale = torch.ones((), dtype=torch.float32, device=first.device) if form.scaled else None
        filled = wrap((first, *rest), scale, x._gradients)
        # One component holds them: where a backward pass begins with these, its gradients are plain from there on.
        filled._seeds_backward = operator is aten.ones_like.default
        return filled

    return new


_RANDOM = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
_PLAIN = (
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.new_empty.default),
    *(aten.new_empty_strided.default, aten.new_zeros.default, aten.new_ones.default),
)
for _operator in (*_RANDOM, *_PLAIN):
    implements(_operator)(_new_like(_operator))


@implements(aten.full_like.default, aten.new_full.default)
def full_like(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """One number everywhere, with all its digits."""
    size, value = arguments if len(arguments) == 2 else (None, *arguments)
    value = options.pop("fill_value", value)
    blank = aten.empty_like.default(x, **options) if size is None else aten.new_empty.default(x, size, **options)
    return blank.fill_(value)


def _random_in_place(operator: OpOverload) -> Callable:
    def draw(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
        # torch draws in the order of the memory: with the strides of the components one seed gives one mask.
        return write_value(x, operator(torch.empty_like(x._parts[0], dtype=torch.float64), *arguments, **options))

    return draw


for _operator in (
    *(aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default),
    *(aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.random_.default),
    *(aten.random_.to, getattr(aten.random_, "from")),
):
    implements(_operator)(_random_in_place(_operator))
