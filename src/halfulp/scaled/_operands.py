"""Operands of rules as scaled tensors, the storage of operands and results, and results under a scale that holds them.

An outlier, as a mask of -1e9, a penalty of 1 + 1e8 m or a last distance of 1e10, stands for infinity. Under a scale
that holds it, a narrow payload would have no digits left for all other elements. So the scale of a plain operand is
measured without outliers, and where they lead beyond the payload's range, results saturate.

As torch.autocast casts operands before an operator runs, so payloads change storage before a rule does. Operators that
autocast computes in float32 take float32 payloads, and so results have one; products take payloads of the home; all
others take the widest storage that is among their operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..subclass._rule_table import find_outlier_mask, is_in_quotient_formula
from . import _fused as fused
from . import _powers_of_two as _powers
from ._powers_of_two import LEAST_OUTLIER_CLAMP_LIMIT
from ._registry import (
    EIGHT_BIT_DTYPES,
    FAMILY_BY_NAME,
    FAMILY_BY_OPERATOR,
    FULL_RANGE_STORAGES,
    STORAGE_DTYPES,
    ComplexOperandError,
    find_rule,
    register_derivation_with_home,
)
from ._scaled_tensor import (
    SMALLEST_PAYLOAD_NUMBER_BY_STORAGE,
    ScaledTensor,
    choose_widest_storage,
    convert_storage_and_dtype,
    get_float32_payload,
    measure_rms_scale,
    round_to_storage,
    wrap_payload,
)


def wrap_rounded_payload(payload: Tensor, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    """Return a float32 payload and a scale as a tensor of a storage and a logical dtype."""
    return wrap_payload(round_to_storage(payload, storage), scale, dtype)


# Between which a payload's largest magnitude neither overflows nor leaves others without digits.
_ACCEPTED_AMAX_RANGE_BY_STORAGE = {
    storage: (torch.finfo(storage).smallest_normal / torch.finfo(storage).eps ** 0.5, torch.finfo(storage).max)
    for storage in STORAGE_DTYPES
}


def fit_payload(payload: Tensor, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    """Make a scaled tensor, its scale moved where the largest value overflows or would lose digits."""
    # Where values cannot be looked at the scale stays, and they saturate or vanish.
    if storage in FULL_RANGE_STORAGES or not payload.numel() or not _powers.has_readable_values(payload):
        return wrap_rounded_payload(payload, scale, storage, dtype)
    least, most = torch.aminmax(payload)
    low, high, (lowest, largest) = least.item(), most.item(), _ACCEPTED_AMAX_RANGE_BY_STORAGE[storage]
    if lowest <= max(-low, high) <= largest or low == high == 0.0:
        return wrap_payload(payload.to(storage), scale, dtype)
    amax = torch.nan_to_num(payload, 0.0, 0.0, 0.0).abs().amax()
    power = _powers.round_to_power((amax / largest).clamp(min=1.0), "up")
    if 0.0 < amax.item() < lowest:
        power = _powers.round_to_power(amax)
    total, rest = _powers.multiply_scales(scale, power)
    return wrap_rounded_payload(_powers.multiply_by_power(payload / power, rest), total, storage, dtype)


def move_power_to_scale(
    payload: Tensor, scale: Tensor, power: Tensor, storage: torch.dtype, dtype: torch.dtype
) -> ScaledTensor:
    """Make a scaled tensor of a payload under a scale: a power of two goes from payload to scale."""
    if _powers.has_fused_kernels(payload):
        return wrap_payload(*fused.multiply_payload(payload, (scale, power), storage, "levelled"), dtype)
    total, rest = _powers.multiply_scales(scale, power)
    return fit_payload(_powers.multiply_by_power(payload.to(torch.float32) / power, rest), total, storage, dtype)


def bring_payload_under_scale(x: ScaledTensor, scale: Tensor, storage: torch.dtype = torch.float32) -> Tensor:
    """Return the payload under a deciding scale, rounded to a storage, where outliers stay finite."""
    if _powers.has_fused_kernels(x._payload):
        return fused.multiply_payload(x._payload, (x._scale, scale), storage, "brought")[0]
    over, under = _powers.read_scale(x._scale), _powers.read_scale(scale)
    if over is not None and under is not None:
        return round_to_storage(_powers.multiply_without_overflow(get_float32_payload(x), over / under), storage)
    # At most 2^100, so that nothing but a product is to be computed.
    factor = (x._scale / scale).clamp(_powers.SMALLEST_SCALE, _powers.HUGE_SCALE)
    return round_to_storage(get_float32_payload(x) * factor, storage)


def raise_underflows_to_smallest(x: ScaledTensor, exact: Tensor) -> ScaledTensor:
    """Replace what rounding made 0 by the payload's smallest number, with the sign of the unrounded value."""
    # Divisors need it: by 0 a quotient would be infinite or NaN, by a number that is somewhat large it is only small.
    storage = x._payload.dtype
    if storage in FULL_RANGE_STORAGES:
        return x
    payload = get_float32_payload(x)
    least = torch.full_like(exact, SMALLEST_PAYLOAD_NUMBER_BY_STORAGE[storage]).copysign(exact)
    return wrap_payload(torch.where((payload == 0) & (exact != 0), least, payload).to(storage), x._scale, x.dtype)


