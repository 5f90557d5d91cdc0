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
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..._names import describe_unknown_name
from ...kernels import list_present_operators
from ...kernels._plain_memory import is_floating
from ...subclass._composite_tensor import allow_views
from ...subclass._derivation import aten
from ...subclass._rule_table import find_outlier_mask
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import (
    LEAST_OUTLIER,
    LEAST_OUTLIER_BY_STORAGE,
    bring_payload_under_scale,
    choose_product_storage,
    choose_storage,
    encode_ignoring_outliers,
    encode_operand,
    encode_plain_tensor,
    find_outliers,
    find_scaled_tensor,
    fit_payload,
    map_tree,
    promote_dtypes,
    saturate_outliers,
)
from .._powers_of_two import LEAST_OUTLIER_CLAMP_LIMIT
from .._registry import EIGHT_BIT_DTYPES, FAMILY_BY_NAME, FULL_RANGE_STORAGES, implements_each
from .._scaled_tensor import ScaledTensor, decode_values, get_float32_payload, wrap_payload

# Beyond this scale, or below its inverse, payloads are brought back to about 1.
_LARGEST_ORDINARY_SCALE = 2.0**60


def convert_argument_to_float32(x: Any) -> Any:
    """Return a tensor's values in float32, float32 for a floating dtype, and anything else unchanged."""
    if isinstance(x, ScaledTensor):
        return decode_values(x, torch.float32)
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(torch.float32)
    return torch.float32 if isinstance(x, torch.dtype) and x.is_floating_point else x


def make_unit_scale(like: Tensor) -> Tensor:
    """Return the scale 1 on a tensor's device."""
    return torch.ones((), dtype=torch.float32, device=like.device)


def raise_scale_to_degree(scale: Tensor, degree: int) -> tuple[Tensor, Tensor | float]:
    """Return scale^degree as a scale, and the factor beyond its range."""
    value = _powers.read_scale(scale)
    if value is not None:
        return _powers.multiply_scales(torch.tensor(1.0, dtype=torch.float32, device="cpu"), value**degree)
    return _powers.multiply_scales(torch.ones_like(scale), scale.double() ** degree)


