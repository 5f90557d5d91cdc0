"""Type promotion of MCTensors, plain operands and constants beside them, and results of the promoted type."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..arithmetic import PRECISION, Parts, pointwise, renormalize
from ..arithmetic._pointwise import can_run_on_scaled_operands, evaluate_alike, run_on_scaled_operands
from ..subclass._in_backward import (
    COMPONENTS,
    FIRST,
    gives_plain_gradient,
    is_in_backward,
    refuse_jit_trace,
    refuse_make_fx,
)
from ..subclass._rule_table import find_infinity_substitutes, is_in_quotient_formula
from ._encode import (
    choose_scale,
    convert_to_float64,
    divide_by_scale,
    find_magnitude,
    split_integers,
    split_number,
    split_number_in_float32,
)
from ._mctensor import MCTensor, attach_history, wrap_parts

# float64 holds every value of so many bits that the components promise.
_FLOAT64_BITS = 53
# A sum of positive numbers is not to become 0 beside large ones: it may be divided by.
SUM_FUNCTION_NAMES = ("add", "sub", "addcmul", "hypot")
_FACTOR_FUNCTION_NAMES = ("mul", "div", "addcmul")


class ResultType(NamedTuple):
    """The type of an operator's result: components, dtype, scale and kind of gradients.

    dtype, components, device: of the result's components, and their number.
    gradients: "first" or "components", see MCTensor.
    scaled: whether it has a scale.
    has_gradient: whether an operand may be a gradient, in a backward pass.
    """

    dtype: torch.dtype
    components: int
    gradients: str
    scaled: bool
    device: torch.device
    has_gradient: bool = False

    @property
    def fits_float64(self) -> bool:
        """Whether one float64 holds as many bits as the components together."""
        return self.components * PRECISION[self.dtype] <= _FLOAT64_BITS


def result_type(operands: Iterable[Any], dtype: torch.dtype | None = None) -> ResultType:
    """Return the type of the result of an operator on these operands, numbers among them.

    dtype: what torch.promote_types makes of all tensors with dimensions; tensors without dimensions count where there
    are no others, numbers never. Components: the most of any. A scale: where an operand of that dtype has one.
    Gradients: "components" where any operand asks for it.

    Raises:
        ValueError: a complex operand.
    """
    kinds: list = [None, None]
    scales: tuple[torch.dtype, ...]
    device: Any
    count, gradients, scales, device, has_gradient = 1, FIRST, (), None, False
    for x in operands:
        if isinstance(x, MCTensor):
            kind = x.dtype
            if len(x._parts) > count:
                count = len(x._parts)
            if x._gradients == COMPONENTS:
                gradients = COMPONENTS
            if x._seeds_backward or len(x._parts) == 1:  # a compiled pass begins with one component
                has_gradient = True
            if x._scale is not None:
                scales = (*scales, kind)
        elif isinstance(x, Tensor):
            kind = x.dtype
            if not kind.is_floating_point:
                if kind.is_complex:
                    raise ValueError(f"an operand is {kind} and an MCTensor is real: split it into its two parts")
                continue
            has_gradient = True
        else:
            continue
        if device is None or x.dim():
            device = x.device
        rank = 1 if x.dim() else 0
        known = kinds[rank]
        kinds[rank] = kind if known is None or known is kind else torch.promote_types(known, kind)
    if dtype is None and is_in_quotient_formula():
        promoted = kinds[1] or kinds[0]
        if promoted == torch.float16:  # one scale would lose a 1 beside 2^40; two float32 hold what four float16 do
            return ResultType(torch.float32, min(count, 2), gradients, False, device, has_gradient)
    dtype = dtype or kinds[1] or kinds[0]
    scaled = dtype in scales or (dtype == torch.float16 and bool(scales))
    return ResultType(dtype, count, gradients, scaled, device, has_gradient)


def to_components(x: Any, device: torch.device) -> Parts:
    """Return any operand (an MCTensor, a plain tensor, a number) as components without a scale."""
    if isinstance(x, MCTensor):
        return x._parts if x._scale is None else convert_to_float64(x._parts, x._scale)
    if isinstance(x, Tensor):
        return (x,) if x.dtype.is_floating_point else split_integers(x)
    return split_number(x, device)


def run_function(name: str, *operands: Any, form: ResultType | None = None) -> Tensor:
    """Run a function of `arithmetic.pointwise` on MCTensors, tensors and numbers."""
    if form is None and len(operands) == 2 and are_operands_alike(*operands):
        x, y = operands
        if x.shape == y.shape and x.is_contiguous() and y.is_contiguous():
            return wrap_parts(evaluate_alike(name, x._parts, y._parts), None, x._gradients)
        parts = pointwise(name, x._parts, y._parts, components=len(x._parts), dtype=x.dtype)
        return wrap_parts(parts, None, x._gradients)
    form = form or result_type(operands)
    if form.scaled and not gives_plain_gradient(form.gradients, form.has_gradient):
        given = [
            (x._parts, x._scale) if isinstance(x, MCTensor) else (to_components(x, form.device), None) for x in operands
        ]
        if can_run_on_scaled_operands(name, given):
            wide, sizes = run_on_scaled_operands(name, given, count_float64_components(form))
            return _scale_result(
                wide, sizes.amax() if sizes.numel() else sizes.new_zeros(()), form, name in SUM_FUNCTION_NAMES
            )
    converted = convert_operands(name, operands, form.dtype, form.components, form.device)
    if gives_plain_gradient(form.gradients, form.has_gradient):
        return pointwise(name, *converted, components=1, dtype=form.dtype)[0]
    if form.scaled:
        wide = pointwise(name, *converted, components=count_float64_components(form), dtype=torch.float64)
        return _scale_result(wide, find_magnitude(wide[0]), form, name in SUM_FUNCTION_NAMES)
    return wrap_parts(pointwise(name, *converted, components=form.components, dtype=form.dtype), None, form.gradients)


def are_operands_alike(a: Any, b: Any) -> bool:
    """Return whether two operands need no promotion, scale or rounding: the shortcut for the most frequent call."""
    return (
        type(a) is MCTensor
        and type(b) is MCTensor
        and a._scale is None
        and b._scale is None
        and a._gradients == b._gradients
        and len(a._parts) == len(b._parts)
        and a._parts[0].dtype is b._parts[0].dtype
        and not is_in_backward()
    )


def convert_operands(name: str, operands: Iterable, dtype: torch.dtype, components: int, device: Any) -> list[Parts]:
    """Return all operands as components; numbers as float32 where the kernel can then stay in float32."""
    narrow = dtype == torch.float32 and components <= 2
    found = []
    for position, x in enumerate(operands):
        parts = None
        if narrow and not isinstance(x, Tensor):
            parts = split_number_in_float32(
                x, device, name in _FACTOR_FUNCTION_NAMES and (position > 0 or name != "addcmul")
            )
        found.append(parts or to_components(x, device))
    return found


def choose_working_type(form: ResultType) -> tuple[int, torch.dtype]:
    """Return the components, and their dtype, that a result is computed in before it becomes one of a type."""
    if form.scaled:
        return count_float64_components(form), torch.float64
    return (1 if gives_plain_gradient(form.gradients, form.has_gradient) else form.components), form.dtype


def count_float64_components(form: ResultType) -> int:
    """Return how many float64 hold a value of a result type."""
    return 1 if form.fits_float64 else form.components


def make_result(parts: Parts, form: ResultType) -> Tensor:
    """Make a result from non-overlapping components without a scale, of any dtype and number."""
    if gives_plain_gradient(form.gradients, form.has_gradient):
        return _round_to_components(parts, 1, form.dtype)[0]
    if form.scaled:
        return make_scaled_result(tuple(part.double() for part in parts), form)
    return wrap_parts(_round_to_components(parts, form.components, form.dtype), None, form.gradients)


def make_scaled_result(wide: Parts, form: ResultType) -> MCTensor:
    """Make a scaled result from float64 components; the scale is measured."""
    return _scale_result(wide, find_magnitude(wide[0]), form)


def _scale_result(wide: Parts, largest: Tensor, form: ResultType, keeps: bool = False) -> MCTensor:
    scale = choose_scale(largest, form.dtype)
    return wrap_parts(divide_by_scale(wide, scale, form.components, form.dtype, keeps), scale, form.gradients)


def align_operands(operands: Iterable[Any], form: ResultType) -> tuple[list[Parts], Tensor | None]:
    """Return operands as components of one dtype, number and scale, for an operator that copies elements."""
    operands = list(operands)
    parts = [to_components(x, form.device) for x in operands]
    if not form.scaled:
        return [_round_to_components(part, form.components, form.dtype) for part in parts], None
    wide = [tuple(part.double() for part in some) for some in parts]
    wide = limit_large_constants(operands, wide)
    scale = choose_scale(torch.stack([find_magnitude(some[0]) for some in wide]).amax(), form.dtype)
    return [divide_by_scale(some, scale, form.components, form.dtype) for some in wide], scale


def keep_component_gradients(x: MCTensor) -> MCTensor:
    """Return x with gradients="components", so that an operator's inner steps are not rounded in a backward pass."""
    return wrap_parts(x._parts, x._scale, COMPONENTS)