def round_second_moment_above_zero(total: ScaledTensor, x: ScaledTensor, squares: ScaledTensor) -> ScaledTensor:
    """Return total = x + squares in x's storage, without sums of positive numbers that become 0: divisors."""
    rounded = fit_payload(get_float32_payload(total), total._scale, x._payload.dtype, total.dtype)
    before, added = get_float32_payload(x), get_float32_payload(squares)
    return raise_underflows_to_smallest(
        rounded, torch.where((before >= 0) & (added >= 0), torch.maximum(before, added), 0.0)
    )


def encode_plain_tensor(
    values: Tensor, storage: torch.dtype, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> ScaledTensor:
    """Encode a plain tensor as payload x scale; the scale is measured unless given."""
    dtype = dtype or values.dtype
    scale = measure_rms_scale(values, storage) if scale is None else scale
    wide = values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)
    value = _powers.read_scale(scale)
    payload = wide / (scale.to(wide.dtype) if value is None else value)
    return wrap_rounded_payload(payload, scale, storage, dtype)


def encode_operand(x: Any, like: ScaledTensor) -> ScaledTensor:
    """Return a tensor or number as a ScaledTensor with a float32 payload; scaled tensors unchanged."""
    # A number is split at the nearest power of two in log2, so that a factor of 0.95 leaves a scale alone.
    if isinstance(x, ScaledTensor):
        return x
    if isinstance(x, Tensor):
        if x.is_complex():
            raise ComplexOperandError
        x = x if x.is_floating_point() else x.to(like.dtype)
        x = x.resolve_neg() if x.is_neg() else x  # below autograd torch's own kernels have no such operands
        return encode_plain_tensor(x, torch.float32, measure_scale_without_outliers(x, like._payload.dtype))
    if isinstance(x, complex):
        raise ComplexOperandError
    value = float(x)
    scale = 1.0 if value else _powers.SCALE_OF_ZEROS
    if value and abs(value) < float("inf"):
        scale = _powers.round_number_to_power(abs(value))
    payload = torch.full((), value / scale, dtype=torch.float32, device=like.device)
    return wrap_payload(payload, torch.full((), scale, dtype=torch.float32, device=like.device), like.dtype)


def is_symbolic(value: Any) -> bool:
    """Return whether a number is a traced size: taking its power of two would fix it."""
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def split_off_power_of_two(value: Any) -> tuple[Any, float]:
    """Split a number into a mantissa and the power of two next to it; 1 where there is none, the smallest for 0."""
    if is_symbolic(value):
        return value, 1.0
    if isinstance(value, complex):
        raise ComplexOperandError
    value = float(value)
    if not math.isfinite(value):
        return value, 1.0
    power = _powers.round_number_to_power(abs(value)) if value else _powers.SCALE_OF_ZEROS
    return value / power, power


