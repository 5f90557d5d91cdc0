"""Expansions times a power of two that all elements share: functions of them, and components, in one kernel each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels import is_finite, select
from .._error_free import Terms
from ..functions._table import DIVISIONS, NETWORKS
from ._pointwise import ANGLES, Call, Elements, Parts, _made_like
from ._round_components import float16_to_float64, to_float64_terms

Operand = tuple[Parts, torch.Tensor | None]
_Kind = tuple[torch.dtype, int, bool]


def at_hand(name: str, operands: Sequence[Operand]) -> bool:
    """Return whether `function_of_scaled` computes a function of these operands, which no compiler follows."""
    if name in ANGLES or name in DIVISIONS or torch.compiler.is_compiling():
        return False
    return all(type(part) is torch.Tensor for parts, scale in operands for part in (*parts, *_given(scale)))


def function_of_scaled(name: str, operands: Sequence[Operand], components: int) -> tuple[Parts, torch.Tensor]:
    """Return a function as float64 components, and the magnitude of each element, 0 where it is not finite.

    Args:
        name: see `pointwise`.
        operands: components, and their 0-d scale, or None.
        components: of the result.
    """
    kinds = tuple((parts[0].dtype, len(parts), scale is not None) for parts, scale in operands)
    first = operands[0][0][0]
    shapes = {part.shape for parts, _ in operands for part in parts}
    shape = first.shape if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    device = next((parts[0] for parts, _ in operands if parts[0].dim()), first)
    *made, size = _made_like(device, shape, torch.float64, components + 1)
    _function(name, kinds, components)(
        [x for parts, scale in operands for x in (*parts, *_given(scale))], (*made, size)
    )
    return tuple(made), size


def under_scale(wide: Parts, scale: torch.Tensor, components: int, dtype: torch.dtype, keeps: bool = False) -> Parts:
    """Return the components whose sum times a scale is the value of float64 components.

    Args:
        wide: of the value.
        scale: 0-d, a power of two.
        components: of the result.
        dtype: of the result's components.
        keeps: whether no element becomes 0 that is none.
    """
    made = _made_like(wide[0], wide[0].shape, dtype, components)
    # A product with the reciprocal has the quotient's bits, as scales are powers of two.
    _components(len(wide), components, dtype, keeps)([*wide, scale.double().reciprocal()], made)
    return made


def _given(scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if scale is None else (scale,)


@functools.cache
def _function(name: str, kinds: tuple[_Kind, ...], components: int) -> Elements:
    def function(*values: Any) -> Terms:
        rest, operands = list(values), []
        for dtype, count, scaled in kinds:
            parts, rest = rest[:count], rest[count:]
            if scaled:
                scale, *rest = rest
                terms = [t * scale for t in (float16_to_float64(parts) if dtype == torch.float16 else parts)]
            else:
                terms = parts if dtype == torch.float64 else to_float64_terms(parts)
            operands.append(terms)
        made = NETWORKS[name].network(operands, components)[:components]
        return [*made, select(is_finite(made[0]), abs(made[0]), 0.0)]

    stored = tuple(one for dtype, count, scaled in kinds for one in [*[dtype] * count, *[torch.float32] * scaled])
    return Elements(f"scaled_{name}", function, torch.float64, stored, (torch.float64,) * (components + 1))


@functools.cache
def _components(count: int, components: int, dtype: torch.dtype, keeps: bool) -> Elements:
    rounding = Call("renormalize", ((torch.float64, count),), components, dtype)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps

    def function(*values: Any) -> Terms:
        *wide, inverse = values
        made = rounding.evaluate(*(part * inverse for part in wide))
        if keeps:
            vanished = made[0] == 0.0
            made[0] = select(vanished & (wide[0] > 0.0), least, made[0])
            made[0] = select(vanished & (wide[0] < 0.0), -least, made[0])
        return made

    name = "components_under_scale_kept" if keeps else "components_under_scale"
    stored, written = (torch.float64,) * (count + 1), (dtype,) * components
    return Elements(name, function, torch.float64, stored, written, exact=True)
