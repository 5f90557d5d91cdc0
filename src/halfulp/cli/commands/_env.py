"""halfulp env: versions, processor and settings for a bug report."""

from .._output import Json, console, plain_table, print_json


def env(json: Json = False) -> None:
    """Print what a bug report needs: versions, processor and its instructions, engines, cache, devices, variables."""
    from ...environment import describe, lines

    found = describe()
    if json:
        print_json(found)
        return
    table = plain_table(["what", "here"], fold=["here"])
    for what, here in lines(found):
        table.add_row(what, here)
    console().print(table, markup=False)
