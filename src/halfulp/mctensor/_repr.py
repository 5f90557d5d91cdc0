"""MCTensors in decimal, with the digits that their components hold."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import PRECISION, Parts

_EDGE, _MOST = 3, 1000


def held_digits(parts: Parts) -> int:
    """Return how many decimal digits the components hold."""
    return int(len(parts) * PRECISION[parts[0].dtype] * math.log10(2))


def exact_values(parts: Parts, scale: Tensor | None) -> list[Fraction | float]:
    """Return every element's exact value, flattened; infinities and NaN as floats."""
    factor = Fraction(1) if scale is None else Fraction(float(scale))
    columns = [part.detach().double().reshape(-1).tolist() for part in parts]
    return [_value(row, factor) for row in zip(*columns, strict=True)]


def strings(parts: Parts, scale: Tensor | None, digits: int | None = None) -> str | list[Any]:
    """Return the values as nested lists of decimal strings."""
    if digits is not None and digits < 1:
        raise ValueError(f"digits={digits}: allowed are 1 and more")
    flat = [decimal(value, digits or held_digits(parts)) for value in exact_values(parts, scale)]
    return _nest(flat, list(parts[0].shape))


def representation(x: Tensor, parts: Parts, scale: Tensor | None, gradients: str) -> str:
    """Return the repr of an MCTensor x: values, component count, dtype, and what torch prints of a plain tensor."""
    said = [f"components={len(parts)}", f"dtype={x.dtype}"]
    if scale is not None and type(scale) is Tensor and scale.device.type != "meta":
        said.append(f"scale=2**{math.frexp(float(scale))[1] - 1}")
    if x.device.type != torch._C._get_default_device():
        said.append(f"device='{x.device}'")
    if gradients != "first":
        said.append(f"gradients='{gradients}'")
    if x.grad_fn is not None:
        said.append(f"grad_fn=<{x.grad_fn.name()}>")
    elif x.requires_grad:
        said.append("requires_grad=True")
    head = "Parameter containing:\n" if getattr(x, "_is_param", False) else ""
    return f"{head}MCTensor({_body(parts, scale)}, {', '.join(said)})"


def decimal(value: Fraction | float, digits: int) -> str:
    """Return a number in decimal, rounded to so many significant digits.

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


def _body(parts: Parts, scale: Tensor | None) -> str:
    first = parts[0]
    if type(first) not in (Tensor, torch.nn.Parameter) or first.device.type == "meta":
        return f"..., size={tuple(first.shape)}"
    if not first.numel():
        return f"[], size={tuple(first.shape)}"
    shown = tuple(map(_printed_elements, parts)) if first.numel() > _MOST else parts
    flat = [decimal(value, held_digits(parts)) for value in exact_values(shown, scale)]
    width = max(map(len, flat))
    return _brackets([text.rjust(width) for text in flat], list(shown[0].shape), list(first.shape), len("MCTensor("))


def _printed_elements(x: Tensor) -> Tensor:
    """Return the elements that are printed: along each long dimension the first and the last ones."""
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


def _nest(flat: list[str], shape: list[int]) -> str | list[Any]:
    if not shape:
        return flat[0]
    step = len(flat) // shape[0] if shape[0] else 0
    return [_nest(flat[i * step : i * step + step], shape[1:]) for i in range(shape[0])]
