"""How families of operators treat scales: what most rules are one line of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_map

from ...kernels import present, torch_operators
from .. import _powers_of_two as _powers
from .._dtypes import EIGHT_BITS
from .._operands import (
    STAND_IN,
    decoded,
    encoded,
    first_scaled,
    logical_of,
    made_to_fit,
    operand,
    selectable,
    storage_of,
    widened,
)
from .._registry import implements
from .._scaled_tensor import ScaledTensor, wrap

# A scale beyond this, or below its inverse, is no longer that of a tensor's values.
_FAR = 2.0**60


def moving(*operators: OpOverload) -> None:
    """Register operators that move the elements of their first argument: the payload moves, the scale stays.

    op(p * s) = op(p) * s, with no rounding. A view shares the scale with what it is a view of.
    """
    for operator in present(operators):
        implements(operator, family="pass-through")(_mover(operator, operator.is_view))


def _mover(operator: OpOverload, is_view: bool) -> Callable:
    def move(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        scale, dtype = x._scale, x.dtype
        results = moved(operator, x._payload, *arguments, **options)
        return tree_map(lambda p: wrap(p, scale if is_view else scale.clone(), dtype), results)

    def view(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled() or x.is_inference():
            return move(x, *arguments, **options)
        with torch.inference_mode(False):  # a view of what is no inference tensor must not be one
            return move(x, *arguments, **options)

    return view if is_view else move


def moved(operator: OpOverload, payload: Tensor, *arguments: Any, **options: Any) -> Any:
    """An operator that moves elements, on a payload: as bytes where torch has no such kernel for eight bits."""
    if payload.dtype not in EIGHT_BITS or operator.is_view:
        return operator(payload, *arguments, **options)
    results = operator(payload.view(torch.uint8), *arguments, **options)
    return tree_map(lambda p: p.view(payload.dtype) if isinstance(p, Tensor) and p.dtype == torch.uint8 else p, results)


# Whose results are elements of the argument, or their negatives: exact in every storage.
aten = torch_operators("aten")
_PICKING = {aten.relu.default, aten.neg.default, aten.abs.default}


def linear(*operators: OpOverload) -> None:
    """Register operators of one scaled tensor, the first argument, that commute with a positive factor.

    op(p * s) = op(p) * s: relu, abs, neg, amax; computed in float32 and rounded once. Results that are no floats
    (indices, masks) are what they are.
    """
    for operator in present(operators):
        implements(operator, family="pass-through")(_of_degree(operator, 1))


def of_degree(degree: int, *operators: OpOverload) -> None:
    """Register operators with op(p * s) = op(p) * s^degree: square, reciprocal."""
    for operator in present(operators):
        implements(operator, family="power law")(_of_degree(operator, degree))


def _of_degree(operator: OpOverload, degree: int) -> Callable:
    def scaled(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        storage, dtype = x._payload.dtype, x.dtype
        scale, rest = _powers.product(*[x._scale] * degree) if degree > 0 else power(x._scale, degree)
        entered = selectable(x) if operator in _PICKING else widened(x)
        results = operator(entered, *arguments, **options)
        return tree_map(lambda y: result(y, scale.clone(), rest, storage, dtype), results)

    return scaled


def result(y: Any, scale: Tensor, rest: Tensor | float, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """A float32 payload as a scaled tensor; whatever is no float as it is."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    y = _powers.times(y, rest)
    value = _powers.known(scale)
    if value is not None and not 1 / _FAR <= value <= _FAR and y.numel():
        y, scale = _centred(y, scale)
    return made_to_fit(y, scale, storage, dtype)


