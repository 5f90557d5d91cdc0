"""Operands of rules as scaled tensors, the storage of operands and results, and results under a scale that holds them.

A mask of -1e9, a penalty of 1 + 1e8 m or a last distance of 1e10 stands for infinity. Under a scale that holds it, a
narrow payload would have no digits left for all other elements. So the scale of a plain operand is measured without
such elements, and where they lead beyond the payload's range, results saturate.

As torch.autocast casts operands before an operator runs, so payloads change storage before a rule does. Operators that
autocast computes in float32 take float32 payloads, and so results have one; products take payloads of the home; all
others take the widest storage that is among their operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..subclass._rule_table import find_infinity_substitutes, is_in_quotient_formula
from . import _fused as fused
from . import _powers_of_two as _powers
from ._registry import (
    EIGHT_BITS,
    FAMILIES,
    FAMILY_BY_OPERATOR,
    STORAGE_DTYPES,
    ComplexOperand,
    find_rule,
    register_promotion_derivation,
)
from ._scaled_tensor import (
    ScaledTensor,
    convert_dtypes,
    find_smallest,
    join_storages,
    measure_rms_scale,
    to_float32,
    to_storage,
    wrap,
)


def make_scaled(values: Tensor, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    """Return float32 payload values and a scale as a tensor of a storage and a logical dtype."""
    return wrap(to_storage(values, storage), scale, dtype)


# Between which a payload's largest magnitude neither overflows nor leaves others without digits.
_FITTING_MAGNITUDES = {
    storage: (torch.finfo(storage).smallest_normal / torch.finfo(storage).eps ** 0.5, torch.finfo(storage).max)
    for storage in STORAGE_DTYPES
}


def make_scaled_to_fit(values: Tensor, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    """Make a scaled tensor, with its scale moved where the largest value needs more or less in the storage.

    Small is a largest value so low that those below it would lose digits. Where values cannot be looked at the scale
    stays, and they saturate or vanish.
    """
    if storage in (torch.bfloat16, torch.float32) or not values.numel() or not _powers.is_concrete(values):
        return make_scaled(values, scale, storage, dtype)
    least, most = torch.aminmax(values)
    low, high, (lowest, largest) = least.item(), most.item(), _FITTING_MAGNITUDES[storage]
    if lowest <= max(-low, high) <= largest or low == high == 0.0:
        return wrap(values.to(storage), scale, dtype)
    amax = torch.nan_to_num(values, 0.0, 0.0, 0.0).abs().amax()
    power = _powers.round_to_power((amax / largest).clamp(min=1.0), "up")
    if 0.0 < amax.item() < lowest:
        power = _powers.round_to_power(amax)
    total, rest = _powers.multiply_scales(scale, power)
    return make_scaled(_powers.multiply_by_power(values / power, rest), total, storage, dtype)


def move_level_to_scale(
    payload: Tensor, scale: Tensor, level: Tensor, storage: torch.dtype, dtype: torch.dtype
) -> ScaledTensor:
    """Make a scaled tensor of a payload under a scale: a power of two, its level, goes from payload to scale."""
    if _powers.is_fused(payload):
        return wrap(*fused.finish_payload(payload, (scale, level), storage, "levelled"), dtype)
    total, rest = _powers.multiply_scales(scale, level)
    return make_scaled_to_fit(_powers.multiply_by_power(payload.to(torch.float32) / level, rest), total, storage, dtype)


def bring_payload_under(x: ScaledTensor, scale: Tensor, storage: torch.dtype = torch.float32) -> Tensor:
    """Return the payload under a deciding scale, rounded to a storage: see `bring_under_scale`."""
    if _powers.is_fused(x._payload):
        return fused.finish_payload(x._payload, (x._scale, scale), storage, "brought")[0]
    return to_storage(_powers.bring_under_scale(to_float32(x), x._scale, scale), storage)


def keep_nonzero(x: ScaledTensor, exact: Tensor) -> ScaledTensor:
    """Replace what rounding made 0 by the payload's smallest number, with the sign of the unrounded value.

    Divisors need it: by 0 a quotient would be infinite or NaN, by a number that is somewhat large it is only small.
    """
    storage = x._payload.dtype
    if storage in (torch.bfloat16, torch.float32):
        return x
    payload = to_float32(x)
    least = torch.full_like(exact, find_smallest(storage)).copysign(exact)
    return wrap(torch.where((payload == 0) & (exact != 0), least, payload).to(storage), x._scale, x.dtype)


def encode_values(values: Tensor, storage: torch.dtype, scale: Tensor | None = None, dtype: torch.dtype | None = None):
    """Encode a plain tensor as payload x scale; the scale is measured unless given."""
    dtype = dtype or values.dtype
    scale = measure_rms_scale(values, storage) if scale is None else scale
    wide = values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)
    value = _powers.read_concrete(scale)
    payload = wide / (scale.to(wide.dtype) if value is None else value)
    return make_scaled(payload, scale, storage, dtype)


def make_operand(x: Any, like: ScaledTensor) -> ScaledTensor:
    """Return a tensor or number as a ScaledTensor with a float32 payload; scaled tensors unchanged.

    Numbers are split at the nearest power of two in log2, so that a factor of 0.95 leaves a scale alone; plain tensors
    take a measured scale, which stand-ins for infinity among them do not decide.
    """
    if isinstance(x, ScaledTensor):
        return x
    if isinstance(x, Tensor):
        if x.is_complex():
            raise ComplexOperand
        x = x if x.is_floating_point() else x.to(like.dtype)
        x = x.resolve_neg() if x.is_neg() else x  # below autograd torch's own kernels have no such operands
        return encode_values(x, torch.float32, measure_scale_beside_stand_ins(x, like._payload.dtype))
    if isinstance(x, complex):
        raise ComplexOperand
    value = float(x)
    scale = (
        _powers.round_number(abs(value))
        if value and abs(value) < float("inf")
        else (1.0 if value else _powers.ZERO_SCALE)
    )
    payload = torch.full((), value / scale, dtype=torch.float32, device=like.device)
    return wrap(payload, torch.full((), scale, dtype=torch.float32, device=like.device), like.dtype)


# Masks write numbers of at most -STAND_IN for minus infinity: -1e9, the smallest of the dtype.
INFINITY_STAND_IN = 2.0**24
# The least magnitude to which a stand-in for infinity may saturate: exp(-128) is 0 in float32.
LEAST_SATURATED_STAND_IN = 128.0


def has_no_stand_in(x: Tensor, size: float, is_negative: bool = True) -> bool:
    """Return whether values are concrete and none is as large as what stands for infinity."""
    if not (_powers.is_concrete(x) and not x.requires_grad and x.dtype == torch.float32 and x.numel()):
        return False
    low, high = (bound.item() for bound in torch.aminmax(x)) if not is_negative else (x.amin().item(), 0.0)
    return -size < low and high < size


def measure_scale_beside_stand_ins(
    x: Tensor,
    storage: torch.dtype,
    size: float = INFINITY_STAND_IN,
    least: float = LEAST_SATURATED_STAND_IN,
    is_negative: bool = True,
    is_wide: bool = False,
    among_zeros: bool = True,
) -> Tensor:
    """Return the scale of a plain operand, measured without large numbers that stand for infinity.

    Args:
        x: the operand.
        storage: of the payload that it meets.
        size: the magnitude from which on a number is large.
        least: to which at least it may saturate.
        is_wide: whether the payload, and what results are written into, has float32's range.
        is_negative: only negative numbers, as masks write them.
        among_zeros: whether numbers among zeros alone may stand for infinity.
    """
    if not x.dim() or not x.numel() or has_no_stand_in(x, size, is_negative):
        return measure_rms_scale(x, torch.float32)
    x = x.detach()
    large = x <= -size if is_negative else find_infinity_substitutes(x, size, among_zeros)
    scale = measure_rms_scale(torch.where(large & ~large.all(), 0.0, x), torch.float32)
    amax = torch.nan_to_num(x, 0.0, 0.0, 0.0).abs().amax().double()
    # Wide payloads leave room for products of the largest; narrow ones let it saturate.
    top = _powers.HUGE_SCALE if is_wide else _powers.FLOAT32_MAX
    lowest = (amax / top).to(torch.float32)
    lowest = torch.where(amax >= size, lowest.clamp(min=least / torch.finfo(storage).max), lowest)
    return torch.maximum(scale, _powers.round_to_power(lowest, "up"))


def make_factor(x: Any, like: ScaledTensor) -> ScaledTensor:
    """Return an operand of a product as a scaled tensor; all finite values of a plain one set its scale."""
    if isinstance(x, ScaledTensor) or not isinstance(x, Tensor) or not x.is_floating_point():
        return make_operand(x, like)
    return encode_values(x, torch.float32)


def find_scaled(arguments: Iterable[Any]) -> ScaledTensor:
    """Return the first scaled tensor among arguments."""
    for x in arguments:
        if type(x) is ScaledTensor:
            return x
    raise TypeError("no operand is a ScaledTensor")


def choose_storage(arguments: Iterable[Any]) -> torch.dtype:
    """Return the payload type of a result of these arguments: plain tensors and numbers do not widen it."""
    return join_storages([x._payload.dtype for x in arguments if type(x) is ScaledTensor])


def choose_product_storage(operands: Iterable[Any]) -> torch.dtype:
    """Return the storage of a product: float16 for eight-bit operands, the widest storage for others."""
    storage = choose_storage(operands)
    return torch.float16 if storage in EIGHT_BITS else storage


def promote_dtypes(arguments: Iterable[Any]) -> torch.dtype:
    """Return the dtype to which torch would promote these arguments."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    first = tensors[0].dtype
    if first.is_floating_point and all(x.dtype is first for x in tensors):
        return first
    with_dims = [x.dtype for x in tensors if x.dim()]
    result = functools.reduce(torch.promote_types, with_dims or [x.dtype for x in tensors])
    if not result.is_floating_point:
        result = next(x.dtype for x in tensors if x.is_floating_point())
    return result


