"""halfulp formats, recipes, tasks and env: what there is."""

from collections.abc import Sequence
from typing import Any

from .._messages import align_columns
from ._conventions import JsonOption
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
    "infinities": "inf",
    "nan": "nan",
    "torch_dtype": "torch",
}


def _print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = ([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)
    print("\n".join(align_columns([headers, *cells])))


def formats(json: JsonOption = False) -> None:
    """Print the number formats as a table."""
    from ..formats import block_rows, rows

    if json:
        print_json({"formats": rows(), "block_formats": block_rows()})
    else:
        _print_table(list(_FORMAT_COLUMNS.values()), [[row[field] for field in _FORMAT_COLUMNS] for row in rows()])


def recipes(json: JsonOption = False) -> None:
    """Print the recipes: what is kept in which format, and how weights are updated."""
    from ..recipes import get, names

    found = [get(name) for name in names()]
    if json:
        print_json([recipe.to_dict() for recipe in found])
    else:
        _print_table(["recipe", "what it does"], [[recipe.name, recipe.description] for recipe in found])


def tasks(json: JsonOption = False) -> None:
    """Print the tasks that recipes can be compared on."""
    from ..trials.tasks import kind_of, names
    from ..trials.tasks._registry import needs_data_folder

    fields = ("name", "title", "steps", "judged_by")
    rows: list[dict[str, Any]] = [
        {**{field: getattr(kind, field) for field in fields}, "needs_data": needs_data_folder(kind)}
        for kind in map(kind_of, names())
    ]
    if json:
        print_json(rows)
        return
    cells = [[*(row[field] for field in fields), "--data DIR" if row["needs_data"] else "embedded"] for row in rows]
    _print_table(["task", "what it is", "steps", "judged by", "data"], cells)


def env(json: JsonOption = False) -> None:
    """Print what a bug report needs: versions, processor and its instructions, engines, cache, devices, variables."""
    from ..environment import describe_environment, list_environment_lines

    found = describe_environment()
    if json:
        print_json(found)
    else:
        _print_table(["what", "here"], list(list_environment_lines(found)))
