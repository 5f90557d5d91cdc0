"""Numbers, strings and tensors as components, with every digit that fits, and MCTensors in decimal."""

from __future__ import annotations

import math
import struct
from decimal import Context, Decimal
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._messages import name_type
from ..arithmetic import MAX_COMPONENTS, PRECISION_BY_DTYPE, Parts, merge, pointwise, renormalize
from ..arithmetic._pointwise import round_under_scale
from ..kernels import require_float64, to_plain_memory_unless_traced

_FLOAT32_STRUCT = struct.Struct("f")


def encode_into_components(
    x: Any, components: int, dtype: torch.dtype | None, scale: Any, device: Any
) -> tuple[Parts, Tensor | None]:
    """Return the components and the scale of `MCTensor.encode`."""
    check_component_count(components)
    if device is not None or isinstance(x, Tensor):
        require_float64(torch.device(x.device if device is None else device), "MCTensors")
    wide, own = _convert_to_components(x, device)
    dtype = check_dtype(dtype or own)
    held = _make_requested_scale(scale, wide[0], dtype)
    if held is None:
        parts = tuple(part.clone() for part in wide) if wide[0].dtype == dtype and len(wide) == components else None
        parts = parts or renormalize(wide, components, dtype)
    else:
        parts = divide_by_scale(tuple(part.double() for part in wide), held, components, dtype)
    refuse_overflow(wide[0], parts[0], dtype)
    return tuple(part.contiguous() for part in parts), held


def canonicalize_components(components: Any, scale: Any) -> tuple[Parts, Tensor | None]:
    """Return the components and the scale of `MCTensor.from_components`."""
    tensors = tuple(components)
    check_component_count(len(tensors))
    for part in tensors:
        if not isinstance(part, Tensor):
            raise TypeError(f"components are plain tensors, got {name_type(part)}: use MCTensor.encode")
        check_dtype(part.dtype)
        require_float64(part.device, "MCTensors")
    kinds = {part.dtype for part in tensors}
    if len(kinds) > 1:
        raise ValueError(f"components of several dtypes, {' and '.join(sorted(map(str, kinds)))}: convert them to one")
    tensors = torch.broadcast_tensors(
        *(to_plain_memory_unless_traced(part.detach(), "a component") for part in tensors)
    )
    parts: Parts = tensors[:1]
    for part in tensors[1:]:
        parts = pointwise("add", parts, (part,), components=MAX_COMPONENTS, dtype=part.dtype)
    parts = renormalize(parts, len(tensors), tensors[0].dtype)
    if not _is_fake_or_meta(parts[0]) and bool((parts[0].isinf() & torch.stack(tensors).isfinite().all(0)).any()):
        raise ValueError(f"the sum of these components is out of {tensors[0].dtype}'s range: scale them down")
    return parts, None if scale is None or isinstance(scale, str) else make_scale(scale, parts[0].device)


