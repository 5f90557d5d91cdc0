"""halfulp compare SCRIPT.py: a user's training script under several recipes."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..pages import check_writable, write_whole
from ._errors import fail, writing
from ._output import cell, console, plain_table, print_json

_FILE = "compare-script.json"


def compare_script(
    script: str, arguments: list[str], recipes: Sequence[str], unused: Mapping[str, Any], out: str, as_json: bool
) -> None:
    """Run it, print a table or JSON, and write compare-script.json."""
    from ..trials.script import compare_script as compare

    given = [option for option, value in unused.items() if value is not None]
    if given:
        fail(f"{', '.join(given)}: of tasks; a script has its own length, data and seeds: leave it out")
    if not Path(script).is_file():
        fail(f"there is no file {script!r}: give the path of a training script, or tasks by --task")
    with writing(out):
        Path(out).mkdir(parents=True, exist_ok=True)
    check_writable(Path(out, _FILE))
    rows = compare(script, arguments, recipes, listen=lambda name: print(f"running under {name}", file=sys.stderr))
    content = {"recipes": [row.to_dict() for row in rows]}
    if as_json:
        print_json(content)
    else:
        _print(rows)
    write_whole(Path(out, _FILE), json.dumps(content, indent=1, allow_nan=False))


def _print(rows: Sequence[Any]) -> None:
    headers = ["recipe", "steps", "loss", "gap to float32", "bytes/parameter", "verdict"]
    table = plain_table([*headers, "why"], right=headers[1:5], fold=["why"])
    for row in rows:
        numbers = (row.steps, row.loss, row.gap, row.bytes_per_parameter)
        table.add_row(row.recipe, *map(cell, numbers), row.verdict, row.reason)
    console().print(table)
    print("\nThe loss is the mean over the last tenth of the steps, of one run with the script's own seeds.")
    print("A gap within 1% of it, or within twice that of fp32-twin, whose start differs by 1e-7, is no difference.")