# Masks write numbers of at most -LEAST_OUTLIER for minus infinity: -1e9, the smallest of the dtype.
LEAST_OUTLIER = 2.0**24
# Narrower ranges hold less beside other numbers.
LEAST_OUTLIER_BY_STORAGE = dict.fromkeys(STORAGE_DTYPES, LEAST_OUTLIER) | {torch.float8_e4m3fn: 2.0**12}


def is_known_free_of_outliers(x: Tensor, outlier_magnitude: float, only_negative: bool) -> bool:
    """Return whether values are concrete and none is as large as what stands for infinity."""
    if not (_powers.has_readable_values(x) and not x.requires_grad and x.dtype == torch.float32 and x.numel()):
        return False
    low, high = (bound.item() for bound in torch.aminmax(x)) if not only_negative else (x.amin().item(), 0.0)
    return -outlier_magnitude < low and high < outlier_magnitude


def measure_scale_without_outliers(
    x: Tensor,
    storage: torch.dtype,
    size: float = LEAST_OUTLIER,
    least: float = LEAST_OUTLIER_CLAMP_LIMIT,
    only_negative: bool = True,
    is_wide: bool = False,
    among_zeros: bool = True,
) -> Tensor:
    """Return the scale of a plain operand, measured without large numbers that stand for infinity.

    Numbers of `size` and more, `only_negative` ones alone as masks write them, are large; they may saturate to `least`
    in the `storage` that they meet. `is_wide`: that and what results are written into have float32's range.
    `among_zeros`: numbers among zeros alone may be outliers.
    """
    if not x.dim() or not x.numel() or is_known_free_of_outliers(x, size, only_negative):
        return measure_rms_scale(x, torch.float32)
    x = x.detach()
    large = x <= -size if only_negative else find_outlier_mask(x, size, among_zeros)
    scale = measure_rms_scale(torch.where(large & ~large.all(), 0.0, x), torch.float32)
    amax = torch.nan_to_num(x, 0.0, 0.0, 0.0).abs().amax().double()
    # Wide payloads leave room for products of the largest; narrow ones let it saturate.
    top = _powers.HUGE_SCALE if is_wide else _powers.FLOAT32_MAX
    lowest = (amax / top).to(torch.float32)
    lowest = torch.where(amax >= size, lowest.clamp(min=least / torch.finfo(storage).max), lowest)
    return torch.maximum(scale, _powers.round_to_power(lowest, "up"))


def encode_product_operand(x: Any, like: ScaledTensor) -> ScaledTensor:
    """Return an operand of a product as a scaled tensor; all finite values of a plain one set its scale."""
    if isinstance(x, ScaledTensor) or not isinstance(x, Tensor) or not x.is_floating_point():
        return encode_operand(x, like)
    return encode_plain_tensor(x, torch.float32)


def find_scaled_tensor(arguments: Iterable[Any]) -> ScaledTensor:
    """Return the first scaled tensor among arguments."""
    for x in arguments:
        if type(x) is ScaledTensor:
            return x
    raise TypeError("no operand is a ScaledTensor")


def choose_storage(arguments: Iterable[Any]) -> torch.dtype:
    """Return the payload type of a result of these arguments: plain tensors and numbers do not widen it."""
    return choose_widest_storage([x._payload.dtype for x in arguments if type(x) is ScaledTensor])


def choose_product_storage(operands: Iterable[Any]) -> torch.dtype:
    """Return the storage of a product: float16 for eight-bit operands, the widest storage for others."""
    storage = choose_storage(operands)
    return torch.float16 if storage in EIGHT_BIT_DTYPES else storage


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


# So many times beyond its range a payload takes a larger scale, as others keep their digits under it.
_MAX_RESCALED_OVERFLOW_BY_STORAGE = {torch.float16: 2.0**6, torch.float8_e5m2: 2.0**6}


