"""The formats that have a name, and the way from a name or a dtype to a format."""

from __future__ import annotations

import difflib
import re
from functools import partial
from typing import TYPE_CHECKING

from ._format import Format

if TYPE_CHECKING:
    import torch

fp64: Format = Format("fp64", 11, 52)
fp32: Format = Format("fp32", 8, 23)
tf32: Format = Format("tf32", 8, 10)
fp16: Format = Format("fp16", 5, 10)
bf16: Format = Format("bf16", 8, 7)

# The 14, 12 and 10 bits of "Revisiting BFloat16 Training" (arXiv 2010.06192): bfloat16's range, less precision.
e8m5: Format = Format("e8m5", 8, 5)
e8m3: Format = Format("e8m3", 8, 3)
e8m1: Format = Format("e8m1", 8, 1)

e5m2: Format = Format("e5m2", 5, 2)
e5m2fnuz: Format = Format("e5m2fnuz", 5, 2, infinities=False, nan="negative_zero")
e4m3: Format = Format("e4m3", 4, 3)
e4m3fn: Format = Format("e4m3fn", 4, 3, infinities=False, nan="all_ones")
e4m3fnuz: Format = Format("e4m3fnuz", 4, 3, infinities=False, nan="negative_zero")
e3m4: Format = Format("e3m4", 3, 4)
e3m2fn: Format = Format("e3m2fn", 3, 2, infinities=False, nan=None)
e2m3fn: Format = Format("e2m3fn", 2, 3, infinities=False, nan=None)
e2m1fn: Format = Format("e2m1fn", 2, 1, infinities=False, nan=None)
e8m0: Format = Format(
    "e8m0", 8, 0, infinities=False, nan="all_ones", subnormals=False, signed=False, zero=False, overflow="nan"
)

_FORMATS_FROM_8_BITS = (fp64, fp32, tf32, fp16, bf16, e8m5, e8m3, e8m1, e5m2, e5m2fnuz, e4m3, e4m3fn, e4m3fnuz, e3m4)
_CATALOGUE = (*_FORMATS_FROM_8_BITS, e3m2fn, e2m3fn, e2m1fn, e8m0)
FORMAT_BY_NAME = {format.name: format for format in _CATALOGUE}  # and those of one's own

_FORMAT_BY_ALIAS = {
    "double": fp64,
    "single": fp32,
    "float": fp32,
    "half": fp16,
    "brain": bf16,
    "tensorfloat32": tf32,
    "ue8m0": e8m0,
    "e8m0fnu": e8m0,
    **{name.replace("fp", "float"): FORMAT_BY_NAME[name] for name in ("fp64", "fp32", "fp16")},
    "bfloat16": bf16,
    **{f"float{format.bits}_{format.name}": format for format in FORMAT_BY_NAME.values() if format.bits <= 8},
    "float8_e8m0fnu": e8m0,
}
_FORMAT_BY_DTYPE_NAME = {
    format.torch_dtype_name: format for format in FORMAT_BY_NAME.values() if format.torch_dtype_name is not None
}
_LAYOUT_NAME_PATTERN = re.compile(r"e(\d+)m(\d+)(?:(?:b(\d+))?(fnuz))?")


def names() -> list[str]:
    """Return the names of the catalogue, the widest format first.

    >>> names()[:5]
    ['fp64', 'fp32', 'tf32', 'fp16', 'bf16']
    """
    return list(FORMAT_BY_NAME)


def get(format: Format | str | torch.dtype) -> Format:
    """Return the format that a name, a torch dtype or a format stands for.

    A name is one of `names()`, a dtype's name (``"bfloat16"``, ``"float8_e4m3fn"``), or ``eXmY`` with any X
    exponent and Y mantissa bits: an IEEE 754 layout with infinities, NaN and subnormals (``eXmYfnuz``: the layout
    without infinities and with NaN at negative zero).

    Raises:
        ValueError: If the name or dtype is not known; the message lists near ones.
        TypeError: If it is none of the three.

    >>> import torch
    >>> get("float8_e4m3fn").name, get(torch.bfloat16).name
    ('e4m3fn', 'bf16')
    >>> print(get("e5m7"))
    e5m7: 13 bits, max 65280, min normal 2^-14, eps 2^-7
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        import torch

        if not isinstance(format, torch.dtype):
            kind = type(format).__name__
            raise TypeError(f"a format is a hu.Format, a name such as 'bf16' or a torch.dtype; got {kind}")
        name = str(format).removeprefix("torch.")
        if name == "float4_e2m1fn_x2":  # packed, it stands for its element
            return e2m1fn
        if name not in _FORMAT_BY_DTYPE_NAME:
            known = ", ".join(_FORMAT_BY_DTYPE_NAME)
            raise ValueError(f"torch.{name} is no floating-point format; torch's dtypes that are: {known}")
        return _FORMAT_BY_DTYPE_NAME[name]
    key = format.strip().lower().removeprefix("torch.").replace("-", "_")
    if found := find_format(key):
        return found
    if key.startswith(("mx", "nvfp")):
        raise ValueError(f"{format!r} is no format of single numbers; block formats come from hu.formats.get_block")
    near = difflib.get_close_matches(key, [*FORMAT_BY_NAME, *_FORMAT_BY_ALIAS], n=4, cutoff=0.5)
    meant = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(
        f"unknown format {format!r}: {meant}Known are {', '.join(FORMAT_BY_NAME)}, torch's dtype names, and eXmY for "
        f'any IEEE layout; your own is hu.formats.register(hu.Format("mine", exponent_bits=4, mantissa_bits=4))'
    )


def get_signed(format: Format | str | torch.dtype) -> Format:
    """Return the format that a name, a torch dtype or a format stands for, of numbers that can be computed with.

    Raises:
        ValueError: If the format lacks negative numbers or zero, or the name or dtype is not known.
        TypeError: If it is none of the three.

    >>> get_signed("e8m0")
    Traceback (most recent call last):
        ...
    ValueError: e8m0 has no negative numbers and no zero, so nothing can be computed in it: take one with both
    """
    found = get(format)
    lacks = [what for what, has in (("negative numbers", found.signed), ("zero", found.zero)) if not has]
    if lacks:
        raise ValueError(
            f"{found.name} has no {' and no '.join(lacks)}, so nothing can be computed in it: take one with both"
        )
    return found


def find_format(key: str) -> Format | None:
    """Return the format that a name in lower case stands for, or None."""
    return FORMAT_BY_NAME.get(key) or _FORMAT_BY_ALIAS.get(key) or parse(key)


def parse(name: str) -> Format | None:
    """Return the format that ``eXmY`` or ``eXmYfnuz`` spells (a bias may stand before fnuz: e4m3b11fnuz), or None.

    A catalogued format of the same layout is returned under its own name.

    Raises:
        ValueError: If the widths are such that no format exists.

    >>> parse("e5m10").name, parse("e6m9").name, parse("e6m9").max, parse("e6x9")
    ('fp16', 'e6m9', 4290772992.0, None)
    """
    match = _LAYOUT_NAME_PATTERN.fullmatch(name)
    if match is None:
        return None
    exponent, mantissa, bias, fnuz = match.groups()
    layout = Format if bias is None else partial(Format, bias=int(bias))
    made = layout(name, int(exponent), int(mantissa), infinities=not fnuz, nan="negative_zero" if fnuz else "ieee")
    # Not one of somebody's own, whose overflow policy may be another.
    return next((known for known in _CATALOGUE if known.layout == made.layout), made)
