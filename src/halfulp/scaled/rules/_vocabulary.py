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

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves, tree_map

from ..._names import describe_unknown_name
from ...kernels import find_torch_operators, list_present_operators
from ...kernels._plain_memory import is_floating
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import (
    INFINITY_STAND_IN,
    LEAST_SATURATED_STAND_IN,
    bring_payload_under,
    choose_product_storage,
    choose_storage,
    encode_values,
    find_scaled,
    find_stand_ins,
    make_addend,
    make_operand,
    make_scaled_to_fit,
    promote_dtypes,
    saturate_stand_ins,
)
from .._registry import EIGHT_BITS, FAMILIES, implements
from .._scaled_tensor import ScaledTensor, decode_values, to_float32, wrap

# Beyond this scale, or below its inverse, payloads are brought back to about 1.
_FARTHEST_SCALE = 2.0**60


def map_tree(function: Callable[[Any], Any], x: Any) -> Any:
    """Return tree_map(function, x), without its cost for a tensor and for plain tuples, lists and dicts."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind(map_tree(function, y) for y in x)
    if kind is dict:
        return {key: map_tree(function, y) for key, y in x.items()}
    return tree_map(function, x) if isinstance(x, (tuple, list, dict)) else function(x)


def decode_value(x: Any) -> Any:
    """Return a tensor's values in float32, float32 for a floating dtype, and anything else unchanged."""
    if isinstance(x, ScaledTensor):
        return decode_values(x, torch.float32)
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(torch.float32)
    return torch.float32 if isinstance(x, torch.dtype) and x.is_floating_point else x


def make_unit_scale(like: Tensor) -> Tensor:
    """Return the scale 1 on a tensor's device."""
    return torch.ones((), dtype=torch.float32, device=like.device)


def raise_scale(scale: Tensor, degree: int) -> tuple[Tensor, Tensor | float]:
    """Return scale^degree as a scale, and the factor beyond its range."""
    value = _powers.read_concrete(scale)
    if value is not None:
        return _powers.multiply_scales(torch.tensor(1.0, dtype=torch.float32, device="cpu"), value**degree)
    return _powers.multiply_scales(torch.ones_like(scale), scale.double() ** degree)