def _is_plain_float_tensor(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, ScaledTensor) and bool(x.dim()) and x.is_floating_point()


def encode_ignoring_outliers(x: Any, like: ScaledTensor, factor: Any = 1.0, among_zeros: bool = True) -> ScaledTensor:
    """Return an operand, which `factor` multiplies, as a ScaledTensor; outliers do not decide a plain one's scale."""
    if not _is_plain_float_tensor(x):
        return encode_operand(x, like)
    # What a home of float16 keeps in float32 for now is to fit float16 in the end.
    storage = torch.float16 if like._home == torch.float16 else like._payload.dtype
    size = _find_least_outlier(storage, factor)
    least = min(LEAST_OUTLIER_CLAMP_LIMIT * size / LEAST_OUTLIER_BY_STORAGE[storage], size)
    is_wide = storage in FULL_RANGE_STORAGES
    scale = measure_scale_without_outliers(x, storage, size, least, False, is_wide, among_zeros)
    made = encode_plain_tensor(x, torch.float32, scale)
    if is_wide or is_known_free_of_outliers(x, _powers.HUGE_SCALE, only_negative=False):
        return made
    # Products of what saturates stay finite.
    return wrap_payload(_powers.clamp_finite_values(made._payload, _powers.HUGE_SCALE), made._scale, made.dtype)


def find_outliers(
    x: Any, like: ScaledTensor, factor: Any = 1.0, inverse: bool = False, among_zeros: bool = True
) -> Tensor | None:
    """Return where a plain operand, or a divisor's inverse, times a number stands for infinity; None if nowhere."""
    # `like` is the scaled tensor that it meets.
    if not _is_plain_float_tensor(x):
        return None
    size = _find_least_outlier(like._payload.dtype, factor)
    x = x.detach()
    if inverse:
        x = torch.where(x == 0, 0.0, x.reciprocal())
    if is_known_free_of_outliers(x, size, only_negative=False):
        return None
    large = find_outlier_mask(x, size, among_zeros)
    if _powers.has_readable_values(x):
        return large if bool(large.any()) and not bool(large.all()) else None
    return large & ~large.all()


def _find_least_outlier(storage: torch.dtype, factor: Any) -> float:
    """Return from which magnitude on an element that a factor multiplies, among smaller ones, stands for infinity."""
    number = abs(float(factor)) if isinstance(factor, (int, float)) else 1.0
    size = LEAST_OUTLIER_BY_STORAGE[storage]
    return min(size / number, _powers.FLOAT32_MAX) if number else _powers.FLOAT32_MAX


def saturate_outliers(values: Tensor, scale: Tensor, storage: torch.dtype, *outlier_masks: Tensor | None) -> Tensor:
    """Return a result's float32 payload, clamped to the storage's range where operands hold outliers."""
    masks = [mask for mask in outlier_masks if mask is not None]
    if storage == torch.float32 or not masks:
        return values
    limits = torch.finfo(storage)
    if _powers.has_readable_values(values):
        top = values.abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if values.numel() else 0.0
        room = limits.max * _MAX_RESCALED_OVERFLOW_BY_STORAGE.get(storage, 1.0)
        if top * scale.item() <= _powers.FLOAT32_MAX / 2 and top <= room:
            return values
    # A number that is rounded up to the payload's next must not decode to infinity.
    held = (_powers.FLOAT32_MAX * (1 - limits.eps) / scale).clamp(max=limits.max)
    is_large = functools.reduce(torch.bitwise_or, masks)
    return torch.where(is_large, _powers.clamp_finite_values(values, held), values)


WideMode = Literal["autocast", "none"]
WIDE_MODES = get_args(WideMode)

OperandPreparation = Callable[[tuple, dict], tuple[tuple, dict]]


