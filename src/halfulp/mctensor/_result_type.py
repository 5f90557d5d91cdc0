"""Type promotion of MCTensors, plain operands and constants beside them, and results of the promoted type."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..arithmetic import PRECISION_BY_DTYPE, Parts, pointwise, renormalize
from ..arithmetic._pointwise import (
    can_evaluate_scaled_operands,
    evaluate_scaled_operands_in_float64,
    run_on_like_operands,
)
from ..subclass._in_backward import (
    COMPONENTS_GRADIENTS_MODE,
    FIRST_GRADIENTS_MODE,
    is_in_backward,
    refuse_jit_trace,
    refuse_make_fx,
    wants_plain_result,
)
from ..subclass._rule_table import find_outlier_mask, is_in_quotient_formula
from ._encode import (
    choose_scale,
    convert_components_to_float64,
    divide_by_scale,
    find_largest_finite_magnitude,
    split_integers_into_float64,
    split_number_into_float32,
    split_number_into_float64,
)
from ._mctensor import MCTensor, attach_autograd_history, wrap_components

# A sum of positive numbers is not to become 0 beside large ones: it may be divided by.
FUNCTIONS_WITH_NONZERO_RESULTS = ("add", "sub", "addcmul", "hypot")


class ResultType(NamedTuple):
    """The type of an operator's result: components, dtype, scale and kind of gradients."""

    dtype: torch.dtype
    components: int
    gradients: str  # "first" or "components", see MCTensor
    is_scaled: bool
    device: torch.device
    has_gradient: bool = False  # whether an operand may be a gradient, in a backward pass

    @property
    def fits_float64(self) -> bool:
        """Whether one float64 holds as many bits as the components together."""
        return self.components * PRECISION_BY_DTYPE[self.dtype] <= 53


def result_type(operands: Iterable[Any], dtype: torch.dtype | None = None) -> ResultType:
    """Return the type of the result of an operator on these operands, numbers among them."""
    # dtype: what torch.promote_types makes of all tensors with dimensions; tensors without dimensions count where there
    # are no others, numbers never. Components: the most of any. A scale: where an operand of that dtype has one.
    # Gradients: "components" where any operand asks for it.
    kinds: list = [None, None]
    scales: tuple[torch.dtype, ...]
    device: Any
    count, gradients, scales, device, has_gradient = 1, FIRST_GRADIENTS_MODE, (), None, False
    for x in operands:
        if isinstance(x, MCTensor):
            kind = x.dtype
            if len(x._parts) > count:
                count = len(x._parts)
            if x._gradients == COMPONENTS_GRADIENTS_MODE:
                gradients = COMPONENTS_GRADIENTS_MODE
            if x._is_filled_with_ones or len(x._parts) == 1:  # a compiled pass begins with one component
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
        return x._parts if x._scale is None else convert_components_to_float64(x._parts, x._scale)
    if isinstance(x, Tensor):
        return (x,) if x.dtype.is_floating_point else split_integers_into_float64(x)
    return split_number_into_float64(x, device)


def run_pointwise_function(name: str, *operands: Any, form: ResultType | None = None) -> Tensor:
    """Run a function of `arithmetic.pointwise` on MCTensors, tensors and numbers."""
    if form is None and len(operands) == 2 and need_no_conversion(*operands):
        x, y = operands
        if x.shape == y.shape and x.is_contiguous() and y.is_contiguous():
            return wrap_components(run_on_like_operands(name, x._parts, y._parts), None, x._gradients)
        parts = pointwise(name, x._parts, y._parts, components=len(x._parts), dtype=x.dtype)
        return wrap_components(parts, None, x._gradients)
    form = form or result_type(operands)
    if form.is_scaled and not wants_plain_result(form.gradients, form.has_gradient):
        given = [
            (x._parts, x._scale) if isinstance(x, MCTensor) else (to_components(x, form.device), None) for x in operands
        ]
        if can_evaluate_scaled_operands(name, given):
            wide, sizes = evaluate_scaled_operands_in_float64(name, given, count_float64_components(form))
            largest = sizes.amax() if sizes.numel() else sizes.new_zeros(())
            return _scale_result(wide, largest, form, name in FUNCTIONS_WITH_NONZERO_RESULTS)
    converted = convert_operands(name, operands, form.dtype, form.components, form.device)
    if wants_plain_result(form.gradients, form.has_gradient):
        return pointwise(name, *converted, components=1, dtype=form.dtype)[0]
    if form.is_scaled:
        wide = pointwise(name, *converted, components=count_float64_components(form), dtype=torch.float64)
        return _scale_result(wide, find_largest_finite_magnitude(wide[0]), form, name in FUNCTIONS_WITH_NONZERO_RESULTS)
    parts = pointwise(name, *converted, components=form.components, dtype=form.dtype)
    return wrap_components(parts, None, form.gradients)


