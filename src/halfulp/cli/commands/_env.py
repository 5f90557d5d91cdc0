"""halfulp env: versions, processor and settings for a bug report."""

from .._output import Json, make_console, make_plain_table, print_json


def env(json: Json = False) -> None:
    """Print what a bug report needs: versions, processor and its instructions, engines, cache, devices, variables."""
    from ...environment import describe, lines

    found = describe()
    if json:
        print_json(found)
        return
    table = make_plain_table(["what", "here"], fold=["here"])
    for what, here in lines(found):
        table.add_row(what, here)
    make_console().print(table, markup=False)