# Narrower ranges hold less beside other numbers.
_STAND_IN_BY_STORAGE = {torch.float8_e4m3fn: 2.0**12}
# So many times beyond its range a payload takes a larger scale, as others keep their digits under it.
_SCALE_ROOM_BY_STORAGE = {torch.float16: 2.0**6, torch.float8_e5m2: 2.0**6}


def _is_plain_float_tensor(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, ScaledTensor) and bool(x.dim()) and x.is_floating_point()


def make_addend(x: Any, like: ScaledTensor, factor: Any = 1.0, among_zeros: bool = True) -> ScaledTensor:
    """Return an operand as a ScaledTensor; the scale of a plain one is measured without what stands for infinity.

    `like` is the scaled tensor that it meets, `factor` multiplies it (see `find_infinity_substitutes`).
    """
    if not _is_plain_float_tensor(x):
        return make_operand(x, like)
    # What a home of float16 keeps in float32 for now is to fit float16 in the end.
    storage = torch.float16 if like._home == torch.float16 else like._payload.dtype
    size = _find_size_under_factor(storage, factor)
    least = min(LEAST_SATURATED_STAND_IN * size / _STAND_IN_BY_STORAGE.get(storage, INFINITY_STAND_IN), size)
    is_wide = storage in (torch.float32, torch.bfloat16)
    scale = measure_scale_beside_stand_ins(
        x, storage, size, least, is_negative=False, is_wide=is_wide, among_zeros=among_zeros
    )
    made = encode_values(x, torch.float32, scale)
    if is_wide or has_no_stand_in(x, _powers.HUGE_SCALE, is_negative=False):
        return made
    # Products of what saturates stay finite.
    return wrap(_powers.clamp_finite(made._payload, _powers.HUGE_SCALE), made._scale, made.dtype)