def _round_to_components(parts: Parts, components: int, dtype: torch.dtype) -> Parts:
    if len(parts) == components and parts[0].dtype == dtype:
        return parts
    return renormalize(parts, components, dtype)


# From this magnitude on a constant stands for infinity.
_LEAST_STAND_IN = 2.0**24
# To at least so much it saturates: exp(-128) is 0 in float32; and to so many times the largest of the others, beside
# which these keep all digits.
_LEAST_LIMIT, _LIMIT_FACTOR = 128.0, 2.0**8


def limit_large_constants(operands: Sequence[Any], wide: list[Parts]) -> list[Parts]:
    """Return the components of operands that are chosen among, with large constants brought nearer to the others.

    Args:
        operands: MCTensors, plain tensors and numbers.
        wide: their values as float64 components.
    """
    large = {i: _find_stand_ins(parts[0]) for i, parts in enumerate(wide) if not isinstance(operands[i], MCTensor)}
    if not any(map(_may_hold_any, large.values())):
        return wide
    others = [torch.where(large[i], 0.0, parts[0]) if i in large else parts[0] for i, parts in enumerate(wide)]
    limit = _find_limit(torch.stack([find_magnitude(part) for part in others]).amax())
    return [_clamp_components(parts, large[i], limit) if i in large else parts for i, parts in enumerate(wide)]


