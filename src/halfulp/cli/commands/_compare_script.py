"""halfulp compare SCRIPT.py: a user's training script under several recipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...pages import require, write_whole
from .._errors import fail
from .._out import prepare
from .._output import choose_style, format_cell, make_console, make_plain_table, print_json
from .._trials import check_alone

_FILE, _PAGE, _LOG = "compare-script.json", "compare-script.html", "error.log"


def compare_script(
    script: str,
    arguments: list[str],
    recipes: Sequence[str],
    module: bool,
    unused: Mapping[str, Any],
    out: str,
    as_json: bool,
) -> None:
    """Run a script under recipes, print a table or JSON, and write the page and the JSON."""
    from ...trials.script import ScriptError
    from ...trials.script import compare_script as compare

    _check(script, module, unused)
    require("matplotlib")
    prepare(out, "compare-script")
    progress = _Progress()
    try:
        found = compare(script, arguments, recipes, module, listen=progress)
    except ScriptError as error:
        fail(f"{error}{_log_output(out, error.said)}")
    except KeyboardInterrupt:
        fail(f"interrupted while the script ran under {progress.recipe}: nothing is written")
    content = found.to_dict()
    if as_json:
        print_json(content)
    else:
        _print(found)
    write_whole(Path(out, _FILE), json.dumps(content, indent=1, allow_nan=False))
    found.to_html(Path(out, _PAGE))
    ended = [row.recipe for row in found.rows if row.verdict == "crashed"]
    crashed = "\n".join(f"== {recipe}\n{found.runs[recipe].said}" for recipe in ended)
    if not as_json:
        print(
            f"\n{Path(out, _PAGE)} shows the curves; {Path(out, _FILE)} holds the numbers{_log_output(out, crashed)}."
        )


def _check(script: str, module: bool, unused: Mapping[str, Any]) -> None:
    given = [option for option, value in unused.items() if value is not None]
    if given:
        fail(f"{', '.join(given)}: of tasks; a script has its own length, data and seeds: leave it out")
    check_alone("halfulp compare SCRIPT", "a script is run once per recipe, as one process")
    if not module and not Path(script).is_file():
        fail(f"there is no file {script!r}: give the path of a training script, a module by -m, or tasks by --task")


def _log_output(out: str, said: str) -> str:
    """Write a failed script's output to a log file and name the file."""
    if not said.strip():
        return ""
    write_whole(Path(out, _LOG), said)
    return f"; all that it said is in {Path(out, _LOG)}"


class _Progress:
    """A listener that prints a line on stderr as a recipe begins and another one when it has ended."""

    def __init__(self) -> None:
        self.recipe = ""

    def __call__(self, recipe: str, row: Any, seconds: float) -> None:
        self.recipe = recipe
        if row is None:
            print(f"{recipe} ...", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
            return
        said = f"loss {row.loss:.4g} after {row.steps:,} steps" if row.loss is not None else row.verdict
        print(f"{recipe:<20} {said}  {seconds:.1f} s", file=sys.stderr)


def _print(found: Any) -> None:
    from rich.text import Text

    shown = make_console()
    headers = ["recipe", "steps", "loss", "gap to fp32", "bytes/param", "verdict"]
    rows = found.rows
    why = ["why"] if any(row.reason for row in rows) else []
    table = make_plain_table([*headers, *why], right=headers[1:5], fold=why)
    for row in rows:
        numbers = (row.steps, row.loss, row.gap, row.bytes_per_parameter)
        cells = [row.recipe, *map(format_cell, numbers), row.verdict, *([row.reason] if why else [])]
        table.add_row(*map(Text, cells), style=choose_style(row.verdict))
    shown.print()
    shown.print(table)
    for note in found.notes():
        shown.print(Text(note, style="dim"))
