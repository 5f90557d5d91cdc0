"""Formats of one's own under a name that the whole library knows, and the catalogue as rows of plain data."""

from __future__ import annotations

from typing import Any, TypeVar

from .._names import enter
from ._block import BLOCK_FORMATS, BlockFormat
from ._catalog import CATALOG, find_format
from ._format import Format

AnyFormat = TypeVar("AnyFormat", Format, BlockFormat)


def register(format: AnyFormat) -> AnyFormat:
    """Make a format known by its name wherever a format's name is taken.

    Optimizers, recipes, `quantize`, `emulate`, the command line and files know it then as they know a catalogued one. A
    format need not be registered to be used: the object serves as well.

    Args:
        format: the format; its name is in lower case.

    Returns:
        The format.

    Raises:
        TypeError: it is no format.
        ValueError: the name stands for another format already, or is not in lower case.

    >>> register(Format("bfloat16", exponent_bits=4, mantissa_bits=5))
    Traceback (most recent call last):
    ...
    ValueError: the name 'bfloat16' stands for bf16 already: choose another name
    """
    if not isinstance(format, Format | BlockFormat):
        raise TypeError(f"a format is a hu.Format or a hu.BlockFormat; got {type(format).__name__}")
    registry: dict[str, Any] = CATALOG if isinstance(format, Format) else BLOCK_FORMATS
    if format.name != format.name.lower().replace("-", "_"):
        raise ValueError(f"a format is looked up in lower case and with _ for -: name it so, not {format.name!r}")
    known = find_format(format.name) or BLOCK_FORMATS.get(format.name)
    if known is not None and known != format and registry.get(format.name) != format:
        raise ValueError(f"the name {format.name!r} stands for {known.name} already: choose another name")
    enter("format", registry, format.name, format, str(format))
    return format


def rows() -> list[dict[str, Any]]:
    """Return one dict of plain values per format: its fields, its derived properties, and its dtype's names.

    >>> row = rows()[3]
    >>> row["name"], row["bits"], row["max"], row["binades"], row["torch_dtype"]
    ('fp16', 16, 65504.0, 40, 'float16')
    """
    fields: tuple[str, ...] = ("name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "min")
    fields += ("smallest_normal", "smallest_subnormal", "eps", "emax", "emin", "binades")
    fields += ("infinities", "nan", "subnormals", "signed", "signed_zero", "zero", "overflow")
    return [
        {field: getattr(format, field) for field in fields}
        | {
            "torch_dtype": format.torch_dtype_name,
            "ml_dtypes_name": format.ml_dtypes_name,
        }
        for format in CATALOG.values()
    ]


def block_rows() -> list[dict[str, Any]]:
    """Return one dict of plain values per block format.

    >>> block_rows()[-1]
    {'name': 'nvfp4', 'element': 'e2m1fn', 'scale': 'e4m3fn', 'block': 16, 'tensor_scale': True,
     'scale_rounding': 'nearest', 'bits_per_value': 4.5}
    """
    return [
        {
            "name": format.name,
            "element": format.element.name,
            "scale": format.scale.name,
            "block": format.block,
            "tensor_scale": format.tensor_scale,
            "scale_rounding": format.scale_rounding,
            "bits_per_value": format.bits_per_value,
        }
        for format in BLOCK_FORMATS.values()
    ]