def find_stand_ins(
    x: Any, like: ScaledTensor, factor: Any = 1.0, inverse: bool = False, among_zeros: bool = True
) -> Tensor | None:
    """Return where a plain operand, or where it is a divisor its inverse, times a number stands for infinity.

    None if nowhere; `like` is the scaled tensor that it meets.
    """
    if not _is_plain_float_tensor(x):
        return None
    size = _find_size_under_factor(like._payload.dtype, factor)
    x = x.detach()
    if inverse:
        x = torch.where(x == 0, 0.0, x.reciprocal())
    if has_no_stand_in(x, size, is_negative=False):
        return None
    large = find_infinity_substitutes(x, size, among_zeros)
    if _powers.is_concrete(x):
        return large if bool(large.any()) and not bool(large.all()) else None
    return large & ~large.all()


def _find_size_under_factor(storage: torch.dtype, factor: Any) -> float:
    """Return from which magnitude on an element that a factor multiplies, among smaller ones, stands for infinity."""
    number = abs(float(factor)) if isinstance(factor, (int, float)) else 1.0
    size = _STAND_IN_BY_STORAGE.get(storage, INFINITY_STAND_IN)
    return min(size / number, _powers.FLOAT32_MAX) if number else _powers.FLOAT32_MAX


def saturate_stand_ins(values: Tensor, scale: Tensor, storage: torch.dtype, *large: Tensor | None) -> Tensor:
    """Return a result's float32 payload, clamped to the storage's range where operands hold infinity's stand-ins."""
    places = [place for place in large if place is not None]
    if storage == torch.float32 or not places:
        return values
    limits = torch.finfo(storage)
    if _powers.is_concrete(values):
        top = values.abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if values.numel() else 0.0
        if top * scale.item() <= _powers.FLOAT32_MAX / 2 and top <= limits.max * _SCALE_ROOM_BY_STORAGE.get(
            storage, 1.0
        ):
            return values
    # A number that is rounded up to the payload's next must not decode to infinity.
    held = (_powers.FLOAT32_MAX * (1 - limits.eps) / scale).clamp(max=limits.max)
    is_large = places[0]
    for place in places[1:]:
        is_large = is_large | place
    return torch.where(is_large, _powers.clamp_finite(values, held), values)


