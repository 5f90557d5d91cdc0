"""halfulp formats, recipes, tasks and env: what there is."""

from typing import Any

from ._conventions import JsonOption, print_table
from ._errors import print_json

_FORMAT_TABLE_HEADER_BY_FIELD = {
    "name": "name",
    "bits": "bits",
    "exponent_bits": "exp",
    "mantissa_bits": "man",
    "max": "largest",
    "smallest_normal": "normal",
    "smallest_subnormal": "subnormal",
    "eps": "eps",
    "infinities": "inf",
    "nan": "nan",
    "torch_dtype": "torch",
}


def formats(json: JsonOption = False) -> None:
    """Print the number formats as a table."""
    from ..formats import block_rows, rows

    if json:
        print_json({"formats": rows(), "block_formats": block_rows()})
    else:
        cells = [[row[field] for field in _FORMAT_TABLE_HEADER_BY_FIELD] for row in rows()]
        print_table(list(_FORMAT_TABLE_HEADER_BY_FIELD.values()), cells, cut=8)


def recipes(json: JsonOption = False) -> None:
    """Print the recipes: what is kept in which format, and how weights are updated."""
    from ..recipes import get, names

    found = [get(name) for name in names()]
    if json:
        print_json([recipe.to_dict() for recipe in found])
    else:
        print_table(["recipe", "what it does"], [[recipe.name, recipe.description] for recipe in found])


def tasks(json: JsonOption = False) -> None:
    """Print the tasks that recipes can be compared on."""
    from ..trials.tasks import find_task_class, names
    from ..trials.tasks._registry import has_data_folder_field

    fields = ("name", "title", "steps", "judged_by")
    rows: list[dict[str, Any]] = [
        {**{field: getattr(kind, field) for field in fields}, "needs_data": has_data_folder_field(kind)}
        for kind in map(find_task_class, names())
    ]
    if json:
        print_json(rows)
        return
    cells = [
        [
            *(row["name"], row["title"], row["steps"], row["judged_by"].replace("_", " ")),
            "--data DIR" if row["needs_data"] else "embedded",
        ]
        for row in rows
    ]
    print_table(["task", "what it is", "steps", "judged by", "data"], cells)


def env(json: JsonOption = False) -> None:
    """Print what a bug report needs: versions, processor and its instructions, engines, cache, devices, variables."""
    from ..environment import describe_environment, list_environment_lines

    found = describe_environment()
    if json:
        print_json(found)
    else:
        print_table(["what", "here"], list(list_environment_lines(found)))
