"""halfulp formats: the number formats."""

from .._output import Json, format_cell, make_console, make_plain_table, print_json

_COLUMNS = {
    "name": "name",
    "bits": "bits",
    "exponent_bits": "exp",
    "mantissa_bits": "man",
    "max": "largest",
    "smallest_normal": "normal",
    "smallest_subnormal": "subnormal",
    "eps": "eps",
    "binades": "powers of two",
    "infinities": "inf",
    "nan": "nan",
    "overflow": "overflow",
    "torch_dtype": "torch",
}
_WORDS = ("name", "nan", "overflow", "torch_dtype")
_ONLY_WHERE_WIDE = ("nan", "overflow", "torch_dtype", "infinities")


def formats(json: Json = False) -> None:
    """Print the number formats as a table."""
    from ...formats import block_rows, rows

    if json:
        print_json({"formats": rows(), "block_formats": block_rows()})
        return
    shown = make_console()
    fields = [field for field in _COLUMNS if shown.width >= 130 or field not in _ONLY_WHERE_WIDE]
    right = [_COLUMNS[field] for field in fields if field not in _WORDS]
    table = make_plain_table([_COLUMNS[field] for field in fields], right=right, gap=1)
    for row in rows():
        table.add_row(*(format_cell(row[field]) for field in fields))
    shown.print(table)
