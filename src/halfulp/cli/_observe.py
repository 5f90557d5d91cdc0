"""halfulp observe: a training script run unmodified, and what its numbers do."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ._errors import fail
from ._out import prepare, write_out
from ._output import Json, print_json

# Options behind the script's name are the script's.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def observe(
    script: Annotated[str, typer.Argument(help="A Python script that trains with a torch optimizer.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    interval: Annotated[int, typer.Option(help="One step in so many is looked at.", min=1)] = 50,
    out: Annotated[str, typer.Option(help="Folder for observe.html and observe.json.")] = "halfulp-observe",
    json: Json = False,
) -> int:
    """Run a training script as it is, and say what is wrong with its numbers, and what to do about it.

    Models and optimizers are found while it runs. The exit code is the script's own, or 2 where nothing was observed.
    With --json what the script prints goes to stderr. Under torchrun the first process alone writes.
    """
    from ..observation.scripts import Watch, run_script

    first = _rank() == 0
    if not Path(script).is_file():
        fail(f"there is no file {script!r}: give the path of a training script, its own arguments after it")
    if first:
        prepare(out, "observe")
    watch = Watch(interval)
    with watch, contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        ending = run_script(script, arguments or [])
    if not first:
        return ending.code
    if not watch.steps:
        if ending.code:
            _say(f"the script {ending.reason} before a torch optimizer stepped: nothing was observed")
            return ending.code
        why = "; ".join(watch.unseen) or "give a script that trains in its own process"
        fail(f"the script never stepped a torch optimizer that can be observed: {why}")
    watch.ended = ending.reason
    if ending.reason in ("crashed", "interrupted"):
        said = f"the script {'crashed' if ending.reason == 'crashed' else 'was interrupted'} after {watch.steps} steps"
        watch.unseen.insert(0, f"{said}: this is what was observed until then")
        _say(f"{said}; what was observed until then:")
    if json:
        print_json(watch.to_dict())
    else:
        print(watch)
    write_out(out, "observe", watch)
    if not json:
        print(f"\n{Path(out, 'observe.html')} shows it; {Path(out, 'observe.json')} holds the numbers.")
    return ending.code


def _rank() -> int:
    """This process's number among those of torchrun."""
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0


def _say(words: str) -> None:
    print(f"halfulp: {words}", file=sys.stderr)
