"""The vocabulary of rules: how an operator treats payloads p and scales s, where values are x = p s.

Each function registers operators, overloads such as `torch.ops.aten.relu.default`, and says by an equation which
payload and which scale their results have. Results are computed in float32 and rounded once to the storage of the
operands; results that are no floats (indices, masks) stay as they are. `family` is the heading in tables, and decides
for tensors with a home which storage the operands are brought to.

>>> import torch
>>> from halfulp.scaled import ScaledTensor
>>> _ = torch.library.define("halfulp_doc::half", "(Tensor x) -> Tensor")
>>> torch.library.impl("halfulp_doc::half", "default", lambda x: x / 2)
>>> homogeneous(torch.ops.halfulp_doc.half.default)
>>> torch.ops.halfulp_doc.half(ScaledTensor(torch.tensor([1.0, 3.0]), 2.0**-20)).scale.log2()
tensor(-20.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from ..._names import unknown
from ...kernels import present, torch_operators
from .. import _powers_of_two as _powers
from .._dtypes import EIGHT_BITS
from .._operands import (
    encode_values,
    first_scaled,
    logical_of,
    operand,
    selectable_payload,
    storage_of,
    to_float32,
)
from .._registry import implements
from .._scaled_tensor import ScaledTensor, wrap
from ._constants import align_with_constants
from ._results import (
    is_floating,
    make_result,
    mapped,
    payloads_under,
    power_of_scale,
    scale_one,
    value_of,
    values_under,
    values_under_one,
)

aten = torch_operators("aten")
# Operators whose results are elements of the argument, or their negatives: exact in every storage.
_PICKING = {aten.relu.default, aten.neg.default, aten.abs.default}


def data_movement(*operators: OpOverload, family: str = "own") -> None:
    """Register operators that move the elements of their first argument: op(p s) = op(p) s, without any rounding.

    The payload moves, the scale stays: view, gather, clone. A view shares the scale with what it is a view of.
    """
    for operator in present(operators):
        implements(operator, family=family)(_data_movement_rule(operator, operator.is_view))


def _data_movement_rule(operator: OpOverload, is_view: bool) -> Callable[..., Any]:
    def move(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        scale, dtype = x._scale, x.dtype
        results = move_elements(operator, x._payload, *arguments, **options)
        return mapped(lambda p: wrap(p, scale if is_view else scale.clone(), dtype), results)

    def view(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled() or x.is_inference():
            return move(x, *arguments, **options)
        with torch.inference_mode(False):  # a view of what is no inference tensor must not be one
            return move(x, *arguments, **options)

    return view if is_view else move


def move_elements(operator: OpOverload, payload: Tensor, *arguments: Any, **options: Any) -> Any:
    """Run an operator that moves elements on a payload: as bytes where torch has no kernel for eight bits."""
    if payload.dtype not in EIGHT_BITS or operator.is_view:
        return operator(payload, *arguments, **options)
    results = operator(payload.view(torch.uint8), *arguments, **options)
    return mapped(lambda p: p.view(payload.dtype) if isinstance(p, Tensor) and p.dtype == torch.uint8 else p, results)


def homogeneous(
    *operators: OpOverload,
    degree: int = 1,
    terms: Callable[..., float] | None = None,
    family: str = "own",
    **degrees: int,
) -> None:
    """Register operators with op(.., p_i s_i, ..) = op(.., p_i, ..) times the product of s_i^d_i.

    relu and amax are of degree 1 in their first argument, reciprocal of degree -1, a gradient of degree 1 in the
    incoming one and, where it selects by x, of degree 0 in x.

    Args:
        operators: the overloads.
        degree: of the first argument, a scaled tensor, where no argument is named; the others are taken as they are.
        terms: of the operator's arguments: a power of two that payloads are divided by, and the scale multiplied.
        family: the heading in tables.
        degrees: by the names of arguments; floating tensors among those that are not named enter as values. The
            results have the storage and dtype of the arguments of another degree than 0.

    Raises:
        ValueError: an operator has no argument of a name, or has a rule already, or the family is not registered.
    """
    for operator in present(operators):
        rule = _rule_of_degrees(operator, degrees, terms) if degrees else _homogeneous_rule(operator, degree)
        implements(operator, family=family)(rule)


def _homogeneous_rule(operator: OpOverload, degree: int) -> Callable[..., Any]:
    def scaled(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        storage, dtype = x._payload.dtype, x.dtype
        entered = selectable_payload(x) if operator in _PICKING else to_float32(x)
        results = operator(entered, *arguments, **options)
        if degree > 0:
            return payloads_under(results, [x._scale] * degree, [x])
        scale, rest = power_of_scale(x._scale, degree)
        return mapped(lambda y: make_result(y, scale.clone(), rest, storage, dtype), results)

    return scaled


def _rule_of_degrees(
    operator: OpOverload, degrees: dict[str, int], terms: Callable[..., Any] | None
) -> Callable[..., Any]:
    names = _argument_names(operator, *degrees)

    def rule(*arguments: Any, **options: Any) -> Any:
        like = first_scaled(tree_leaves((arguments, options)))
        carriers: list[Tensor] = []
        factors: list[Tensor] = []

        def entering(name: str, x: Any) -> Any:
            degree = degrees.get(name)
            if degree is None or not is_floating(x):
                return mapped(value_of, x)
            scaled = operand(x, like)
            if degree:
                carriers.append(x)
                factors.extend([scaled._scale] * degree)
            return to_float32(scaled)

        entered = [entering(name, x) for name, x in zip(names, arguments)]
        named = {name: entering(name, x) for name, x in options.items()}
        sum_scale = 1.0 if terms is None else terms(*arguments, **options)
        results = operator(*entered, **named)
        holders = carriers if any(isinstance(x, ScaledTensor) for x in carriers) else [like]
        return payloads_under(results, factors, holders, sum_scale)

    return rule


def _argument_names(operator: OpOverload, *given: str) -> list[str]:
    """Return the names of an operator's arguments; raise unless those given are among them."""
    names = [argument.name for argument in operator._schema.arguments]
    for name in given:
        if name not in names:
            raise ValueError(unknown(f"argument of {operator}", name, names))
    return names


