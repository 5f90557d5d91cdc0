"""halfulp recipes: the named recipes."""

from .._output import Json, make_console, make_plain_table, print_json


def recipes(json: Json = False) -> None:
    """Print the recipes: what is kept in which format, and how weights are updated."""
    from ...recipes import get, names

    found = [get(name) for name in names()]
    if json:
        print_json([recipe.to_dict() for recipe in found])
        return
    table = make_plain_table(["recipe", "what it does"], fold=["what it does"])
    for recipe in found:
        table.add_row(recipe.name, recipe.description)
    make_console().print(table)