def _centred(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A payload brought back to about 1, as iterations that multiply scales leave float32's range for nothing."""
    amax = torch.nan_to_num(y.abs(), 0.0, 0.0, 0.0).amax()
    power = _powers.round_to_power(torch.where(amax > 0, amax, 1.0))
    total, rest = _powers.product(scale, power)
    return _powers.times(y / power, rest), total


def power(scale: Tensor, degree: int) -> tuple[Tensor, Tensor | float]:
    """scale^degree as a scale, and what its range cannot hold."""
    value = _powers.known(scale)
    if value is not None:
        return _powers.product(torch.tensor(1.0, dtype=torch.float32, device="cpu"), value**degree)
    return _powers.product(torch.ones_like(scale), scale.double() ** degree)


def bounded(*operators: OpOverload, family: str = "unit output") -> None:
    """Register operators whose results have magnitudes about 1 whatever their arguments': values in, scale 1 out.

    exp, tanh, sigmoid, softmax: op(p * s) computed on decoded values in float32.
    """
    for operator in present(operators):
        implements(operator, family=family)(_on_decoded(operator, unit=True))


def measured(*operators: OpOverload, family: str = "measured") -> None:
    """Register operators that no power law describes: values in, the scale of the results measured.

    The scale is a power of two next to the root mean square of the results.
    """
    for operator in present(operators):
        implements(operator, family=family)(_on_decoded(operator, unit=False))


def _on_decoded(operator: OpOverload, unit: bool) -> Callable:
    def compute(*arguments: Any, **options: Any) -> Any:
        flat = [*arguments, *options.values()]
        flat = [y for x in flat for y in (x if isinstance(x, (list, tuple)) else (x,))]
        storage, dtype = storage_of(flat), logical_of(flat)
        arguments, options = tree_map(value_of, (arguments, options))
        return tree_map(lambda y: _held(y, storage, dtype, unit), operator(*arguments, **options))

    return compute


def on_plain(*operators: OpOverload, family: str) -> None:
    """Register operators of values whose results are left plain: truth values, indices, complex numbers."""
    for operator in present(operators):
        implements(operator, family=family)(_plain(operator))


def _plain(operator: OpOverload) -> Callable:
    def compute(*arguments: Any, **options: Any) -> Any:
        arguments, options = tree_map(value_of, (arguments, options))
        return operator(*arguments, **options)

    return compute


def overloads(*packets: OpOverloadPacket) -> list[OpOverload]:
    """The overloads of operators that write no argument, view none, and that torch does not compose of others."""
    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [
        operator
        for operator in found
        if torch._C._dispatch_has_kernel(operator.name())  # not so for TorchScript's own, of lists of tensors say
        and not operator._schema.is_mutable
        and not operator.is_view
        and any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
        and not operator._can_decompose()
    ]


def value_of(x: Any) -> Any:
    """A scaled tensor's values in float32, a plain floating tensor in float32; whatever else as it is."""
    if isinstance(x, ScaledTensor):
        return decoded(x, torch.float32)
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(torch.float32)
    return torch.float32 if isinstance(x, torch.dtype) and x.is_floating_point else x


def _held(y: Any, storage: torch.dtype, dtype: torch.dtype, unit: bool) -> Any:
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.layout != torch.strided:
        return y
    return made_to_fit(y, one(y), storage, dtype) if unit else encoded(y, storage, dtype=dtype)


def one(like: Tensor) -> Tensor:
    """The scale 1."""
    return torch.ones((), dtype=torch.float32, device=like.device)


def aligned(*operands: Any) -> tuple[list[Tensor], Tensor, torch.dtype, torch.dtype]:
    """float32 payloads of several operands under their largest scale; the scale, the storage, the logical dtype.

    Numbers that stand for infinity do not decide the scale, and stay about as much larger than the rest as float32 can
    hold.
    """
    like = first_scaled(operands)
    tensors = [operand(x, like) for x in operands]
    scale = _powers.deciding(*(x._scale for x in tensors))
    storage = storage_of(operands)
    payloads = [_powers.times(widened(x), _powers.towards(x._scale, scale)) for x in tensors]
    payloads = [saturated(p, given, storage) for p, given in zip(payloads, operands)]
    return payloads, scale, storage, logical_of(operands)


def saturated(payload: Tensor, given: Any, storage: torch.dtype) -> Tensor:
    """The payload of an operand in which numbers that stand for infinity leave no room for larger ones in a result."""
    if isinstance(given, ScaledTensor):
        scale = _powers.known(given._scale)
        if scale is None or scale < _powers.HUGE:
            return payload
    elif not isinstance(given, Tensor) or not given.dim():
        return payload
    largest = torch.finfo(storage).max
    if storage in (torch.float32, torch.bfloat16) or (
        _powers.in_sight(payload) and not (payload.abs() > largest).any()
    ):
        return payload
    stands_in = (value_of(given) <= -STAND_IN) & (payload.abs() > largest) & payload.isfinite()
    return torch.where(stands_in, payload.sign() * largest, payload)
