"""What a result is made of (promotion), and how it is made from components."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import PRECISION, Parts, pointwise, renormalize
from ..subclass._in_backward import COMPONENTS, FIRST, in_backward, rounds
from ._encode import integers, number, number_in_float32
from ._mctensor import MCTensor, wrap
from ._scale import magnitude, scale_for, scaled, widened

# float64 holds every value of so many bits that the components promise.
_WIDE_BITS = 53
_FACTORS = ("mul", "div", "addcmul")


class Form(NamedTuple):
    """The dtype, number and place of a result's components, whether it has a scale, and its kind of gradient.

    has_gradient: whether an operand may be a gradient, in a backward pass.
    """

    dtype: torch.dtype
    components: int
    gradients: str
    scaled: bool
    device: torch.device
    has_gradient: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether float64 holds what the components promise."""
        return self.components * PRECISION[self.dtype] <= _WIDE_BITS


def form_of(operands: Iterable[Any], dtype: torch.dtype | None = None) -> Form:
    """The form of a result of these operands.

    dtype: what torch.promote_types makes of all tensors with dimensions; tensors without dimensions count where there
    are no others, numbers never. Components: the most of any. A scale: where an operand of that dtype has one.
    Gradients: "components" where any operand asks for it.

    Raises:
        ValueError: a complex operand.
    """
    kinds: list = [None, None]
    count, gradients, scales, device, has_gradient = 1, FIRST, (), None, False
    for x in operands:
        if isinstance(x, MCTensor):
            kind = x.dtype
            if len(x._parts) > count:
                count = len(x._parts)
            if x._gradients == COMPONENTS:
                gradients = COMPONENTS
            if x._begins or len(x._parts) == 1:  # a compiled pass begins with one component
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
    dtype = dtype or kinds[1] or kinds[0]
    scaled = dtype in scales or (dtype == torch.float16 and bool(scales))
    return Form(dtype, count, gradients, scaled, device, has_gradient)


def parts_of(x: Any, device: torch.device) -> Parts:
    """Any operand as components without a scale: an MCTensor, a plain tensor, a number."""
    if isinstance(x, MCTensor):
        return x._parts if x._scale is None else widened(x._parts, x._scale)
    if isinstance(x, Tensor):
        return (x,) if x.dtype.is_floating_point else integers(x)
    return number(x, device)


def evaluate(name: str, *operands: Any, form: Form | None = None) -> Tensor:
    """A function of `arithmetic.pointwise` of MCTensors, tensors and numbers."""
    if form is None and len(operands) == 2 and are_alike(*operands):
        x = operands[0]
        parts = pointwise(name, x._parts, operands[1]._parts, components=len(x._parts), dtype=x._parts[0].dtype)
        return wrap(parts, None, x._gradients)
    form = form or form_of(operands)
    return run(name, operand_parts(name, operands, form.dtype, form.components, form.device), form)


def are_alike(a: Any, b: Any) -> bool:
    """Whether no promotion, scale or backward pass is to be thought of: the shortest way for the commonest call."""
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
    """All operands as components; numbers as float32 where the kernel can then stay in float32."""
    narrow = dtype == torch.float32 and components <= 2
    found = []
    for position, x in enumerate(operands):
        parts = None
        if narrow and not isinstance(x, Tensor):
            parts = number_in_float32(x, device, name in _FACTORS and (position or name != "addcmul"))
        found.append(parts or parts_of(x, device))
    return found


def run(name: str, operands: list[Parts], form: Form) -> Tensor:
    """The same of components."""
    if rounds(form.gradients, form.has_gradient):
        return pointwise(name, *operands, components=1, dtype=form.dtype)[0]
    if form.scaled:
        return packed(pointwise(name, *operands, components=wide_count(form), dtype=torch.float64), form)
    return wrap(pointwise(name, *operands, components=form.components, dtype=form.dtype), None, form.gradients)


def wide_count(form: Form) -> int:
    """How many float64 carry a value of that form."""
    return 1 if form.is_wide else form.components


def made(parts: Parts, form: Form) -> Tensor:
    """Canonical components without a scale, of any dtype and number, as a result."""
    if rounds(form.gradients, form.has_gradient):
        return _fitted(parts, 1, form.dtype)[0]
    if form.scaled:
        return packed(tuple(part.double() for part in parts), form)
    return wrap(_fitted(parts, form.components, form.dtype), None, form.gradients)


def packed(wide: Parts, form: Form) -> MCTensor:
    """float64 components under a new scale."""
    scale = scale_for(magnitude(wide[0]), form.dtype)
    return wrap(scaled(wide, scale, form.components, form.dtype), scale, form.gradients)


def aligned(operands: Iterable[Any], form: Form) -> tuple[list[Parts], Tensor | None]:
    """Operands of an operator that moves values: components of one dtype, number and scale."""
    parts = [parts_of(x, form.device) for x in operands]
    if not form.scaled:
        return [_fitted(part, form.components, form.dtype) for part in parts], None
    wide = [tuple(part.double() for part in some) for some in parts]
    scale = scale_for(torch.stack([magnitude(some[0]) for some in wide]).amax(), form.dtype)
    return [scaled(some, scale, form.components, form.dtype) for some in wide], scale


def kept(x: MCTensor) -> MCTensor:
    """The same components, whose results are never rounded: for the steps inside an operator."""
    return wrap(x._parts, x._scale, COMPONENTS)


def _fitted(parts: Parts, components: int, dtype: torch.dtype) -> Parts:
    if len(parts) == components and parts[0].dtype == dtype:
        return parts
    return renormalize(parts, components, dtype)
