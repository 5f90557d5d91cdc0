"""MCTensors in decimal, with the digits that their components hold."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic import PRECISION
from ._scale import decoded

if TYPE_CHECKING:
    from ._mctensor import MCTensor

_EDGE, _MOST = 3, 1000


def held_digits(x: MCTensor) -> int:
    """How many decimal digits the components hold."""
    return int(len(x._parts) * PRECISION[x.dtype] * math.log10(2))


def exact(x: MCTensor) -> list[Fraction | float]:
    """Every element's exact value, flattened; infinities and NaN as floats."""
    scale = Fraction(1) if x._scale is None else Fraction(float(x._scale))
    columns = [part.detach().double().reshape(-1).tolist() for part in x._parts]
    return [_value(row, scale) for row in zip(*columns, strict=True)]


def strings(x: MCTensor, digits: int | None = None) -> str | list:
    """Nested lists of decimal strings."""
    if digits is not None and digits < 1:
        raise ValueError(f"digits={digits}: allowed are 1 and more")
    flat = [decimal(value, digits or held_digits(x)) for value in exact(x)]
    return _nested(flat, list(x.shape))


def representation(x: MCTensor) -> str:
    """What repr prints: values, component count, dtype, and whatever a torch tensor would say."""
    said = [f"components={len(x._parts)}", f"dtype={x.dtype}"]
    if x._scale is not None and type(x._scale) is Tensor and x._scale.device.type != "meta":
        said.append(f"scale=2**{math.frexp(float(x._scale))[1] - 1}")
    if x.device.type != torch._C._get_default_device():
        said.append(f"device='{x.device}'")
    if x._gradients != "first":
        said.append(f"gradients='{x._gradients}'")
    if x.grad_fn is not None:
        said.append(f"grad_fn=<{x.grad_fn.name()}>")
    elif x.requires_grad:
        said.append("requires_grad=True")
    head = "Parameter containing:\n" if getattr(x, "_is_param", False) else ""
    return f"{head}MCTensor({_body(x)}, {', '.join(said)})"


def decimal(value: Fraction | float, digits: int) -> str:
    """A number in decimal, rounded to so many significant digits.

    >>> decimal(Fraction(1, 3), 5), decimal(Fraction(-12345678, 1), 3)
    ('0.33333', '-1.23e+7')
    """
    if isinstance(value, float):
        return repr(value) if value else "-0." if math.copysign(1, value) < 0 else "0."
    context = Context(prec=digits, Emax=10**6, Emin=-(10**6))
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    exponent = rounded.adjusted()
    if -5 <= exponent < min(digits, 16):
        return format(rounded, f".{max(digits - 1 - exponent, 0)}f")
    return format(rounded, f".{digits - 1}e")


def _value(row: tuple[float, ...], scale: Fraction) -> Fraction | float:
    if not math.isfinite(row[0]) or row[0] == 0:
        return row[0]
    return sum(map(Fraction, row), Fraction(0)) * scale


def _body(x: MCTensor) -> str:
    if type(x._parts[0]) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta":
        return f"..., size={tuple(x.shape)}"
    if not x.numel():
        return f"[], size={tuple(x.shape)}"
    kept = _summarized(x.detach()) if x.numel() > _MOST else x.detach()
    flat = [decimal(value, held_digits(x)) for value in exact(kept)]
    width = max(map(len, flat))
    return _brackets([text.rjust(width) for text in flat], list(kept.shape), list(x.shape), len("MCTensor("))


def _summarized(x: MCTensor) -> MCTensor:
    for dim, size in enumerate(x.shape):
        if size > 2 * _EDGE:
            x = torch.cat([x.narrow(dim, 0, _EDGE), x.narrow(dim, size - _EDGE, _EDGE)], dim)
    return x


def _brackets(flat: list[str], shape: list[int], full: list[int], indent: int) -> str:
    if not shape:
        return flat[0].strip()
    step = len(flat) // shape[0]
    rows = [_brackets(flat[i * step : i * step + step], shape[1:], full[1:], indent + 1) for i in range(shape[0])]
    if shape[0] != full[0]:
        rows.insert(_EDGE, "...")
    gap = ", " if len(shape) == 1 else "," + "\n" * (len(shape) - 1) + " " * (indent + 1)
    return f"[{gap.join(rows)}]"


def _nested(flat: list[str], shape: list[int]) -> str | list:
    if not shape:
        return flat[0]
    step = len(flat) // shape[0] if shape[0] else 0
    return [_nested(flat[i * step : i * step + step], shape[1:]) for i in range(shape[0])]


def as_float(x: MCTensor) -> float:
    """The one element's value, rounded to float64."""
    return decoded(x, torch.float64).item()