def check_component_count(components: int) -> None:
    """Raise unless this is a number of components."""
    if isinstance(components, bool) or not isinstance(components, int) or not 1 <= components <= MAX_COMPONENTS:
        raise ValueError(f"components={components!r}: allowed are 1 to {MAX_COMPONENTS}")


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Raise unless components can have this dtype."""
    if dtype not in PRECISION_BY_DTYPE:
        raise ValueError(
            f"{dtype} data: components are float16, bfloat16, float32 or float64. Convert integers with x.double() "
            "(exact up to 2**53) or give the numbers as a list; keep the real and the imaginary part of complex data "
            "as two tensors"
        )
    return dtype


def refuse_overflow(value: Tensor, payload: Tensor, dtype: torch.dtype) -> None:
    """Raise if a finite value became infinite in its components."""
    if _is_fake_or_meta(value) or not value.numel() or bool(payload.isfinite().all()):
        return
    lost = payload.isinf() & value.isfinite()
    if bool(lost.any()):
        largest, end = float(value[lost].abs().max()), torch.finfo(dtype).max
        raise ValueError(
            f"{dtype} ends at {end:.6g} and a value is {largest:.6g}: give scale='auto' or "
            f"scale=2.0**{math.frexp(largest)[1] - math.frexp(end)[1] + 4}, or wider components"
        )


def split_integers_into_float64(x: Tensor) -> Parts:
    """Return an integer or boolean tensor exactly, as one or two float64 tensors."""
    if x.dtype.itemsize < 8:
        return (x.double(),)
    low = x & 0xFFFFFFFF
    return renormalize(((x - low).double(), low.double()), 2, torch.float64)


def split_number_into_float64(x: Any, device: torch.device) -> Parts:
    """Return a Python number as 0-d float64 tensors: one, or several for a large integer."""
    if isinstance(x, complex):
        raise ValueError(f"{x!r} is complex, an MCTensor is real: keep the real and the imaginary part as two tensors")
    if type(x) is int and abs(x) > 2**53:
        return tuple(torch.tensor(part, dtype=torch.float64, device=device) for part in _split_exact_value(Fraction(x)))
    return (torch.scalar_tensor(x, dtype=torch.float64, device=device),)


def split_number_into_float32(x: Any, device: torch.device, is_factor: bool) -> Parts | None:
    """Return a Python number as one or two 0-d float32 tensors, or None where they do not hold it."""
    # A factor may lose 2^-49 of itself, which is within a product's bound; a term of a sum may not.
    # Between these, a float32 and what it leaves are both in float32's normal range.
    if type(x) not in (int, float) or not (x == 0 or 2.0**-70 < abs(x) < 2.0**100):
        return None
    first = _round_to_float32(x)
    rest = x - first
    second = _round_to_float32(rest)
    if second != rest and not is_factor:
        return None
    terms = (first, second) if rest else (first,)
    return tuple(torch.scalar_tensor(term, dtype=torch.float32, device=device) for term in terms)


def _round_to_float32(x: float) -> float:
    return _FLOAT32_STRUCT.unpack(_FLOAT32_STRUCT.pack(x))[0]


def _make_requested_scale(scale: Any, value: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the scale tensor that `scale` asks for, measured where it is "auto"; None for no scale."""
    if scale is None:
        scale = "auto" if dtype == torch.float16 else "none"
    if not isinstance(scale, str):
        return make_scale(scale, value.device)
    if scale not in ("auto", "none"):
        raise ValueError(f"scale={scale!r}: allowed are a power of two, 'auto', 'none' and None")
    return choose_scale(find_largest_finite_magnitude(value), dtype) if scale == "auto" else None


def _convert_to_components(x: Any, device: Any) -> tuple[Parts, torch.dtype]:
    """Return any input as components of some dtype, and the default dtype of its encoding."""
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "O":
            return _convert_numbers_to_components(x.tolist(), device)
        x = torch.from_numpy(x) if x.flags.writeable else torch.from_numpy(x.copy())
    if not isinstance(x, Tensor):
        return _convert_numbers_to_components(x, device)
    x = x if device is None else x.to(device)
    if hasattr(x, "_parts"):
        return (x._parts if x._scale is None else convert_components_to_float64(x._parts, x._scale)), x.dtype
    if hasattr(x, "decode"):
        x = x.decode()
    return (to_plain_memory_unless_traced(x.detach(), "x"),), check_dtype(x.dtype)


def _convert_numbers_to_components(x: Any, device: Any) -> tuple[Parts, torch.dtype]:
    flat: list = []
    shape = _flatten_lists(x, flat)
    rows = [_split_exact_value(_convert_to_exact_value(value)) for value in flat]
    parts = torch.tensor(rows, dtype=torch.float64, device=device).reshape(-1, MAX_COMPONENTS)
    used = max(1, int((parts != 0).any(0).nonzero().max()) + 1) if parts.numel() and bool(parts.any()) else 1
    return tuple(parts[:, i].reshape(shape).contiguous() for i in range(used)), torch.get_default_dtype()


def _flatten_lists(x: Any, flat: list) -> tuple[int, ...]:
    """Append all leaves of nested lists to `flat`; return the shape of the nesting."""
    if not isinstance(x, (list, tuple)):
        flat.append(x)
        return ()
    shapes = {_flatten_lists(value, flat) for value in x}
    if len(shapes) > 1:
        raise ValueError("nested lists of different lengths have no shape")
    return (len(x), *(shapes.pop() if shapes else ()))


