"""The catalogue as rows of plain data, for a table or JSON."""

from typing import Any

from ._block import BLOCKS
from ._catalog import CATALOG


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
        for format in BLOCKS.values()
    ]