def need_no_conversion(a: Any, b: Any) -> bool:
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
            is_factor = name in ("mul", "div") or (name == "addcmul" and position > 0)
            parts = split_number_into_float32(x, device, is_factor)
        found.append(parts or to_components(x, device))
    return found


def choose_working_components_and_dtype(form: ResultType) -> tuple[int, torch.dtype]:
    """Return the components, and their dtype, that a result is computed in before it becomes one of a type."""
    if form.is_scaled:
        return count_float64_components(form), torch.float64
    return (1 if wants_plain_result(form.gradients, form.has_gradient) else form.components), form.dtype


def count_float64_components(form: ResultType) -> int:
    """Return how many float64 hold a value of a result type."""
    return 1 if form.fits_float64 else form.components


def make_result(parts: Parts, form: ResultType) -> Tensor:
    """Make a result from non-overlapping components without a scale, of any dtype and number."""
    if wants_plain_result(form.gradients, form.has_gradient):
        return _round_to_components(parts, 1, form.dtype)[0]
    if form.is_scaled:
        return _make_scaled_result(parts, form)
    return wrap_components(_round_to_components(parts, form.components, form.dtype), None, form.gradients)


def _make_scaled_result(parts: Parts, form: ResultType) -> MCTensor:
    wide = tuple(part.double() for part in parts)
    return _scale_result(wide, find_largest_finite_magnitude(wide[0]), form)


def _scale_result(wide: Parts, largest: Tensor, form: ResultType, keeps_nonzero: bool = False) -> MCTensor:
    scale = choose_scale(largest, form.dtype)
    parts = divide_by_scale(wide, scale, form.components, form.dtype, keeps_nonzero)
    return wrap_components(parts, scale, form.gradients)


def unify_components(operands: Iterable[Any], form: ResultType) -> tuple[list[Parts], Tensor | None]:
    """Return operands as components of one dtype, number and scale, for an operator that copies elements."""
    operands = list(operands)
    parts = [to_components(x, form.device) for x in operands]
    if not form.is_scaled:
        return [_round_to_components(part, form.components, form.dtype) for part in parts], None
    wide = [tuple(part.double() for part in some) for some in parts]
    # Operands are chosen among: outliers are brought nearer to the others.
    constants = [i for i, x in enumerate(operands) if not isinstance(x, MCTensor)]
    large = {i: _find_outliers(wide[i][0]) for i in constants}
    if any(map(_is_not_known_all_false, large.values())):
        others = [torch.where(large[i], 0.0, some[0]) if i in large else some[0] for i, some in enumerate(wide)]
        limit = _compute_outlier_limit(torch.stack([find_largest_finite_magnitude(part) for part in others]).amax())
        wide = [_clamp_components(some, large[i], limit) if i in large else some for i, some in enumerate(wide)]
    scale = choose_scale(torch.stack([find_largest_finite_magnitude(some[0]) for some in wide]).amax(), form.dtype)
    return [divide_by_scale(some, scale, form.components, form.dtype) for some in wide], scale


def keep_component_gradients(x: MCTensor) -> MCTensor:
    """Return x with gradients="components", so that an operator's inner steps are not rounded in a backward pass."""
    return wrap_components(x._parts, x._scale, COMPONENTS_GRADIENTS_MODE)


def _round_to_components(parts: Parts, components: int, dtype: torch.dtype) -> Parts:
    if len(parts) == components and parts[0].dtype == dtype:
        return parts
    return renormalize(parts, components, dtype)


# From this magnitude on a plain operand's number may stand for infinity, as in masks of attention.
_LEAST_OUTLIER = 2.0**24