def limit_large_elements(result: Parts, name: str, operands: Sequence[Any]) -> Parts:
    """Return the float64 components of a result, brought nearer to the others where plain operands make it large.

    Args:
        result: of an elementwise function.
        name: of the function: "mul", "div", or another, whose operands are addends.
        operands: those that may stand for infinity.
    """
    large = []
    for x in operands:
        if is_plain(x) and x.dim():
            cause = torch.where(x == 0, 0.0, x.reciprocal()) if name == "div" else x
            large.append(_find_stand_ins(cause, among_zeros=name != "mul"))
    places = [place for place in large if _may_hold_any(place)]
    if not places or result[0].shape != torch.broadcast_shapes(result[0].shape, *(p.shape for p in places)):
        return result
    return _clamp_at_places(result, functools.reduce(torch.logical_or, places).expand(result[0].shape))


def limit_written_elements(result: Parts, operands: Sequence[Any]) -> Parts:
    """Return the float64 components of a result with elements written at places, in the same way."""
    if not any(_may_hold_any(_find_stand_ins(x)) for x in operands if is_plain(x)):
        return result
    return _clamp_at_places(result, (result[0].abs() >= _LEAST_STAND_IN) & result[0].isfinite())


def _clamp_at_places(parts: Parts, places: Tensor) -> Parts:
    return _clamp_components(parts, places, _find_limit(find_magnitude(torch.where(places, 0.0, parts[0]))))


def _find_stand_ins(x: Tensor, among_zeros: bool = True) -> Tensor:
    large = (x.abs() >= _LEAST_STAND_IN) & x.isfinite()
    return find_infinity_substitutes(x, _LEAST_STAND_IN, among_zeros) if _may_hold_any(large) else large


def _may_hold_any(places: Tensor) -> bool:
    return type(places) is not Tensor or places.device.type != "cpu" or bool(places.any())


def _find_limit(largest: Tensor) -> Tensor:
    """Return the bound for large elements beside others of this magnitude; infinity beside zeros."""
    return torch.where(largest == 0, torch.inf, (largest * _LIMIT_FACTOR).clamp(min=_LEAST_LIMIT))


def _clamp_components(parts: Parts, places: Tensor, limit: Tensor) -> Parts:
    beyond = places & (parts[0].abs() > limit)
    first = torch.where(beyond, limit.copysign(parts[0]), parts[0])
    return (first, *(torch.where(beyond, 0.0, part) for part in parts[1:]))


def is_plain(x: Any) -> bool:
    """Return whether an operand is a plain floating-point tensor."""
    return isinstance(x, Tensor) and not isinstance(x, MCTensor) and x.is_floating_point()


def has_plain_operand(arguments: tuple, options: dict) -> bool:
    """Return whether any operand, lists of operands included, is a plain floating-point tensor."""
    for x in (*arguments, *options.values()):
        if is_plain(x) or (isinstance(x, (list, tuple, dict)) and any(map(is_plain, tree_leaves(x)))):
            return True
    return False


def encode_plain_operands(operands: Any, form: ResultType, with_gradients: bool = False) -> Any:
    """Encode every plain floating-point tensor among nested operands as an MCTensor of an operator's result type.

    Those without dimensions, which promote nothing beside others that have some, keep all the digits of a float64.

    with_gradients: whether gradients flow back to the plain operands.
    """
    refuse_make_fx("MCTensor")
    refuse_jit_trace("MCTensor")
    ranked = any(isinstance(x, Tensor) and x.dim() and x.is_floating_point() for x in tree_leaves(operands))

    def encode_operand(x: Any) -> Any:
        if not is_plain(x):
            return x
        parts = to_components(x.detach(), form.device)
        if ranked and not x.dim():
            made = wrap_parts(renormalize(parts, form.components, torch.float64), None, form.gradients)
        elif form.scaled:
            made = make_scaled_result(tuple(part.double() for part in parts), form)
        else:
            made = wrap_parts(renormalize(parts, form.components, form.dtype), None, form.gradients)
        return attach_history(x, made) if with_gradients else made

    return tree_map(encode_operand, operands)
