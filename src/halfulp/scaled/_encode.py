"""Conversions between plain and scaled tensors, with gradients, and how a scaled tensor prints."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels import require_float64, untraced
from ..subclass._in_backward import refuse_make_fx, register_tangent
from . import _powers_of_two as _powers
from ._operands import decode_values, plain, rms_scale, to_float32, to_storage
from ._registry import LOGICALS, check_home, check_storage, class_function, common_storage
from ._scaled_tensor import ScaledTensor, wrap


@class_function
def encode(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | float | None,
    rounding: str,
    home: torch.dtype | None = None,
) -> ScaledTensor:
    """See `ScaledTensor.encode`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}: torch.as_tensor makes one")
    refuse_make_fx("ScaledTensor")
    check_storage(dtype)
    check_home(home)
    _powers.check_power_rounding(rounding)
    if x.dtype not in LOGICALS:
        raise ValueError(f"x is {x.dtype}: allowed are {', '.join(map(str, LOGICALS))}; integers carry no scale")
    if x.layout != torch.strided:
        raise ValueError(f"x has layout {x.layout}: a scaled tensor is dense, x.to_dense()")
    require_float64(x.device, "ScaledTensors")
    if hasattr(x, "decode"):  # a ScaledTensor or an MCTensor
        x = x.decode(x.dtype)
    given = None if scale is None else _powers.as_scale(scale, x.device)
    return _Encode.apply(x, dtype, given, rounding, home)


@class_function
def decode(x: ScaledTensor, dtype: torch.dtype | None) -> Tensor:
    """See `ScaledTensor.decode`."""
    return _Decode.apply(x, dtype or x.dtype)


@class_function
def with_scale(x: ScaledTensor, scale: Tensor | float) -> ScaledTensor:
    """See `ScaledTensor.with_scale`."""
    return _Rescale.apply(x, _powers.as_scale(scale, x.device))


@class_function
def cast_(x: ScaledTensor, dtype: torch.dtype) -> ScaledTensor:
    """See `ScaledTensor.cast_`."""
    check_storage(dtype)
    x._payload = to_storage(to_float32(x), dtype)
    return x


def rescaled(x: ScaledTensor, scale: Tensor) -> ScaledTensor:
    """Return the same values under another scale, in the same storage."""
    payload = _powers.times(to_float32(x), _powers.ratio(x._scale, scale))
    return wrap(to_storage(payload, x._payload.dtype), scale.clone(), x.dtype, x._home)


@class_function
def in_complex_numbers(operator: Any, arguments: tuple, options: dict) -> Any:
    """Run an operator on values, with plain results: complex numbers carry no scale."""
    with lazy_conjugates():
        return operator(*tree_map(plain, arguments), **tree_map(plain, options))


def lazy_conjugates() -> AbstractContextManager:
    """Let torch see that a complex tensor is still to be conjugated or negated, inside a rule too.

    Below autograd torch leaves out what does so, for its own kernels have no such operands any more; but formulas of
    several operators make them, and their results would silently be wrong.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor):
        exclude = exclude.remove(key)
    return torch._C._ForceDispatchKeyGuard(include, exclude)


@class_function
def refuse_sparse(operator: Any, arguments: tuple, options: dict) -> None:
    """Raise, in place of torch's error, if an operator takes or makes tensors that are not dense."""
    takes = any(isinstance(x, Tensor) and x.layout != torch.strided for x in tree_leaves((arguments, options)))
    if takes or "sparse" in operator._schema.name:
        raise NotImplementedError(
            f"{operator} with a sparse layout: scaled tensors are dense, use x.decode()"
        ) from None


@class_function
def with_dtypes(
    x: ScaledTensor, dtype: torch.dtype, storage: torch.dtype, home: torch.dtype | None = None
) -> ScaledTensor:
    """Return the values in another logical dtype and storage, under a measured scale if the storage is narrower."""
    if common_storage((x._payload.dtype, storage)) == storage:
        return wrap(to_storage(to_float32(x), storage), x._scale, dtype, home)
    payload = to_float32(x)
    level = rms_scale(payload, storage)
    scale, rest = _powers.product(x._scale, level)
    return wrap(to_storage(_powers.times(payload / level, rest), storage), scale, dtype, home)


@class_function
def encoded_like(value: Tensor, like: ScaledTensor) -> ScaledTensor:
    """Encode a plain tensor in the storage and logical dtype of another."""
    if not isinstance(value, Tensor) or type(value.data) is not Tensor:
        raise TypeError(f"x.data of a ScaledTensor takes a ScaledTensor or a plain one, got {type(value).__name__}")
    made = encode(value.detach(), like._payload.dtype, None, "nearest")
    return wrap(made._payload, made._scale, like.dtype, like._home)


