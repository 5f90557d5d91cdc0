"""Type promotion of MCTensors (`result_type`), and making results of that type from components."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import PRECISION, Parts, pointwise, renormalize
from ..arithmetic.expansions._pointwise import at_hand, combine, function_of_scaled
from ..subclass._in_backward import COMPONENTS, FIRST, gives_plain_gradient, in_backward
from ..subclass._rule_table import in_quotient_formula
from ._encode import integer_components, number_components, number_in_float32
from ._mctensor import MCTensor, wrap
from ._scale import divide_by_scale, magnitude, scale_for, to_float64
from ._stand_ins import without_large_constants

# float64 holds every value of so many bits that the components promise.
_WIDE_BITS = 53
# A sum of positive numbers is not to become 0 beside large ones: it may be divided by.
SUMS = ("add", "sub", "addcmul", "hypot")
_FACTORS = ("mul", "div", "addcmul")


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
        return self.components * PRECISION[self.dtype] <= _WIDE_BITS


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
    if dtype is None and in_quotient_formula():
        promoted = kinds[1] or kinds[0]
        if promoted == torch.float16:  # one scale would lose a 1 beside 2^40; two float32 hold what four float16 do
            return ResultType(torch.float32, min(count, 2), gradients, False, device, has_gradient)
    dtype = dtype or kinds[1] or kinds[0]
    scaled = dtype in scales or (dtype == torch.float16 and bool(scales))
    return ResultType(dtype, count, gradients, scaled, device, has_gradient)


def parts_of(x: Any, device: torch.device) -> Parts:
    """Return any operand (an MCTensor, a plain tensor, a number) as components without a scale."""
    if isinstance(x, MCTensor):
        return x._parts if x._scale is None else to_float64(x._parts, x._scale)
    if isinstance(x, Tensor):
        return (x,) if x.dtype.is_floating_point else integer_components(x)
    return number_components(x, device)


def _with_scale(x: Any, device: torch.device) -> tuple[Parts, Tensor | None]:
    return (x._parts, x._scale) if isinstance(x, MCTensor) else (parts_of(x, device), None)


def evaluate(name: str, *operands: Any, form: ResultType | None = None) -> Tensor:
    """Run a function of `arithmetic.pointwise` on MCTensors, tensors and numbers."""
    if form is None and len(operands) == 2 and are_alike(*operands):
        x, y = operands
        if x.shape == y.shape and x.is_contiguous() and y.is_contiguous():
            return wrap(combine(name, x._parts, y._parts), None, x._gradients)
        parts = pointwise(name, x._parts, y._parts, components=len(x._parts), dtype=x.dtype)
        return wrap(parts, None, x._gradients)
    form = form or result_type(operands)
    if form.scaled and not gives_plain_gradient(form.gradients, form.has_gradient):
        given = [_with_scale(x, form.device) for x in operands]
        if at_hand(name, given):
            wide, sizes = function_of_scaled(name, given, float64_count(form))
            return _scaled(wide, sizes.amax() if sizes.numel() else sizes.new_zeros(()), form, name in SUMS)
    return run_pointwise(name, operand_parts(name, operands, form.dtype, form.components, form.device), form)


def are_alike(a: Any, b: Any) -> bool:
    """Return whether two operands need no promotion, scale or rounding: the shortcut for the most frequent call."""
    return (
        type(a) is MCTensor
        and type(b) is MCTensor
        and a._scale is None
        and b._scale is None
        and a._gradients == b._gradients
        and len(a._parts) == len(b._parts)
        and a._parts[0].dtype is b._parts[0].dtype
        and not in_backward()
    )


def operand_parts(name: str, operands: Iterable, dtype: torch.dtype, components: int, device: Any) -> list[Parts]:
    """Return all operands as components; numbers as float32 where the kernel can then stay in float32."""
    narrow = dtype == torch.float32 and components <= 2
    found = []
    for position, x in enumerate(operands):
        parts = None
        if narrow and not isinstance(x, Tensor):
            parts = number_in_float32(x, device, name in _FACTORS and (position > 0 or name != "addcmul"))
        found.append(parts or parts_of(x, device))
    return found


def run_pointwise(name: str, operands: list[Parts], form: ResultType) -> Tensor:
    """Run a function of `arithmetic.pointwise` on components and return the result of a type."""
    if gives_plain_gradient(form.gradients, form.has_gradient):
        return pointwise(name, *operands, components=1, dtype=form.dtype)[0]
    if form.scaled:
        wide = pointwise(name, *operands, components=float64_count(form), dtype=torch.float64)
        return _scaled(wide, magnitude(wide[0]), form, name in SUMS)
    return wrap(pointwise(name, *operands, components=form.components, dtype=form.dtype), None, form.gradients)


def float64_count(form: ResultType) -> int:
    """Return how many float64 hold a value of a result type."""
    return 1 if form.fits_float64 else form.components


def make_result(parts: Parts, form: ResultType) -> Tensor:
    """Make a result from non-overlapping components without a scale, of any dtype and number."""
    if gives_plain_gradient(form.gradients, form.has_gradient):
        return _round_to_components(parts, 1, form.dtype)[0]
    if form.scaled:
        return make_scaled(tuple(part.double() for part in parts), form)
    return wrap(_round_to_components(parts, form.components, form.dtype), None, form.gradients)


def make_scaled(wide: Parts, form: ResultType) -> MCTensor:
    """Make a scaled result from float64 components; the scale is measured."""
    return _scaled(wide, magnitude(wide[0]), form)


def _scaled(wide: Parts, largest: Tensor, form: ResultType, keeps: bool = False) -> MCTensor:
    scale = scale_for(largest, form.dtype)
    return wrap(divide_by_scale(wide, scale, form.components, form.dtype, keeps), scale, form.gradients)


def align_components(operands: Iterable[Any], form: ResultType) -> tuple[list[Parts], Tensor | None]:
    """Return operands as components of one dtype, number and scale, for an operator that copies elements."""
    operands = list(operands)
    parts = [parts_of(x, form.device) for x in operands]
    if not form.scaled:
        return [_round_to_components(part, form.components, form.dtype) for part in parts], None
    wide = [tuple(part.double() for part in some) for some in parts]
    wide = without_large_constants(operands, wide)
    scale = scale_for(torch.stack([magnitude(some[0]) for some in wide]).amax(), form.dtype)
    return [divide_by_scale(some, scale, form.components, form.dtype) for some in wide], scale


def without_rounding(x: MCTensor) -> MCTensor:
    """Return x with gradients="components", so that an operator's inner steps are not rounded in a backward pass."""
    return wrap(x._parts, x._scale, COMPONENTS)


def _round_to_components(parts: Parts, components: int, dtype: torch.dtype) -> Parts:
    if len(parts) == components and parts[0].dtype == dtype:
        return parts
    return renormalize(parts, components, dtype)
