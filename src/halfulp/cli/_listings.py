"""halfulp formats, recipes, tasks and env: what there is."""

from .._messages import align_columns
from ._conventions import JsonOption, format_cell, make_console, make_plain_table
from ._errors import print_json

_FORMAT_COLUMNS = {
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
_TEXT_COLUMNS = ("name", "nan", "overflow", "torch_dtype")


def formats(json: JsonOption = False) -> None:
    """Print the number formats as a table."""
    from ..formats import block_rows, rows

    if json:
        print_json({"formats": rows(), "block_formats": block_rows()})
        return
    shown = make_console()
    fields = list(_FORMAT_COLUMNS)[: None if shown.width >= 130 else 9]  # the others on wide terminals alone
    right = [_FORMAT_COLUMNS[field] for field in fields if field not in _TEXT_COLUMNS]
    table = make_plain_table([_FORMAT_COLUMNS[field] for field in fields], right=right, gap=1)
    for row in rows():
        table.add_row(*(format_cell(row[field]) for field in fields))
    shown.print(table)


def recipes(json: JsonOption = False) -> None:
    """Print the recipes: what is kept in which format, and how weights are updated."""
    from ..recipes import get, names

    found = [get(name) for name in names()]
    if json:
        print_json([recipe.to_dict() for recipe in found])
        return
    table = make_plain_table(["recipe", "what it does"], fold=["what it does"])
    for recipe in found:
        table.add_row(recipe.name, recipe.description)
    make_console().print(table)


def tasks(json: JsonOption = False) -> None:
    """Print the tasks that recipes can be compared on."""
    from ..trials.tasks import kind_of, names
    from ..trials.tasks._registry import needs_data_folder

    rows = [
        {
            **{field: getattr(kind, field) for field in ("name", "title", "steps", "judged_by")},
            "needs_data": needs_data_folder(kind),
        }
        for kind in map(kind_of, names())
    ]
    if json:
        print_json(rows)
        return
    table = make_plain_table(["task", "what it is", "steps", "judged by", "data"], right=["steps"], fold=["what it is"])
    for row in rows:
        data = "--data DIR" if row["needs_data"] else "embedded"
        table.add_row(row["name"], row["title"], f"{row['steps']:,}", row["judged_by"].replace("_", " "), data)
    make_console().print(table)


def env(json: JsonOption = False) -> None:
    """Print what a bug report needs: versions, processor and its instructions, engines, cache, devices, variables."""
    from ..environment import describe_environment, list_environment_lines

    found = describe_environment()
    if json:
        print_json(found)
        return
    print("\n".join(align_columns(list(list_environment_lines(found)))))