class _Encode(torch.autograd.Function):
    """The identity on values, from plain to scaled."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, storage: torch.dtype, scale: Tensor | None, rounding: _powers.PowerRounding, home: torch.dtype | None
    ) -> ScaledTensor:
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        if scale is None:
            scale = rms_scale(x, storage, rounding)
        payload = wide / scale.to(wide.dtype)
        _check_fits(wide, payload.to(torch.float32), storage, scale)
        return wrap(to_storage(payload, storage), scale, x.dtype, home)

    @staticmethod
    def setup_context(context: Any, inputs: tuple, output: ScaledTensor) -> None:
        context.dtype, context.storage, context.home = inputs[0].dtype, inputs[1], inputs[4]

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple:
        plain = decode(gradient, context.dtype) if isinstance(gradient, ScaledTensor) else gradient
        return plain, None, None, None, None

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: None) -> Tensor:
        return encode(tangent, context.storage, None, "nearest", context.home)


class _Decode(torch.autograd.Function):
    """The identity on values, from scaled to plain."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: ScaledTensor, dtype: torch.dtype) -> Tensor:
        value = decode_values(x, dtype)
        return value.clone() if value is x._payload else value

    @staticmethod
    def setup_context(context: Any, inputs: tuple, output: Tensor) -> None:
        x, context.target = inputs
        context.storage, context.dtype, context.home = x._payload.dtype, x.dtype, x._home

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple:
        if not isinstance(gradient, ScaledTensor):
            gradient = encode(gradient.to(context.dtype), context.storage, None, "nearest", context.home)
        return gradient, None

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: None) -> Tensor:
        return decode(tangent, context.target) if isinstance(tangent, ScaledTensor) else tangent.to(context.target)


class _Rescale(torch.autograd.Function):
    """The identity on values, to another scale."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: ScaledTensor, scale: Tensor) -> ScaledTensor:
        return rescaled(x, scale)

    @staticmethod
    def setup_context(context: Any, inputs: tuple, output: ScaledTensor) -> None:
        pass

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple:
        return gradient, None

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


def _check_fits(x: Tensor, payload: Tensor, storage: torch.dtype, scale: Tensor) -> None:
    """Raise if a finite value is beyond the payload's range; values that are not concrete saturate instead."""
    if not _powers.is_concrete(payload) or not payload.numel():
        return
    largest = torch.finfo(storage).max
    if bool(((payload.abs() > largest) & x.isfinite()).any()):
        amax = x[x.isfinite()].abs().max().item()
        if amax / largest > _powers.LARGEST:
            raise ValueError(
                f"a value of magnitude {amax:g} is beyond what any scale holds: {storage} ends at {largest:g} and "
                f"scales at 2**127, which makes {largest * _powers.LARGEST:g}"
            )
        wanted = _powers.power_of(amax / largest, "up")
        raise ValueError(
            f"a value of magnitude {amax:g} is out of {storage}'s range under the scale {scale.item():g}: give scale="
            f"{wanted:g} or more, or None"
        )


@class_function
def format_scaled(x: ScaledTensor) -> str:
    """Return the text of a tensor: its values, the scale as a power of two, the storage."""
    payload, scale = x._payload, x._scale
    if type(payload) is not Tensor or payload.is_meta:
        return f"ScaledTensor(shape={list(x.shape)}, payload={payload.dtype}, device={x.device})"
    with torch.no_grad():
        text = repr(decode_values(x.detach(), torch.float32))
    text = text.removeprefix("tensor(").removesuffix(")").replace("\n       ", "\n             ")
    words = [text.split(", dtype=")[0], f"scale=2^{round(math.log2(scale.item()))}", f"payload={payload.dtype}"]
    if x.dtype != torch.float32:
        words.append(f"dtype={x.dtype}")
    if x.requires_grad:
        words.append("requires_grad=True")
    return f"ScaledTensor({', '.join(words)})"


def _tangent(x: Tensor, context: tuple[torch.dtype, torch.dtype, torch.dtype | None]) -> ScaledTensor:
    """Encode a plain gradient in the logical dtype, storage and home that a compiled backward was traced for."""
    dtype, storage, home = context
    made = encode(x, storage, None, "nearest")
    return wrap(made._payload, made._scale, dtype, home)


register_tangent(ScaledTensor, _tangent)
