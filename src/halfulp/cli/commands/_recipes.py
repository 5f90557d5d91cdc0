"""halfulp recipes: the named recipes."""

from .._output import Json, console, plain_table, print_json


def recipes(json: Json = False) -> None:
    """Print the recipes: what is kept in which format, and how weights are updated."""
    from ...recipes import get, names

    found = [get(name) for name in names()]
    if json:
        print_json([recipe.to_dict() for recipe in found])
        return
    table = plain_table(["recipe", "what it does"], fold=["what it does"])
    for recipe in found:
        table.add_row(recipe.name, recipe.description)
    console().print(table)