def choose_home_for_storage(storage: torch.dtype, wide: str) -> torch.dtype | None:
    """Return the home of tensors of a storage: float16 for eight bits, as for products; None if nothing is wider."""
    if wide not in WIDE_MODES:
        raise ValueError(f"wide={wide!r}: allowed are {', '.join(map(repr, WIDE_MODES))}")
    if wide == "none" or storage == torch.float32:
        return None
    return torch.float16 if storage in EIGHT_BIT_DTYPES else storage


def round_to_home(x: ScaledTensor) -> ScaledTensor:
    """Round the values to the home storage, under a measured scale."""
    home: Any = x._home  # a dtype: of a tensor without one nothing is rounded
    made = move_power_to_scale(x._payload, x._scale, measure_rms_scale(x._payload, home), home, x.dtype)
    made._home = home
    return made


def is_wider_than_home(x: Any) -> bool:
    """Return whether x is a tensor that products would round to its home."""
    return type(x) is ScaledTensor and x._home is not None and x._payload.dtype == torch.float32


def _makes_operands_wide(x: Any) -> bool:
    if type(x) is ScaledTensor or not isinstance(x, Tensor):
        return is_wider_than_home(x)
    return bool(x.dim()) and x.dtype in (torch.float32, torch.float64)


def convert_to_float32_payload(x: Any) -> Any:
    """Return a scaled tensor with a float32 payload, and anything else unchanged."""
    if type(x) is not ScaledTensor or x._payload.dtype == torch.float32:
        return x
    return wrap_payload(get_float32_payload(x), x._scale, x.dtype, x._home)


def map_tree(function: Callable[[Any], Any], x: Any) -> Any:
    """Return tree_map(function, x), without its cost for a tensor and for plain tuples, lists and dicts."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([map_tree(function, y) for y in x])
    if kind is dict:
        return {key: map_tree(function, y) for key, y in x.items()}
    return tree_map(function, x) if isinstance(x, (tuple, list, dict)) else function(x)


def _map_arguments_and_options(change: Callable[[Any], Any], arguments: tuple, options: dict) -> tuple[tuple, dict]:
    return map_tree(change, arguments), map_tree(change, options)


widen_operands = functools.partial(_map_arguments_and_options, convert_to_float32_payload)
round_operands_to_home = functools.partial(
    _map_arguments_and_options, lambda x: round_to_home(x) if is_wider_than_home(x) else x
)


def widen_operands_if_one_is_wide(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen every payload to float32 if one is, or a plain tensor is, as autocast; lists are left to their rules."""
    # The range of the plain float32 tensor that a narrow one meets may be all that holds the result.
    if any(map(_makes_operands_wide, arguments)) or any(map(_makes_operands_wide, options.values())):
        widened = {name: convert_to_float32_payload(x) for name, x in options.items()}
        return tuple(map(convert_to_float32_payload, arguments)), widened
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
    prepare = widen_operands if is_plain or is_outer_broadcast(a, b) else widen_operands_if_one_is_wide
    return prepare(arguments, options)


def is_outer_broadcast(a: Tensor, b: Tensor) -> bool:
    """Return whether broadcasting repeats both tensors, as in an outer sum."""
    # Sizes are compared to 1 alone: a graph of varying sizes would be compiled again where two become equal.
    return all(
        x.dim() < y.dim() or any(one == 1 and other != 1 for one, other in zip(reversed(x.shape), reversed(y.shape)))
        for x, y in ((a, b), (b, a))
    )