WideMode = Literal["autocast", "none"]
WIDE_MODES = ("autocast", "none")

OperandPreparation = Callable[[tuple, dict], tuple[tuple, dict]]


def choose_home(storage: torch.dtype, wide: str) -> torch.dtype | None:
    """Return the home of tensors of a storage: float16 for eight bits, as for products; None if nothing is wider."""
    if wide not in WIDE_MODES:
        raise ValueError(f"wide={wide!r}: allowed are {', '.join(map(repr, WIDE_MODES))}")
    if wide == "none" or storage == torch.float32:
        return None
    return torch.float16 if storage in EIGHT_BITS else storage


def round_to_home(x: ScaledTensor) -> ScaledTensor:
    """Round the values to the home storage, under a measured scale."""
    home: Any = x._home  # a dtype: of a tensor without one nothing is rounded
    made = move_level_to_scale(x._payload, x._scale, measure_rms_scale(x._payload, home), home, x.dtype)
    made._home = home
    return made


def is_above_home(x: Any) -> bool:
    """Return whether x is a tensor that products would round to its home."""
    return type(x) is ScaledTensor and x._home is not None and x._payload.dtype == torch.float32


def _has_float32_values(x: Any) -> bool:
    if type(x) is ScaledTensor or not isinstance(x, Tensor):
        return is_above_home(x)
    return bool(x.dim()) and x.dtype in (torch.float32, torch.float64)


def widen_payload(x: Any) -> Any:
    """Return a scaled tensor with a float32 payload, and anything else unchanged."""
    if type(x) is not ScaledTensor or x._payload.dtype == torch.float32:
        return x
    return wrap(to_float32(x), x._scale, x.dtype, x._home)


def _map_tensors(change: Callable[[Any], Any], arguments: tuple, options: dict) -> tuple[tuple, dict]:
    def changed(x: Any) -> Any:
        return tree_map(changed, x) if isinstance(x, (list, tuple)) else change(x)

    return tuple(map(changed, arguments)), {name: changed(x) for name, x in options.items()}


widen_operands = functools.partial(_map_tensors, widen_payload)
round_operands_to_home = functools.partial(_map_tensors, lambda x: round_to_home(x) if is_above_home(x) else x)