def unit_scale(*operators: OpOverload, family: str = "own") -> None:
    """Register operators whose results have magnitudes about 1 whatever their arguments': op(p s) under the scale 1.

    sigmoid, softmax, cos: computed on values; a larger scale where the largest finite result needs it.
    """
    for operator in present(operators):
        implements(operator, family=family)(_rule_on_values(operator, is_unit=True))


def measured_scale(*operators: OpOverload, family: str = "own") -> None:
    """Register operators that no power law describes: op(p s) under a scale r next to the results' root mean square.

    lgamma, histc, linear solvers: computed on values; r is a power of two.
    """
    for operator in present(operators):
        implements(operator, family=family)(_rule_on_values(operator, is_unit=False))


def _rule_on_values(operator: OpOverload, is_unit: bool) -> Callable[..., Any]:
    def compute(*arguments: Any, **options: Any) -> Any:
        flat = [*arguments, *options.values()]
        flat = [y for x in flat for y in (x if isinstance(x, (list, tuple)) else (x,))]
        storage, dtype = storage_of(flat), logical_of(flat)
        arguments, options = mapped(value_of, (arguments, options))
        return mapped(lambda y: _encode_result(y, storage, dtype, is_unit), operator(*arguments, **options))

    return compute


def _encode_result(y: Any, storage: torch.dtype, dtype: torch.dtype, is_unit: bool) -> Any:
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.layout != torch.strided:
        return y
    return values_under_one(y, storage, dtype) if is_unit else encode_values(y, storage, dtype=dtype)


def decoded(*operators: OpOverload, family: str = "own") -> None:
    """Register operators with plain results, op(p s) as it is: truth values, indices, complex numbers."""
    for operator in present(operators):
        implements(operator, family=family)(_rule_of_plain_results(operator))


def _rule_of_plain_results(operator: OpOverload) -> Callable[..., Any]:
    def compute(*arguments: Any, **options: Any) -> Any:
        arguments, options = mapped(value_of, (arguments, options))
        return operator(*arguments, **options)

    return compute


def gate(*operators: OpOverload, family: str = "own", at_least_one: bool = False, of: str | None = None) -> None:
    """Register operators f(x) = x g(x) with a gate g about 1: op(p s) under the scale s, computed on values.

    Args:
        operators: the overloads.
        family: the heading in tables.
        at_least_one: results do not vanish where arguments do, so that their scale is at least 1: softplus.
        of: the name of the argument whose scale stays; the first by default.
    """
    for operator in present(operators):
        implements(operator, family=family)(_gate_rule(operator, of, at_least_one))


def _gate_rule(operator: OpOverload, of: str | None, at_least_one: bool) -> Callable[..., Any]:
    position = 0 if of is None else _argument_names(operator, of).index(of)

    def rule(*arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        kept = operand(arguments[position], first_scaled(flat))
        scale = _powers.maximum_scale(kept._scale, scale_one(kept)) if at_least_one else kept._scale
        values = operator(*mapped(value_of, arguments), **mapped(value_of, options))
        holders = [x for x in flat if isinstance(x, Tensor)]
        return mapped(lambda y: values_under(y, scale, storage_of(holders), logical_of(holders)), values)

    return rule


def aligned(*operators: OpOverload, family: str = "own") -> None:
    """Register operators with op(s p, s q, ..) = s op(p, q, ..): every floating tensor under the largest scale s.

    Numbers and plain tensors without dimensions are constants: see `align_with_constants`.
    """
    for operator in present(operators):
        implements(operator, family=family)(_aligned_rule(operator))


def _aligned_rule(operator: OpOverload) -> Callable[..., Any]:
    def rule(*arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        holders = [x for x in flat if isinstance(x, ScaledTensor)]
        payloads, scale = align_with_constants([x for x in flat if is_floating(x)])
        found = iter(payloads)
        arguments, options = mapped(lambda x: next(found) if is_floating(x) else x, (arguments, options))
        results = operator(*arguments, **options)
        return payloads_under(results, [scale], holders + [x for x in flat if is_floating(x) and x.dim()])

    return rule


def overloads(*packets: OpOverloadPacket) -> list[OpOverload]:
    """Return the overloads of operators that are neither views, nor composites, and write no argument."""
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