# By `Family.operands`. Normalisations are left to their rules: they compute in float32 and give results about 1, which
# lose nothing in the operand's storage.
_PREPARATION_BY_OPERAND_STORAGE: dict[str, OperandPreparation | None] = {
    "float32": widen_operands,
    "home": round_operands_to_home,
    "widest": widen_operands_if_one_is_wide,
    "rule": None,
}
# Operators that differ from their family.
_PREPARATION_BY_OPERATOR_NAME: dict[str, OperandPreparation | None] = {
    **dict.fromkeys(("mul", "addcmul", "lerp", "sign", "sgn"), widen_operands_if_one_is_wide),
    **dict.fromkeys(("dot", "vdot", "addcdiv", "hypot", "softplus", "log_sigmoid_forward"), widen_operands),
    **dict.fromkeys(("embedding", "embedding_dense_backward", "_embedding_bag"), round_operands_to_home),
    **dict.fromkeys(("_embedding_bag_forward_only", "_embedding_bag_dense_backward"), round_operands_to_home),
    # Differences too: after cancellation an earlier rounding error is most of what is left.
    **dict.fromkeys(("div", "floor_divide", "sub"), prepare_quotient_operands),
    "add": prepare_sum_operands,
}


def find_operand_preparation(operator: OpOverload) -> OperandPreparation | None:
    """Return how an operator changes its operands' storage before its rule runs; None if it does not."""
    # An argument that is written stays the tensor it is; what has no family runs by the steps it is made of.
    if operator not in FAMILY_BY_OPERATOR or operator._schema.is_mutable:
        return None
    of_family = _PREPARATION_BY_OPERAND_STORAGE[FAMILY_BY_NAME[FAMILY_BY_OPERATOR[operator]].operands]
    return _PREPARATION_BY_OPERATOR_NAME.get(operator._schema.name.removeprefix("aten::"), of_family)


@register_derivation_with_home
def make_rule_with_home(operator: OpOverload) -> Callable:
    """Return an operator's rule for operands of which one has a home, which the results then have too."""
    # Steps of a formula that divides by a sum have float32 operands, with a home and without.
    prepare = find_operand_preparation(operator)
    writes = operator._schema.is_mutable
    accumulates = operator._schema.name.removeprefix("aten::") in _GRADIENT_ACCUMULATION_OPERATORS

    def run(home: Any, arguments: tuple, options: dict) -> Any:
        if home is None:
            return _run_quotient_formula_step(operator, arguments, options)
        if is_in_quotient_formula() and not writes:
            arguments, options = widen_operands(arguments, options)
        if prepare is not None:
            arguments, options = prepare(arguments, options)
        results = find_rule(operator)(*arguments, **options)
        written = {id(x) for x in tree_leaves((arguments, options))} if writes else ()
        results = _set_home_of_results(results, home, written)
        if not accumulates or not is_wider_than_home(results):
            return results
        node = torch._C._current_autograd_node()
        is_stored = node is not None and node.name() == "torch::autograd::AccumulateGrad"
        return round_to_home(results) if is_stored else results

    return run


def _set_home_of_results(results: Any, home: torch.dtype, written_ids: Container[int]) -> Any:
    """Give results the home, except arguments that are written: these keep their own or none."""
    if type(results) is ScaledTensor:
        if id(results) not in written_ids:
            results._home = results._home or home
    elif isinstance(results, (list, tuple)):
        for result in results:
            _set_home_of_results(result, home, written_ids)
    return results


def _run_quotient_formula_step(operator: OpOverload, arguments: tuple, options: dict) -> Any:
    """Run a step of a formula that divides by a sum, on float32 payloads, without a home."""
    # Of nothing but narrow values it makes a step in between, in float32; of others too a gradient, in their storage.
    given = [x for x in tree_leaves((arguments, options)) if type(x) is ScaledTensor]
    narrow = [x._payload.dtype for x in given if x._payload.dtype != torch.float32]
    if operator._schema.is_mutable or not narrow:
        return find_rule(operator)(*arguments, **options)
    arguments, options = widen_operands(arguments, options)
    results = find_rule(operator)(*arguments, **options)
    if len(narrow) == len(given):
        return results
    storage = choose_widest_storage(narrow)
    return tree_map(lambda x: convert_storage_and_dtype(x, x.dtype, storage) if type(x) is ScaledTensor else x, results)


# Operators that autograd runs as a gradient is stored in, or added to, a parameter's `grad`.
_GRADIENT_ACCUMULATION_OPERATORS = ("detach", "clone", "new_empty_strided", "add")
