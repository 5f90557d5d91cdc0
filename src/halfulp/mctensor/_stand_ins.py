"""Large constants and plain operands beside scaled components: they stand for infinity, and do not decide the scale.

Under a scale that holds -1e9, as masks write it, float16 components would keep a few digits of all other elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import Parts
from ..subclass._rule_table import stand_ins
from ._mctensor import MCTensor
from ._scale import magnitude

# From this magnitude on a constant stands for infinity.
STAND_IN = 2.0**24
# To at least so much it saturates: exp(-128) is 0 in float32; and to so many times the largest of the others, beside
# which these keep all digits.
_LEAST, _TIMES = 128.0, 2.0**8


def without_large_constants(operands: Sequence[Any], wide: list[Parts]) -> list[Parts]:
    """Return the components of operands that are chosen among, with large constants brought nearer to the others.

    Args:
        operands: MCTensors, plain tensors and numbers.
        wide: their values as float64 components.
    """
    large = {i: _stand_ins(parts[0]) for i, parts in enumerate(wide) if not isinstance(operands[i], MCTensor)}
    if not any(map(_may_hold, large.values())):
        return wide
    others = [torch.where(large[i], 0.0, parts[0]) if i in large else parts[0] for i, parts in enumerate(wide)]
    limit = _limit(torch.stack([magnitude(part) for part in others]).amax())
    return [_clamped(parts, large[i], limit) if i in large else parts for i, parts in enumerate(wide)]


def without_large_elements(result: Parts, operands: Sequence[Any]) -> Parts:
    """Return a result's float64 components, those that are large brought nearer to the others if an operand is plain.

    Args:
        result: of an operator that writes at places.
        operands: all that it was given.
    """
    plain = [x for x in operands if _is_plain(x)]
    if not any(_may_hold(_stand_ins(x)) for x in plain) or not _may_hold(places := _is_large(result[0])):
        return result
    return _clamped(result, places, _limit(magnitude(torch.where(places, 0.0, result[0]))))


def saturated(result: Parts, name: str, operands: Sequence[Any]) -> Parts:
    """Return a result's float64 components, brought nearer to the others where plain operands make it large.

    Args:
        result: of an elementwise function.
        name: of the function: "div", a name of another with factors, "addcmul" for x + b c, "addcdiv" for x + b / c.
        operands: x, and one other, or b, c and a number.
    """
    if name in ("addcmul", "addcdiv") and not any(isinstance(x, MCTensor) for x in operands[1:]):
        first, second, *factors = (x.double() if isinstance(x, Tensor) else float(x) for x in operands[1:])
        product = first / second if name == "addcdiv" else first * second
        for factor in factors:
            product = product * factor
        large = [_stand_ins(product) if isinstance(product, Tensor) and product.dim() else None]
    else:
        large = [_leads_to_large(x, name) for x in operands if _is_plain(x)]
    places = [place for place in large if place is not None and _may_hold(place)]
    if not places or result[0].shape != torch.broadcast_shapes(result[0].shape, *(p.shape for p in places)):
        return result
    found = places[0]
    for place in places[1:]:
        found = found | place
    found = found.expand(result[0].shape)
    return _clamped(result, found, _limit(magnitude(torch.where(found, 0.0, result[0]))))


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, MCTensor) and x.is_floating_point()


def _leads_to_large(x: Tensor, name: str) -> Tensor | None:
    if not x.dim():
        return None
    return _stand_ins(torch.where(x == 0, 0.0, x.reciprocal()) if name == "div" else x, among_zeros=name != "mul")


def _stand_ins(x: Tensor, among_zeros: bool = True) -> Tensor:
    large = _is_large(x)
    return stand_ins(x, STAND_IN, among_zeros) if _may_hold(large) else large


def _is_large(x: Tensor) -> Tensor:
    return (x.abs() >= STAND_IN) & x.isfinite()


def _may_hold(places: Tensor) -> bool:
    return type(places) is not Tensor or places.device.type != "cpu" or bool(places.any())


def _limit(largest: Tensor) -> Tensor:
    """Return what large elements are brought to beside others of this magnitude; infinity beside zeros."""
    return torch.where(largest == 0, torch.inf, (largest * _TIMES).clamp(min=_LEAST))


def _clamped(parts: Parts, places: Tensor, limit: Tensor) -> Parts:
    beyond = places & (parts[0].abs() > limit)
    first = torch.where(beyond, limit.copysign(parts[0]), parts[0])
    return (first, *(torch.where(beyond, 0.0, part) for part in parts[1:]))