def wrap_rule_payload(y: Any, scale: Tensor, rest: Tensor | float, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Return a float32 payload under a scale as a scaled tensor, and what is no float unchanged."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    y = _powers.multiply_by_power(y, rest)
    value = _powers.read_scale(scale)
    if value is not None and not 1 / _LARGEST_ORDINARY_SCALE <= value <= _LARGEST_ORDINARY_SCALE and y.numel():
        # Iterations that multiply scales would leave float32's range.
        amax = torch.nan_to_num(y.abs(), 0.0, 0.0, 0.0).amax()
        power = _powers.round_to_power(torch.where(amax > 0, amax, 1.0))
        scale, rest = _powers.multiply_scales(scale, power)
        y = _powers.multiply_by_power(y / power, rest)
    return fit_payload(y, scale, storage, dtype)


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
    if (has_product or has_factor or y.dtype != storage) and len(scales) <= 3 and _powers.has_fused_kernels(y):
        return wrap_payload(*fused.multiply_payload(y, scales, storage, number=number, factor=factor), dtype)
    scale, rest = _powers.multiply_scales(*scales, number) if has_product else (scales[0].clone(), 1.0)
    y = y.to(torch.float32) * factor if has_factor else y
    made: ScaledTensor = wrap_rule_payload(y, scale, rest, storage, dtype)
    return made


def make_scaled_results(results: Any, scales: list[Tensor], holders: list[Any], sum_scale: float = 1.0) -> Any:
    """Return floating results, payloads under the product of scales, each with a scale of its own."""
    storage, dtype = choose_storage(holders), promote_dtypes(holders)
    scales = scales or [make_unit_scale(find_scaled_tensor(holders))]
    return map_tree(
        lambda y: make_scaled_result(y, scales, storage, dtype, sum_scale, 1.0 / sum_scale) if is_floating(y) else y,
        results,
    )


def encode_under_scale(y: Any, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Return float32 values as a scaled tensor of a given scale, and what is no float unchanged."""
    if not is_floating(y):
        return y
    if _powers.has_fused_kernels(y) and y.dtype in fused.PAYLOAD_CODEC_BY_DTYPE:
        return wrap_payload(*fused.multiply_payload(y, (scale,), storage, "values"), dtype)
    return wrap_rule_payload(y, scale.clone(), _powers.divide_scales(make_unit_scale(y), scale), storage, dtype)


def encode_results(y: Any, holders: list[Any]) -> Any:
    """Encode floating values under a measured scale, in the storage and dtype of holders."""
    return encode_plain_tensor(y, choose_storage(holders), dtype=promote_dtypes(holders)) if is_floating(y) else y


def align_operands(*operands: Any) -> tuple[list[Tensor], Tensor, torch.dtype, torch.dtype]:
    """Return operands' float32 payloads under their largest scale, that scale, the storage and the dtype."""
    # Numbers that stand for infinity do not decide the scale: they stay as much larger than the rest as float32 holds.
    like = find_scaled_tensor(operands)
    tensors = [encode_operand(x, like) for x in operands]
    storage, dtype = choose_storage(operands), promote_dtypes(operands)
    scale, largest, values = _choose_common_scale(tensors, operands, storage)
    if largest is None:
        payloads = [bring_payload_under_scale(x, scale) for x in tensors]
    else:
        payloads = [
            _powers.multiply_without_overflow(get_float32_payload(x), value / largest)
            for x, value in zip(tensors, values)
        ]
    payloads = [_clamp_outliers(p, given, value, storage) for p, given, value in zip(payloads, operands, values)]
    return payloads, scale, storage, dtype


def _choose_common_scale(
    tensors: Sequence[ScaledTensor], given: Sequence[Any], storage: torch.dtype
) -> tuple[Tensor, float | None, list[Any]]:
    """Return the largest scale of operands that are no masks, its value if it can be read for free, and all values."""
    values: list[Any] = [_powers.read_scale(x._scale) for x in tensors]
    least = _powers.find_least_scale_beside_mask(storage)
    if None not in values:
        chosen = max(values)
        if chosen >= _powers.HUGE_SCALE:
            are_masks = [value >= _powers.HUGE_SCALE and _holds_mask(x, value) for x, value in zip(tensors, values)]
            chosen = _powers.choose_common_scale_value(values, are_masks, least)
        return torch.tensor(chosen, dtype=torch.float32, device="cpu"), chosen, values
    limits = [_powers.MASK_SCALE_THRESHOLD if isinstance(x, ScaledTensor) else _powers.HUGE_SCALE for x in given]
    return _powers.choose_common_scale([x._scale for x in tensors], limits, least), None, values


def _holds_mask(x: ScaledTensor, scale: float) -> bool:
    """Return whether x's large numbers are negative outliers beside smaller ones, as in masks that are added."""
    payload = get_float32_payload(x)
    if not _powers.has_readable_values(payload):
        return scale >= _powers.MASK_SCALE_THRESHOLD
    large = find_outlier_mask(payload, LEAST_OUTLIER / scale)
    is_smaller = payload.isfinite() & ~large
    return bool(large.any() & is_smaller.any() & ~(large & (payload > 0)).any())


def _clamp_outliers(payload: Tensor, given: Any, scale: float | None, storage: torch.dtype) -> Tensor:
    """Clamp an operand's outliers, which stand for infinity, to the storage's range."""
    if isinstance(given, ScaledTensor):
        if scale is None or scale < _powers.HUGE_SCALE:
            return payload
    elif not isinstance(given, Tensor) or not given.dim():
        return payload
    largest = torch.finfo(storage).max
    if storage in FULL_RANGE_STORAGES or (_powers.has_readable_values(payload) and not (payload.abs() > largest).any()):
        return payload
    is_outlier = (convert_argument_to_float32(given) <= -LEAST_OUTLIER) & (payload.abs() > largest) & payload.isfinite()
    return torch.where(is_outlier, payload.sign() * largest, payload)


def round_root_to_power_of_two(count: int) -> float:
    """Return the power of two below the square root of a number of terms."""
    # Any power of two would give the same values: a symbolic size has that of the traced one, so that others share the
    # graph.
    if isinstance(count, torch.SymInt):
        count = count.node.hint if count.node.has_hint() else 1
    power = 1
    while count >= 4 * power * power:
        power *= 2
    return float(power)


# Among zeros, larger constants are put at the top of the payload's range: numbers added later are mostly smaller.
LEAST_LARGE_CONSTANT = 2.0**12


def is_number_or_0d_tensor(x: Any) -> bool:
    """Return whether x is a number or a plain tensor without dimensions, which never decides a scale."""
    return not isinstance(x, ScaledTensor) and (not isinstance(x, Tensor) or x.dim() == 0)


def align_with_constants(operands: list[Any]) -> tuple[list[Any], Tensor]:
    """Return float32 payloads under their largest scale, or what a constant needs if that is more."""
    # A constant that stands for infinity saturates, at 128 or more. Among zeros of any scale a constant's own power of
    # two is taken, for a large one what it needs.
    like, storage = find_scaled_tensor(operands), choose_storage(operands)
    tensors = {i: encode_ignoring_outliers(x, like) for i, x in enumerate(operands) if not is_number_or_0d_tensor(x)}
    constants = {i: encode_operand(x, like) for i, x in enumerate(operands) if i not in tensors}
    filled = {i for i, x in tensors.items() if _is_uniform_large_mask(x, operands[i])}
    if len(filled) < len(tensors):
        constants |= {i: tensors.pop(i) for i in filled}
    scale, _, values = _choose_common_scale([*tensors.values()], [operands[i] for i in tensors], storage)
    if constants:
        scale = raise_scale_for_constants(scale, storage, *constants.values())
    payloads = {i: make_constant_payload(x, scale, storage) for i, x in constants.items()}
    for (i, x), value in zip(tensors.items(), values):
        payload, large = bring_payload_under_scale(x, scale), find_outliers(operands[i], like)
        payload = _clamp_outliers(payload, x, value, storage)
        payloads[i] = saturate_outliers(payload, scale, storage, large)
    return [payloads[i] for i in range(len(operands))], scale


def _is_uniform_large_mask(x: ScaledTensor, given: Any) -> bool:
    """Return whether an operand is one large number everywhere, as torch.full_like(x, -1e9) is."""
    # Scaled numbers may be data, such as a loss: if `full_like` did not make them, they are several and negative. What
    # it made is known where numbers cannot be read; others count as data there.
    scale = _powers.read_scale(x._scale)
    if scale is None or not _powers.has_readable_values(x._payload):
        return is_marked_large_fill(x) and x.numel() > 0
    if scale < LEAST_LARGE_CONSTANT / 2**16 or not x.numel():
        return False
    low, high = (bound.item() * scale for bound in torch.aminmax(get_float32_payload(x)))
    is_mask = not isinstance(given, ScaledTensor) or is_marked_large_fill(x) or (low < 0 and x.numel() > 1)
    return is_mask and low == high and abs(low) >= LEAST_LARGE_CONSTANT


def mark_as_filled_with_large_number(x: ScaledTensor, base: ScaledTensor | None = None) -> ScaledTensor:
    """Note that x holds one large number everywhere, until it or what it is to be a view of is written; return it."""
    counted = x if base is None else base
    x._large_fill_version = None if counted.is_inference() else counted._version
    return x


def is_marked_large_fill(x: ScaledTensor) -> bool:
    """Return whether x holds one large number everywhere, as `full_like` made it or what it is a view or copy of."""
    return x._large_fill_version is not None and not x.is_inference() and x._large_fill_version == x._version


def raise_scale_for_constants(scale: Tensor, storage: torch.dtype, *constants: ScaledTensor) -> Tensor:
    """Return the scale, raised until the constants fit the storage; where x is all zeros, the constants' largest."""
    roomy = _powers.take_largest_scale(scale, *(_find_scale_for_constant(c, storage) for c in constants))
    if _powers.read_scale(scale) not in (None, _powers.SCALE_OF_ZEROS):
        return roomy
    return _replace_scale_of_zeros(scale, roomy, storage, constants)


def _replace_scale_of_zeros(
    scale: Tensor, other_scale: Tensor, storage: torch.dtype, constants: tuple[ScaledTensor, ...]
) -> Tensor:
    """Return the constants' largest scale for zeros of any scale; at least 1 for a large one, and what it needs."""
    own = _powers.take_largest_scale(*(c._scale for c in constants))
    roomy = _powers.take_largest_scale(*(_find_scale_for_constant(c, storage) for c in constants)).clamp(min=1.0)
    return torch.where(
        scale == _powers.SCALE_OF_ZEROS, torch.where(own < LEAST_LARGE_CONSTANT, own, roomy), other_scale
    )


def _find_scale_for_constant(constant: ScaledTensor, storage: torch.dtype) -> Tensor:
    largest = torch.finfo(storage).max
    size = torch.nan_to_num(get_float32_payload(constant).abs() * constant._scale, 0.0, 0.0).amax()
    needed = torch.where(size >= _get_constant_outlier_threshold(storage), LEAST_OUTLIER_CLAMP_LIMIT, size)
    return _powers.round_to_power(needed / largest, "up")


def make_constant_payload(constant: ScaledTensor, scale: Tensor, storage: torch.dtype) -> Tensor:
    """Return a constant's payload under a scale; a constant that stands for infinity saturates."""
    payload = get_float32_payload(constant)
    largest = torch.finfo(storage).max
    moved = _powers.multiply_by_power(payload, _powers.divide_scales(constant._scale, scale))
    moved = moved.clamp(-_powers.FLOAT32_MAX, _powers.FLOAT32_MAX)
    if storage == torch.bfloat16:  # to which float32's largest number would be rounded as infinity
        held = (largest / scale).clamp(max=largest)
        moved = torch.minimum(torch.maximum(moved, -held), held)
    is_outlier = (moved.abs() > largest) & (payload.abs() * constant._scale >= _get_constant_outlier_threshold(storage))
    enough = _powers.take_largest_scale(torch.full_like(scale, largest), LEAST_OUTLIER_CLAMP_LIMIT / scale)
    return torch.where(payload.isinf(), payload, torch.where(is_outlier, moved.sign() * enough, moved))


def align_constants(x: ScaledTensor, *constants: Any, makes_room: bool = True) -> tuple[list[Any], Tensor]:
    """Return constants as payloads, and x's scale, raised as they need, or theirs if x is zeros of any scale."""
    # `makes_room` is False of bounds, which results need not reach: only zeros of any scale take theirs.
    storage, own = x._payload.dtype, _powers.read_scale(x._scale)
    if own is not None and all(isinstance(c, (int, float)) for c in constants):
        numbers = [float(c) for c in constants]
        needed = [_find_scale_for_number(c, storage) for c in numbers] if makes_room else []
        if own == _powers.SCALE_OF_ZEROS:
            powers = {c: _powers.round_number_to_power(abs(c)) for c in numbers if c and math.isfinite(c)}
            needed = [
                p if p < LEAST_LARGE_CONSTANT else max(1.0, _find_scale_for_number(c, storage))
                for c, p in powers.items()
            ]
        own = max([own, *needed])
        scale = torch.full((), own, dtype=torch.float32, device="cpu")
        return [_make_number_payload(c, own, storage) for c in numbers], scale
    tensors = tuple(encode_operand(c, x) for c in constants)
    if makes_room:
        scale = raise_scale_for_constants(x._scale, storage, *tensors)
    else:
        scale = _replace_scale_of_zeros(x._scale, x._scale, storage, tensors)
    return [make_constant_payload(c, scale, storage) for c in tensors], scale


def _find_scale_for_number(constant: float, storage: torch.dtype) -> float:
    size = abs(constant)
    if not 0 < size < math.inf:
        return _powers.SCALE_OF_ZEROS
    needed = LEAST_OUTLIER_CLAMP_LIMIT if size >= _get_constant_outlier_threshold(storage) else size
    return _powers.round_number_to_power(needed / torch.finfo(storage).max, "up")


def _make_number_payload(constant: float, scale: float, storage: torch.dtype) -> float:
    if not math.isfinite(constant):
        return constant
    payload, largest = constant / scale, torch.finfo(storage).max
    if storage == torch.bfloat16:
        held = min(largest, largest / scale)
        return min(max(payload, -held), held)
    if abs(payload) > largest and abs(constant) >= _get_constant_outlier_threshold(storage):
        return math.copysign(min(max(largest, LEAST_OUTLIER_CLAMP_LIMIT / scale), _powers.FLOAT32_MAX), constant)
    return min(max(payload, -_powers.FLOAT32_MAX), _powers.FLOAT32_MAX)


def _get_constant_outlier_threshold(storage: torch.dtype) -> float:
    """Return the magnitude from which on a constant stands for infinity: the scale for it would flush others to 0."""
    return _powers.HUGE_SCALE if storage in FULL_RANGE_STORAGES else LEAST_OUTLIER_BY_STORAGE[storage]


# Operators whose results are elements of the argument, or their negatives: exact in every storage.
_OPERATORS_WITHOUT_ROUNDING = {aten.relu.default, aten.neg.default, aten.abs.default}


def data_movement(*operators: OpOverload, family: str = "own") -> None:
    """Register operators that move the elements of their first argument: op(p s) = op(p) s, without any rounding.

    The payload moves, the scale stays: view, gather, clone. A view shares the scale with what it is a view of.
    """

    @implements_each(*operators, family=family)
    def move(operator: OpOverload, x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        if is_marked_large_fill(x):
            base = x if operator.is_view else None
            return map_tree(
                lambda p: mark_as_filled_with_large_number(p, base), move_payload(operator, x, *arguments, **options)
            )
        return move_payload(operator, x, *arguments, **options)

    def move_payload(operator: OpOverload, x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        payload, scale, dtype = x._payload, x._scale, x.dtype
        # torch does not call _unsafe_view one, as autograd need not know; it shares the memory that kron(out=) writes.
        if operator.is_view or operator is aten._unsafe_view.default:
            with allow_views(x):
                return map_tree(lambda p: wrap_payload(p, scale, dtype), operator(payload, *arguments, **options))
        if payload.dtype not in EIGHT_BIT_DTYPES:
            return map_tree(lambda p: wrap_payload(p, scale.clone(), dtype), operator(payload, *arguments, **options))
        # torch has no kernels for eight-bit floats.
        results = operator(payload.view(torch.uint8), *arguments, **options)
        return map_tree(lambda p: wrap_payload(p.view(payload.dtype), scale.clone(), dtype), results)


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
    names_by_operator = {
        operator: [argument.name for argument in operator._schema.arguments]
        for operator in list_present_operators(operators)
    }
    for operator, names in names_by_operator.items():
        for name in degrees:
            if name not in names:
                raise ValueError(describe_unknown_name(f"argument of {operator}", name, names))

    def run_of_degree(operator: OpOverload, x: ScaledTensor, *arguments: Any, **options: Any) -> Any:
        storage, dtype = x._payload.dtype, x.dtype
        keeps = (
            operator in _OPERATORS_WITHOUT_ROUNDING and storage not in EIGHT_BIT_DTYPES
        )  # for which torch has no such kernels
        entered = x._payload if keeps else get_float32_payload(x)
        results = operator(entered, *arguments, **options)
        if degree > 0:
            return make_scaled_results(results, [x._scale] * degree, [x])
        scale, rest = raise_scale_to_degree(x._scale, degree)
        return map_tree(lambda y: wrap_rule_payload(y, scale.clone(), rest, storage, dtype), results)

    def run_of_degrees(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
        like = find_scaled_tensor(tree_leaves((arguments, options)))
        holders: list[Tensor] = []
        scales: list[Tensor] = []

        def prepare_operand(name: str, x: Any) -> Any:
            if name not in degrees or not is_floating(x):
                return map_tree(convert_argument_to_float32, x)
            scaled = encode_operand(x, like)
            if degrees[name]:
                holders.append(x)
                scales.extend([scaled._scale] * degrees[name])
            return get_float32_payload(scaled)

        entered = [prepare_operand(name, x) for name, x in zip(names_by_operator[operator], arguments)]
        results = operator(*entered, **{name: prepare_operand(name, x) for name, x in options.items()})
        sum_scale = 1.0 if terms is None else terms(*arguments, **options)
        holders = holders if any(isinstance(x, ScaledTensor) for x in holders) else [like]
        return make_scaled_results(results, scales, holders, sum_scale)

    implements_each(*operators, family=family)(run_of_degrees if degrees else run_of_degree)


def unit_scale(*operators: OpOverload, family: str = "own") -> None:
    """Register operators whose results have magnitudes about 1 whatever their arguments': op(p s) under the scale 1.

    sigmoid, softmax, cos: computed on values; a larger scale where the largest finite result needs it.
    """
    encode = lambda y, storage, dtype: fit_payload(y, make_unit_scale(y), storage, dtype)  # noqa: E731
    _register_on_values(operators, family, encode, choose_storage)


def measured_scale(*operators: OpOverload, family: str = "own", scaled: int = 0) -> None:
    """Register operators that no power law describes: op(p s) under a scale r next to the results' root mean square.

    lgamma, histc, linear solvers: computed on values; r is a power of two. Results beyond the first `scaled` ones stay
    plain, such as what a layer saves for its backward pass.
    """

    is_product = family in FAMILY_BY_NAME and FAMILY_BY_NAME[family].operands == "home"
    choose = choose_product_storage if is_product else choose_storage
    encode = lambda y, storage, dtype: encode_plain_tensor(y, storage, dtype=dtype)  # noqa: E731
    _register_on_values(operators, family, encode, choose, scaled)


def _register_on_values(
    operators: tuple[OpOverload, ...],
    family: str,
    encode: Callable[[Tensor, torch.dtype, torch.dtype], ScaledTensor],
    choose_result_storage: Callable[[list[Any]], torch.dtype],
    scaled: int = 0,
) -> None:
    """Register operators on decoded values, of whose results all, or the first `scaled` ones, are encoded."""

    @implements_each(*operators, family=family)
    def run_operator(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
        flat = [*arguments, *options.values()]
        flat = [y for x in flat for y in (x if isinstance(x, (list, tuple)) else (x,))]
        storage, dtype = choose_result_storage(flat), promote_dtypes(flat)
        arguments, options = map_tree(convert_argument_to_float32, (arguments, options))
        results = operator(*arguments, **options)

        def encode_dense(y: Any) -> Any:
            return encode(y, storage, dtype) if is_floating(y) and y.layout == torch.strided else y

        if scaled:
            return *map_tree(encode_dense, results[:scaled]), *results[scaled:]
        return map_tree(encode_dense, results)


def decoded(*operators: OpOverload, family: str = "own") -> None:
    """Register operators with plain results, computed by value: booleans, indices, complex numbers."""

    @implements_each(*operators, family=family)
    def run_operator(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
        arguments, options = map_tree(convert_argument_to_float32, (arguments, options))
        return operator(*arguments, **options)


def gated_activation(*operators: OpOverload, family: str = "own", at_least_one: bool = False) -> None:
    """Register operators f(x) = x g(x) with a gate g about 1: op(p s) under the scale s, computed on values.

    Args:
        operators: the overloads.
        family: the heading in tables.
        at_least_one: results do not vanish where arguments do, so that their scale is at least 1: softplus.
    """

    @implements_each(*operators, family=family)
    def run_operator(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        gated = encode_operand(arguments[0], find_scaled_tensor(flat))
        scale = _powers.take_largest_scale(gated._scale, make_unit_scale(gated)) if at_least_one else gated._scale
        values = operator(
            *map_tree(convert_argument_to_float32, arguments), **map_tree(convert_argument_to_float32, options)
        )
        tensors = [x for x in flat if isinstance(x, Tensor)]
        return map_tree(
            lambda y: encode_under_scale(y, scale, choose_storage(tensors), promote_dtypes(tensors)), values
        )


def aligned(*operators: OpOverload, family: str = "own") -> None:
    """Register operators with op(s p, s q, ..) = s op(p, q, ..): every floating tensor under the largest scale s.

    Numbers and plain tensors without dimensions are constants: see `align_with_constants`.
    """

    @implements_each(*operators, family=family)
    def run_operator(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        holders = [x for x in flat if isinstance(x, ScaledTensor)]
        payloads, scale = align_with_constants([x for x in flat if is_floating(x)])
        found = iter(payloads)
        arguments, options = map_tree(lambda x: next(found) if is_floating(x) else x, (arguments, options))
        results = operator(*arguments, **options)
        return make_scaled_results(results, [scale], holders + [x for x in flat if is_floating(x) and x.dim()])