def _convert_to_exact_value(value: Any) -> Fraction | float:
    """Return a number's exact value; infinities and NaN as floats."""
    if isinstance(value, str):
        return _parse_number(value)
    if hasattr(value, "_mpf_"):
        sign, mantissa, exponent, _ = value._mpf_
        if mantissa == 0 and exponent:
            return float(value)
        return (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    if isinstance(value, Tensor) and value.dim() == 0:
        parts, _ = _convert_to_components(value.detach(), None)
        first = float(parts[0])
        return sum((Fraction(float(part)) for part in parts[1:]), Fraction(first)) if math.isfinite(first) else first
    if isinstance(value, (complex, np.complexfloating)):
        raise ValueError(f"{value!r} is complex: keep the real and the imaginary part as two tensors")
    if isinstance(value, (float, np.floating, Decimal)) and not math.isfinite(value):
        return float(value)
    if isinstance(value, float) and value == 0:
        return value
    if isinstance(value, np.integer):
        return Fraction(int(value))
    if isinstance(value, (int, float, Rational, Decimal)):
        return Fraction(value)
    if isinstance(value, np.floating):
        return Fraction(*value.as_integer_ratio())
    raise TypeError(
        f"an MCTensor of {name_type(value)}: allowed are tensors, numbers, strings, Fractions and mpmath numbers"
    )


def _parse_number(text: str) -> Fraction | float:
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by zero") from None
    except ValueError:
        pass
    try:
        return float(text)  # of infinities and NaN alone: all others are Fractions
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def _split_exact_value(value: Fraction | float) -> list[float]:
    """Return a number as four float64, each the nearest to what is left."""
    if isinstance(value, float):
        return [value] + [0.0] * (MAX_COMPONENTS - 1)
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    terms: list[float] = []
    for _ in range(MAX_COMPONENTS):
        try:
            term = float(value)
        except OverflowError:
            raise ValueError(f"a value of about 2**{exponent} is out of float64's range: divide it first") from None
        if term == 0 and value != 0 and not terms:
            raise ValueError(f"a value of about 2**{exponent} is below float64's range: multiply it first")
        terms.append(term)
        value -= Fraction(term)
    return terms


def _is_fake_or_meta(x: Tensor) -> bool:
    """Return whether a tensor has no values to check: while a compiler traces, or on the meta device."""
    return type(x) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta"


# A payload's largest magnitude lies in [2^(top - HEADROOM - 1), 2^(top - HEADROOM)): writes in place may grow by 16.
HEADROOM_BINADES = 4
OVERFLOW_EXPONENT_BY_DTYPE = {torch.float16: 16, torch.bfloat16: 128, torch.float32: 128, torch.float64: 1024}
_FLOAT32_BIAS = 127


def convert_components_to_float64(parts: Parts, scale: Tensor | None) -> Parts:
    """Return scaled components as float64 ones without a scale: one for float16, else as many as there are."""
    if parts[0].dtype == torch.float16:
        value = merge(parts, torch.float64)
        return (value if scale is None else value * scale,)
    wide = tuple(part.double() for part in parts)
    return wide if scale is None else tuple(part * scale for part in wide)


def find_largest_finite_magnitude(x: Tensor) -> Tensor:
    """Return the largest finite magnitude as a 0-d tensor; 0 without elements."""
    if not x.numel():
        return x.new_zeros(())
    return x.abs().nan_to_num_(0.0, 0.0, 0.0).amax()


def choose_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two by which values of this largest magnitude fill a dtype up to HEADROOM binades."""
    # In float64: a product of scaled values may be out of float32's range where its payload is not.
    exponent = (largest.double().view(torch.int64) >> 52) - (
        1023 - _FLOAT32_BIAS + min(OVERFLOW_EXPONENT_BY_DTYPE[dtype], 128) - HEADROOM_BINADES - 1
    )
    exponent = torch.where(largest == 0, _FLOAT32_BIAS, exponent.clamp(1, 2 * _FLOAT32_BIAS))
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def divide_by_scale(
    wide: Parts, scale: Tensor, components: int, dtype: torch.dtype, keeps_nonzero: bool = False
) -> Parts:
    """Return components whose sum times the scale is the value of float64 components."""
    # keeps_nonzero: whether none is 0 where the value is not, so that what is divided by a sum stays finite.
    if type(scale) is Tensor and type(wide[0]) is Tensor and not torch.compiler.is_compiling():
        return round_under_scale(wide, scale, components, dtype, keeps_nonzero)
    parts = renormalize(tuple(part / scale for part in wide), components, dtype)
    if not keeps_nonzero:
        return parts
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    vanished = (parts[0] == 0) & (wide[0] != 0)
    smallest = torch.full_like(parts[0], least).copysign(wide[0].to(dtype))
    return (torch.where(vanished, smallest, parts[0]), *parts[1:])


def make_scale(scale: Tensor | float, device: torch.device) -> Tensor:
    """Return a scale, a power of two in float32's normal range, as a 0-d float32 tensor."""
    value = float(scale)
    if value <= 0 or not math.isfinite(value) or math.frexp(value)[0] != 0.5 or not 2.0**-126 <= value <= 2.0**127:
        raise ValueError(f"scale={value!r}: allowed are powers of two from 2**-126 to 2**127, 'auto', 'none' and None")
    return torch.tensor(value, dtype=torch.float32, device=device)


def compute_exact_values(parts: Parts, scale: Tensor | None) -> list[Fraction | float]:
    """Return every element's exact value, flattened; infinities and NaN as floats."""
    columns = [part.detach().double().reshape(-1).tolist() for part in parts]
    factor = Fraction(1) if scale is None else Fraction(float(scale))
    rows = zip(*columns, strict=True)
    return [
        sum(map(Fraction, row), Fraction(0)) * factor if math.isfinite(row[0]) and row[0] else row[0] for row in rows
    ]


def format_values(parts: Parts, scale: Tensor | None, digits: int | None = None) -> str | list[Any]:
    """Return the values as nested lists of decimal strings."""
    if digits is not None and digits < 1:
        raise ValueError(f"digits={digits}: allowed are 1 and more")
    digits = digits or int(len(parts) * PRECISION_BY_DTYPE[parts[0].dtype] * math.log10(2))  # that components hold
    flat = [format_decimal(value, digits) for value in compute_exact_values(parts, scale)]
    nested: str | list[Any] = np.array(flat, dtype=object).reshape(parts[0].shape).tolist()
    return nested


def format_tensor(x: Tensor, parts: Parts, scale: Tensor | None, gradients: str) -> str:
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
    return f"{head}MCTensor({_format_elements(parts, scale)}, {', '.join(said)})"


def format_decimal(value: Fraction | float, digits: int) -> str:
    """Return a number in decimal, rounded to so many significant digits.

    >>> format_decimal(Fraction(1, 3), 5), format_decimal(Fraction(-12345678, 1), 3)
    ('0.33333', '-1.23e+7')
    """
    if isinstance(value, float):
        return repr(value) if value else "-0." if math.copysign(1, value) < 0 else "0."
    context = Context(prec=digits)
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    exponent = rounded.adjusted()
    if -5 <= exponent < min(digits, 16):
        return format(rounded, f".{max(digits - 1 - exponent, 0)}f")
    return format(rounded, f".{digits - 1}e")


def _format_elements(parts: Parts, scale: Tensor | None) -> str:
    first = parts[0]
    if type(first) not in (Tensor, torch.nn.Parameter) or first.device.type == "meta":
        return f"..., size={tuple(first.shape)}"
    if not first.numel():
        return f"[], size={tuple(first.shape)}"
    threshold, parts = 1000, tuple(part.detach() for part in parts)
    if first.numel() > threshold:  # of a long dimension numpy shows three elements at each end and none between
        for dim, size in enumerate(first.shape):
            if size > 7:
                parts = tuple(torch.cat([part.narrow(dim, 0, 4), part.narrow(dim, size - 3, 3)], dim) for part in parts)
        threshold = 0
    texts: Any = np.array(format_values(parts, scale), dtype=object)
    formatter: Any = {"object": str}
    return np.array2string(
        texts, 100, separator=", ", prefix="MCTensor(", formatter=formatter, threshold=threshold, edgeitems=3
    )