def clamp_results_of_outliers(result: Parts, name: str, operands: Sequence[Any]) -> Parts:
    """Return a function's float64 components, brought nearer to the others where plain operands have outliers."""
    masks = []
    for x in operands:
        if is_plain_floating(x) and x.dim():
            cause = torch.where(x == 0, 0.0, x.reciprocal()) if name == "div" else x
            masks.append(_find_outliers(cause, among_zeros=name != "mul"))
    masks = [mask for mask in masks if _is_not_known_all_false(mask)]
    if not masks or result[0].shape != torch.broadcast_shapes(result[0].shape, *(mask.shape for mask in masks)):
        return result
    return _clamp_masked_elements(result, functools.reduce(torch.logical_or, masks).expand(result[0].shape))


def clamp_written_outliers(result: Parts, operands: Sequence[Any]) -> Parts:
    """Return float64 components in which elements copied from plain operands, if outliers, lie nearer to the others."""
    if not any(_is_not_known_all_false(_find_outliers(x)) for x in operands if is_plain_floating(x)):
        return result
    return _clamp_masked_elements(result, (result[0].abs() >= _LEAST_OUTLIER) & result[0].isfinite())


def _clamp_masked_elements(parts: Parts, mask: Tensor) -> Parts:
    return _clamp_components(
        parts, mask, _compute_outlier_limit(find_largest_finite_magnitude(torch.where(mask, 0.0, parts[0])))
    )


def _find_outliers(x: Tensor, among_zeros: bool = True) -> Tensor:
    """Return where large numbers stand for infinity: see `find_outlier_mask`."""
    large = (x.abs() >= _LEAST_OUTLIER) & x.isfinite()
    return find_outlier_mask(x, _LEAST_OUTLIER, among_zeros) if _is_not_known_all_false(large) else large


def _is_not_known_all_false(mask: Tensor) -> bool:
    return type(mask) is not Tensor or mask.device.type != "cpu" or bool(mask.any())


def _compute_outlier_limit(largest: Tensor) -> Tensor:
    """Return the bound for large elements beside others of this magnitude; infinity beside zeros."""
    # exp(-128) is 0 in float32; beside 2^8 times the largest of the others these keep all digits.
    return torch.where(largest == 0, torch.inf, (largest * 2.0**8).clamp(min=128.0))


def _clamp_components(parts: Parts, mask: Tensor, limit: Tensor) -> Parts:
    beyond = mask & (parts[0].abs() > limit)
    first = torch.where(beyond, limit.copysign(parts[0]), parts[0])
    return (first, *(torch.where(beyond, 0.0, part) for part in parts[1:]))


def is_plain_floating(x: Any) -> bool:
    """Return whether an operand is a plain floating-point tensor."""
    return isinstance(x, Tensor) and not isinstance(x, MCTensor) and x.is_floating_point()


def has_plain_operand(arguments: tuple, options: dict) -> bool:
    """Return whether any operand, lists of operands included, is a plain floating-point tensor."""
    for x in (*arguments, *options.values()):
        if is_plain_floating(x) or (isinstance(x, (list, tuple, dict)) and any(map(is_plain_floating, tree_leaves(x)))):
            return True
    return False


def encode_plain_operands(operands: Any, form: ResultType, with_gradients: bool = False) -> Any:
    """Encode every plain floating-point tensor among nested operands as an MCTensor of an operator's result type."""
    refuse_make_fx("MCTensor")
    refuse_jit_trace("MCTensor")
    ranked = any(isinstance(x, Tensor) and x.dim() and x.is_floating_point() for x in tree_leaves(operands))

    def encode_operand(x: Any) -> Any:
        if not is_plain_floating(x):
            return x
        parts = to_components(x.detach(), form.device)
        if ranked and not x.dim():  # promotes nothing, and keeps all the digits of a float64
            made = wrap_components(renormalize(parts, form.components, torch.float64), None, form.gradients)
        elif form.is_scaled:
            made = _make_scaled_result(parts, form)
        else:
            made = wrap_components(renormalize(parts, form.components, form.dtype), None, form.gradients)
        return attach_autograd_history(x, made) if with_gradients else made

    return tree_map(encode_operand, operands)