def make_result(y: Any, scale: Tensor, rest: Tensor | float, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Return a float32 payload under a scale as a scaled tensor, and what is no float unchanged."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    y = _powers.multiply_by_power(y, rest)
    value = _powers.read_concrete(scale)
    if value is not None and not 1 / _FARTHEST_SCALE <= value <= _FARTHEST_SCALE and y.numel():
        # Iterations that multiply scales would leave float32's range.
        amax = torch.nan_to_num(y.abs(), 0.0, 0.0, 0.0).amax()
        power = _powers.round_to_power(torch.where(amax > 0, amax, 1.0))
        scale, rest = _powers.multiply_scales(scale, power)
        y = _powers.multiply_by_power(y / power, rest)
    return make_scaled_to_fit(y, scale, storage, dtype)


def make_scaled_result(
    y: Tensor,
    scales: Sequence[Tensor],
    storage: torch.dtype,
    dtype: torch.dtype,
    number: float = 1.0,
    factor: float = 1.0,
) -> ScaledTensor:
    """Return a payload times a factor, under the product of scales and a power of two, as a scaled tensor."""
    has_product = len(scales) != 1 or number != 1.0
    has_factor = type(factor) is not float or factor != 1.0  # a traced number is not compared
    if (has_product or has_factor or y.dtype != storage) and len(scales) <= 3 and _powers.is_fused(y):
        return wrap(*fused.finish_payload(y, scales, storage, number=number, factor=factor), dtype)
    scale, rest = _powers.multiply_scales(*scales, number) if has_product else (scales[0].clone(), 1.0)
    y = y.to(torch.float32) * factor if has_factor else y
    made: ScaledTensor = make_result(y, scale, rest, storage, dtype)
    return made


def scale_payloads(results: Any, scales: list[Tensor], holders: list[Any], sum_scale: float = 1.0) -> Any:
    """Return floating results, payloads under the product of scales, each with a scale of its own."""
    storage, dtype = choose_storage(holders), promote_dtypes(holders)
    scales = scales or [make_unit_scale(find_scaled(holders))]
    return map_tree(
        lambda y: make_scaled_result(y, scales, storage, dtype, sum_scale, 1.0 / sum_scale) if is_floating(y) else y,
        results,
    )


def scale_values(y: Any, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Return float32 values as a scaled tensor of a given scale, and what is no float unchanged."""
    if not is_floating(y):
        return y
    if _powers.is_fused(y) and y.dtype in fused.PAYLOAD_CODECS:
        return wrap(*fused.finish_payload(y, (scale,), storage, "values"), dtype)
    return make_result(y, scale.clone(), _powers.divide_scales(make_unit_scale(y), scale), storage, dtype)


def encode_measured(y: Any, holders: list[Any]) -> Any:
    """Encode floating values under a measured scale, in the storage and dtype of holders."""
    return encode_values(y, choose_storage(holders), dtype=promote_dtypes(holders)) if is_floating(y) else y


def align_operands(*operands: Any) -> tuple[list[Tensor], Tensor, torch.dtype, torch.dtype]:
    """Return operands' float32 payloads under their largest scale, that scale, the storage and the logical dtype.

    Numbers that stand for infinity do not decide the scale, and stay about as much larger than the rest as float32 can
    hold.
    """
    like = find_scaled(operands)
    tensors = [make_operand(x, like) for x in operands]
    storage, dtype = choose_storage(operands), promote_dtypes(operands)
    values: list[Any] = [_powers.read_concrete(x._scale) for x in tensors]
    if None in values:
        scale = _powers.find_deciding_scale(*(x._scale for x in tensors))
        payloads = [bring_payload_under(x, scale) for x in tensors]
    else:
        largest = _powers.find_deciding_value(values)
        scale = torch.tensor(largest, dtype=torch.float32, device="cpu")
        payloads = [_powers.multiply_within_range(to_float32(x), value / largest) for x, value in zip(tensors, values)]
    payloads = [_saturate_stand_ins(p, given, value, storage) for p, given, value in zip(payloads, operands, values)]
    return payloads, scale, storage, dtype


def _saturate_stand_ins(payload: Tensor, given: Any, scale: float | None, storage: torch.dtype) -> Tensor:
    """Clamp an operand's stand-ins for infinity to the storage's range."""
    if isinstance(given, ScaledTensor):
        if scale is None or scale < _powers.HUGE_SCALE:
            return payload
    elif not isinstance(given, Tensor) or not given.dim():
        return payload
    largest = torch.finfo(storage).max
    if storage in (torch.float32, torch.bfloat16) or (
        _powers.is_concrete(payload) and not (payload.abs() > largest).any()
    ):
        return payload
    stands_in = (decode_value(given) <= -INFINITY_STAND_IN) & (payload.abs() > largest) & payload.isfinite()
    return torch.where(stands_in, payload.sign() * largest, payload)


def round_root(count: int) -> float:
    """Return the power of two below the square root of a number of terms.

    Any power of two would give the same values: of a symbolic size the one of the size that is traced is taken, so
    that other sizes run in the same graph.
    """
    if isinstance(count, torch.SymInt):
        count = count.node.hint if count.node.has_hint() else 1
    power = 1
    while count >= 4 * power * power:
        power *= 2
    return float(power)


# From these magnitudes on a constant stands for infinity: a scale that holds it would flush other numbers to 0.
_STAND_IN_BY_STORAGE = {torch.float16: 2.0**24, torch.float8_e5m2: 2.0**24, torch.float8_e4m3fn: 2.0**12}
# Among zeros, larger constants are put at the top of the payload's range: numbers added later are mostly smaller.
_LARGE_CONSTANT = 2.0**12


def is_constant(x: Any) -> bool:
    """Return whether x is a number or a plain tensor without dimensions, which never decides a scale."""
    return not isinstance(x, ScaledTensor) and (not isinstance(x, Tensor) or x.dim() == 0)


def align_with_constants(operands: list[Any]) -> tuple[list[Any], Tensor]:
    """Return float32 payloads under their largest scale, to which constants do not contribute.

    It is at least what a constant needs. One that stands for infinity saturates, at 128 or more. Infinities stay; among
    zeros of any scale a constant's own power of two is taken, for a large one what it needs.
    """
    like, storage = find_scaled(operands), choose_storage(operands)
    tensors = {i: make_addend(x, like) for i, x in enumerate(operands) if not is_constant(x)}
    constants = {i: make_operand(x, like) for i, x in enumerate(operands) if i not in tensors}
    filled = {i for i, x in tensors.items() if is_filled_with_large_number(x)}
    if len(filled) < len(tensors):
        constants |= {i: tensors.pop(i) for i in filled}
    scale = _powers.find_deciding_scale(*(x._scale for x in tensors.values()))
    if constants:
        scale = raise_scale_for_constants(scale, storage, *constants.values())
    payloads = {i: bring_payload_under(x, scale) for i, x in tensors.items()}
    payloads = {
        i: saturate_stand_ins(p, scale, storage, find_stand_ins(operands[i], like)) for i, p in payloads.items()
    }
    payloads |= {i: make_constant_payload(x, scale, storage) for i, x in constants.items()}
    return [payloads[i] for i in range(len(operands))], scale


def is_filled_with_large_number(x: ScaledTensor) -> bool:
    """Return whether x is one large number everywhere, as torch.full_like(x, -1e9) is; False if not concrete."""
    scale = _powers.read_concrete(x._scale)
    if scale is None or scale < _LARGE_CONSTANT / 2**16 or not _powers.is_concrete(x._payload) or not x.numel():
        return False
    low, high = (bound.item() for bound in torch.aminmax(to_float32(x).abs()))
    return low * scale >= _LARGE_CONSTANT and high == low


def raise_scale_for_constants(scale: Tensor, storage: torch.dtype, *constants: ScaledTensor) -> Tensor:
    """Return the scale, raised until the constants fit the storage; where x is all zeros, the constants' largest."""
    value = _powers.read_concrete(scale)
    roomy = _powers.take_largest_of_scales(scale, *(_find_least_scale(c, storage) for c in constants))
    return (
        roomy if value not in (None, _powers.ZERO_SCALE) else _choose_scale_of_zeros(scale, roomy, storage, constants)
    )


def _choose_scale_of_zeros(
    scale: Tensor, otherwise: Tensor, storage: torch.dtype, constants: tuple[ScaledTensor, ...]
) -> Tensor:
    """Return the constants' largest scale for zeros of any scale; at least 1 for a large one, and what it needs."""
    own = _powers.take_largest_of_scales(*(c._scale for c in constants))
    roomy = _powers.take_largest_of_scales(*(_find_least_scale(c, storage) for c in constants)).clamp(min=1.0)
    return torch.where(scale == _powers.ZERO_SCALE, torch.where(own < _LARGE_CONSTANT, own, roomy), otherwise)


def _find_least_scale(constant: ScaledTensor, storage: torch.dtype) -> Tensor:
    largest = torch.finfo(storage).max
    value = torch.nan_to_num(to_float32(constant).abs() * constant._scale, 0.0, 0.0).amax()
    return _powers.round_to_power(
        torch.where(value >= _find_stand_in(storage), LEAST_SATURATED_STAND_IN, value) / largest, "up"
    )


def make_constant_payload(constant: ScaledTensor, scale: Tensor, storage: torch.dtype) -> Tensor:
    """Return a constant's payload under a scale; a constant that stands for infinity saturates."""
    payload = to_float32(constant)
    largest = torch.finfo(storage).max
    moved = _powers.multiply_by_power(payload, _powers.divide_scales(constant._scale, scale)).clamp(
        -_powers.FLOAT32_MAX, _powers.FLOAT32_MAX
    )
    if storage == torch.bfloat16:  # to which float32's largest number would be rounded as infinity
        held = (largest / scale).clamp(max=largest)
        moved = torch.minimum(torch.maximum(moved, -held), held)
    stands_in = (moved.abs() > largest) & (payload.abs() * constant._scale >= _find_stand_in(storage))
    enough = _powers.take_largest_of_scales(torch.full_like(scale, largest), LEAST_SATURATED_STAND_IN / scale)
    return torch.where(payload.isinf(), payload, torch.where(stands_in, moved.sign() * enough, moved))


def align_constants(x: ScaledTensor, *constants: Any, room: bool = True) -> tuple[list[Any], Tensor]:
    """Return constants as payloads, and x's scale, raised as they need, or theirs if x is zeros of any scale.

    Args:
        x: a scaled tensor.
        constants: numbers, or tensors without dimensions.
        room: False where they are bounds, which results need not reach: only zeros of any scale take theirs.
    """
    storage, own = x._payload.dtype, _powers.read_concrete(x._scale)
    if own is not None and all(isinstance(c, (int, float)) for c in constants):
        numbers = [float(c) for c in constants]
        needed = [_find_scale_for_number(c, storage) for c in numbers] if room else []
        if own == _powers.ZERO_SCALE:
            powers = {c: _powers.round_number(abs(c)) for c in numbers if c and math.isfinite(c)}
            needed = [
                p if p < _LARGE_CONSTANT else max(1.0, _find_scale_for_number(c, storage)) for c, p in powers.items()
            ]
        own = max([own, *needed])
        return [_make_number_payload(c, own, storage) for c in numbers], torch.full(
            (), own, dtype=torch.float32, device="cpu"
        )
    tensors = [make_operand(c, x) for c in constants]
    scale = (
        raise_scale_for_constants(x._scale, storage, *tensors)
        if room
        else _choose_scale_of_zeros(x._scale, x._scale, storage, tuple(tensors))
    )
    return [make_constant_payload(c, scale, storage) for c in tensors], scale


def _find_scale_for_number(constant: float, storage: torch.dtype) -> float:
    size = abs(constant)
    if not 0 < size < math.inf:
        return _powers.ZERO_SCALE
    return _powers.round_number(
        (LEAST_SATURATED_STAND_IN if size >= _find_stand_in(storage) else size) / torch.finfo(storage).max, "up"
    )


def _make_number_payload(constant: float, scale: float, storage: torch.dtype) -> float:
    if not math.isfinite(constant):
        return constant
    payload, largest = constant / scale, torch.finfo(storage).max
    if storage == torch.bfloat16:
        held = min(largest, largest / scale)
        return min(max(payload, -held), held)
    if abs(payload) > largest and abs(constant) >= _find_stand_in(storage):
        return math.copysign(min(max(largest, LEAST_SATURATED_STAND_IN / scale), _powers.FLOAT32_MAX), constant)
    return min(max(payload, -_powers.FLOAT32_MAX), _powers.FLOAT32_MAX)


def _find_stand_in(storage: torch.dtype) -> float:
    return _STAND_IN_BY_STORAGE.get(storage, _powers.HUGE_SCALE)


aten = find_torch_operators("aten")
# Operators whose results are elements of the argument, or their negatives: exact in every storage.
_SELECTING_OPERATORS = {aten.relu.default, aten.neg.default, aten.abs.default}


def data_movement(*operators: OpOverload, family: str = "own") -> None:
    """Register operators that move the elements of their first argument: op(p s) = op(p) s, without any rounding.

    The payload moves, the scale stays: view, gather, clone. A view shares the scale with what it is a view of.
    """
    for operator in list_present_operators(operators):
        implements(operator, family=family)(_make_data_movement_rule(operator, operator.is_view))


def _make_data_movement_rule(operator: OpOverload, is_view: bool) -> Callable[..., Any]:
    def move(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        payload, scale, dtype = x._payload, x._scale, x.dtype
        if is_view or payload.dtype not in EIGHT_BITS:
            results = operator(payload, *arguments, **options)
            return map_tree(lambda p: wrap(p, scale if is_view else scale.clone(), dtype), results)
        # torch has no kernels for eight-bit floats.
        results = operator(payload.view(torch.uint8), *arguments, **options)
        return map_tree(lambda p: wrap(p.view(payload.dtype), scale.clone(), dtype), results)

    def view(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled() or x.is_inference():
            return move(x, *arguments, **options)
        with torch.inference_mode(False):  # a view of what is no inference tensor must not be one
            return move(x, *arguments, **options)

    return view if is_view else move


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
    for operator in list_present_operators(operators):
        rule = _make_rule_of_degrees(operator, degrees, terms) if degrees else _make_homogeneous_rule(operator, degree)
        implements(operator, family=family)(rule)


def _make_homogeneous_rule(operator: OpOverload, degree: int) -> Callable[..., Any]:
    def scaled(x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        storage, dtype = x._payload.dtype, x.dtype
        keeps = operator in _SELECTING_OPERATORS and storage not in EIGHT_BITS  # for which torch has no such kernels
        entered = x._payload if keeps else to_float32(x)
        results = operator(entered, *arguments, **options)
        if degree > 0:
            return scale_payloads(results, [x._scale] * degree, [x])
        scale, rest = raise_scale(x._scale, degree)
        return map_tree(lambda y: make_result(y, scale.clone(), rest, storage, dtype), results)

    return scaled


def _make_rule_of_degrees(
    operator: OpOverload, degrees: dict[str, int], terms: Callable[..., Any] | None
) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    for name in degrees:
        if name not in names:
            raise ValueError(describe_unknown_name(f"argument of {operator}", name, names))

    def rule(*arguments: Any, **options: Any) -> Any:
        like = find_scaled(tree_leaves((arguments, options)))
        carriers: list[Tensor] = []
        factors: list[Tensor] = []

        def entering(name: str, x: Any) -> Any:
            degree = degrees.get(name)
            if degree is None or not is_floating(x):
                return map_tree(decode_value, x)
            scaled = make_operand(x, like)
            if degree:
                carriers.append(x)
                factors.extend([scaled._scale] * degree)
            return to_float32(scaled)

        entered = [entering(name, x) for name, x in zip(names, arguments)]
        named = {name: entering(name, x) for name, x in options.items()}
        sum_scale = 1.0 if terms is None else terms(*arguments, **options)
        results = operator(*entered, **named)
        holders = carriers if any(isinstance(x, ScaledTensor) for x in carriers) else [like]
        return scale_payloads(results, factors, holders, sum_scale)

    return rule


def unit_scale(*operators: OpOverload, family: str = "own") -> None:
    """Register operators whose results have magnitudes about 1 whatever their arguments': op(p s) under the scale 1.

    sigmoid, softmax, cos: computed on values; a larger scale where the largest finite result needs it.
    """
    for operator in list_present_operators(operators):
        implements(operator, family=family)(_make_value_rule(operator, True))


def measured_scale(*operators: OpOverload, family: str = "own", scaled: int = 0) -> None:
    """Register operators that no power law describes: op(p s) under a scale r next to the results' root mean square.

    lgamma, histc, linear solvers: computed on values; r is a power of two. Results beyond the first `scaled` ones stay
    plain, such as what a layer saves for its backward pass.
    """
    for operator in list_present_operators(operators):
        is_product = family in FAMILIES and FAMILIES[family].operands == "home"
        implements(operator, family=family)(_make_value_rule(operator, False, scaled, is_product))


def _make_value_rule(
    operator: OpOverload, is_unit: bool, scaled: int = 0, is_product: bool = False
) -> Callable[..., Any]:
    def compute(*arguments: Any, **options: Any) -> Any:
        flat = [*arguments, *options.values()]
        flat = [y for x in flat for y in (x if isinstance(x, (list, tuple)) else (x,))]
        storage, dtype = (choose_product_storage if is_product else choose_storage)(flat), promote_dtypes(flat)
        arguments, options = map_tree(decode_value, (arguments, options))
        results = operator(*arguments, **options)

        def encode(y: Any) -> Any:
            if not is_floating(y) or y.layout != torch.strided:
                return y
            if is_unit:  # under the scale 1, or what the largest needs
                return make_scaled_to_fit(y, make_unit_scale(y), storage, dtype)
            return encode_values(y, storage, dtype=dtype)

        return (*map_tree(encode, results[:scaled]), *results[scaled:]) if scaled else map_tree(encode, results)

    return compute


def decoded(*operators: OpOverload, family: str = "own") -> None:
    """Register operators with plain results, computed by value: booleans, indices, complex numbers."""
    for operator in list_present_operators(operators):
        implements(operator, family=family)(_make_plain_rule(operator))


def _make_plain_rule(operator: OpOverload) -> Callable[..., Any]:
    def compute(*arguments: Any, **options: Any) -> Any:
        arguments, options = map_tree(decode_value, (arguments, options))
        return operator(*arguments, **options)

    return compute


def gate(*operators: OpOverload, family: str = "own", at_least_one: bool = False) -> None:
    """Register operators f(x) = x g(x) with a gate g about 1: op(p s) under the scale s, computed on values.

    Args:
        operators: the overloads.
        family: the heading in tables.
        at_least_one: results do not vanish where arguments do, so that their scale is at least 1: softplus.
    """
    for operator in list_present_operators(operators):
        implements(operator, family=family)(_make_gate_rule(operator, at_least_one))


def _make_gate_rule(operator: OpOverload, at_least_one: bool) -> Callable[..., Any]:
    def rule(*arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        kept = make_operand(arguments[0], find_scaled(flat))
        scale = _powers.take_largest_of_scales(kept._scale, make_unit_scale(kept)) if at_least_one else kept._scale
        values = operator(*map_tree(decode_value, arguments), **map_tree(decode_value, options))
        holders = [x for x in flat if isinstance(x, Tensor)]
        return map_tree(lambda y: scale_values(y, scale, choose_storage(holders), promote_dtypes(holders)), values)

    return rule


def aligned(*operators: OpOverload, family: str = "own") -> None:
    """Register operators with op(s p, s q, ..) = s op(p, q, ..): every floating tensor under the largest scale s.

    Numbers and plain tensors without dimensions are constants: see `align_with_constants`.
    """
    for operator in list_present_operators(operators):
        implements(operator, family=family)(_make_aligned_rule(operator))


def _make_aligned_rule(operator: OpOverload) -> Callable[..., Any]:
    def rule(*arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        holders = [x for x in flat if isinstance(x, ScaledTensor)]
        payloads, scale = align_with_constants([x for x in flat if is_floating(x)])
        found = iter(payloads)
        arguments, options = map_tree(lambda x: next(found) if is_floating(x) else x, (arguments, options))
        results = operator(*arguments, **options)
        return scale_payloads(results, [scale], holders + [x for x in flat if is_floating(x) and x.dim()])

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