def widen_operands_if_one_is_wide(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen every payload to float32 if one is, or a plain tensor is; lists are left to their rules.

    autocast promotes a narrow result that meets a plain float32 tensor: its range may be all that holds the result.
    """
    if any(map(_has_float32_values, arguments)) or any(map(_has_float32_values, options.values())):
        return tuple(map(widen_payload, arguments)), {name: widen_payload(x) for name, x in options.items()}
    return arguments, options


def prepare_quotient_operands(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen every payload to float32, unless the second operand is a number."""
    second = arguments[1] if len(arguments) > 1 else options.get("other")
    is_number = not isinstance(second, Tensor) or (type(second) is not ScaledTensor and not second.dim())
    return widen_operands_if_one_is_wide(arguments, options) if is_number else widen_operands(arguments, options)


def prepare_sum_operands(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen payloads in a sum with a plain tensor, float32 for autocast, or in an outer sum; else to the widest."""
    a, b = arguments[0], arguments[1] if len(arguments) > 1 else options.get("other")
    if not isinstance(b, Tensor):
        return arguments, options
    is_plain = any(type(x) is not ScaledTensor and x.dim() for x in (a, b))
    return (widen_operands if is_plain or is_outer_broadcast(a, b) else widen_operands_if_one_is_wide)(
        arguments, options
    )


def is_outer_broadcast(a: Tensor, b: Tensor) -> bool:
    """Return whether broadcasting repeats both tensors, as in an outer sum.

    Sizes are compared to 1 alone: a graph whose sizes vary would be compiled again where two of them become equal.
    """
    return all(
        x.dim() < y.dim() or any(one == 1 and other != 1 for one, other in zip(reversed(x.shape), reversed(y.shape)))
        for x, y in ((a, b), (b, a))
    )


# By `Family.operands`. Normalisations are left to their rules: they compute in float32 and give results about 1, which
# lose nothing in the operand's storage.
_PREPARATIONS_BY_FAMILY: dict[str, OperandPreparation | None] = {
    "float32": widen_operands,
    "home": round_operands_to_home,
    "widest": widen_operands_if_one_is_wide,
    "rule": None,
}
# Operators that differ from their family.
_PREPARATIONS_BY_OPERATOR: dict[str, OperandPreparation | None] = {
    **dict.fromkeys(("mul", "addcmul", "lerp", "sign", "sgn"), widen_operands_if_one_is_wide),
    **dict.fromkeys(("dot", "vdot", "addcdiv", "hypot", "softplus", "log_sigmoid_forward"), widen_operands),
    **dict.fromkeys(("embedding", "embedding_dense_backward"), round_operands_to_home),
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward"), round_operands_to_home
    ),
    # Differences too: after cancellation an earlier rounding error is most of what is left.
    **dict.fromkeys(("div", "floor_divide", "sub"), prepare_quotient_operands),
    "add": prepare_sum_operands,
}


def find_operand_preparation(operator: OpOverload) -> OperandPreparation | None:
    """Return how an operator changes its operands' storage before its rule runs; None if it does not.

    Nothing for one that writes into an argument, which stays the tensor it is, or runs by the steps it is made of.
    """
    if operator not in FAMILY_BY_OPERATOR or operator._schema.is_mutable:
        return None
    name = operator._schema.name.removeprefix("aten::")
    return (
        _PREPARATIONS_BY_OPERATOR[name]
        if name in _PREPARATIONS_BY_OPERATOR
        else _PREPARATIONS_BY_FAMILY[FAMILIES[FAMILY_BY_OPERATOR[operator]].operands]
    )


@register_promotion_derivation
def make_promoted_rule(operator: OpOverload) -> Callable:
    """Return an operator's rule for operands of which one has a home, which the results then have too.

    Steps of a formula that divides by a sum have float32 operands, with a home and without.
    """
    prepare = find_operand_preparation(operator)
    writes = operator._schema.is_mutable
    accumulates = operator._schema.name.removeprefix("aten::") in _ACCUMULATION_OPERATORS

    def run(home: Any, arguments: tuple, options: dict) -> Any:
        if home is None:
            return _run_formula_step(operator, arguments, options)
        if is_in_quotient_formula() and not writes:
            arguments, options = widen_operands(arguments, options)
        if prepare is not None:
            arguments, options = prepare(arguments, options)
        results = find_rule(operator)(*arguments, **options)
        written = {id(x) for x in tree_leaves((arguments, options))} if writes else ()
        results = _give_home(results, home, written)
        if not accumulates or not is_above_home(results):
            return results
        node = torch._C._current_autograd_node()
        is_stored = node is not None and node.name() == "torch::autograd::AccumulateGrad"
        return round_to_home(results) if is_stored else results

    return run


def _give_home(results: Any, home: torch.dtype, written: Container[int]) -> Any:
    """Give results the home, except arguments that are written: these keep their own or none."""
    if type(results) is ScaledTensor:
        if id(results) not in written:
            results._home = results._home or home
    elif isinstance(results, (list, tuple)):
        for result in results:
            _give_home(result, home, written)
    return results


def _run_formula_step(operator: OpOverload, arguments: tuple, options: dict) -> Any:
    """Run a step of a formula that divides by a sum, on float32 payloads, without a home.

    What it makes of nothing but narrow values is a step in between, in float32; what such a step and others make is a
    gradient, in the others' storage.
    """
    given = [x for x in tree_leaves((arguments, options)) if type(x) is ScaledTensor]
    narrow = [x._payload.dtype for x in given if x._payload.dtype != torch.float32]
    if operator._schema.is_mutable or not narrow:
        return find_rule(operator)(*arguments, **options)
    arguments, options = widen_operands(arguments, options)
    results = find_rule(operator)(*arguments, **options)
    if len(narrow) == len(given):
        return results
    storage = join_storages(narrow)
    return tree_map(lambda x: convert_dtypes(x, x.dtype, storage) if type(x) is ScaledTensor else x, results)


# Operators that autograd runs as a gradient is stored in, or added to, a parameter's `grad`.
_ACCUMULATION_OPERATORS = ("detach", "clone", "new_empty_strided", "add")
