"""halfulp observe: a training script run unmodified, and a report on its numbers."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._errors import catch_exit_code, fail
from .._out import prepare, write_out
from .._output import Json, print_elsewhere, print_json

if TYPE_CHECKING:
    from ...observation.scripts import Ending, Watch

# Options behind the script's name are the script's.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
_CUT_SHORT = {"crashed": "crashed", "interrupted": "was interrupted", "terminated": "was terminated"}


def observe(
    script: Annotated[str, typer.Argument(help="A Python script that trains with a torch optimizer.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as after python -m.")] = False,
    interval: Annotated[int, typer.Option(help="One step in so many is looked at.", min=1)] = 50,
    out: Annotated[str, typer.Option(help="Folder for observe.html, .json and .jsonl.")] = "halfulp-observe",
    json: Json = False,
) -> int:
    """Run an unchanged training script; report what is wrong with its numbers, and what to do about it.

    Options of this command stand before the script's name, the script's own behind it. Models and optimizers are found
    while it runs, each training of a script for itself. The exit code is the script's own, or 2 where nothing was
    observed. While the script runs, each sampled step becomes a line of observe.jsonl, which a killed run leaves. With
    --json what the script prints goes to stderr. Under torchrun the first process alone writes.
    """
    from ...observation.scripts import TERMINATED, Ending, Termination, Watch, run_script

    first = _read_rank() == 0
    if not module and not Path(script).is_file():
        more = "; a module is run by -m" if _is_like_a_module(script) else ""
        fail(f"there is no file {script!r}: give the path of a training script, its own arguments after it{more}")
    if first:
        prepare(out, "observe")
    # Where the script changes to another folder, this one stays.
    folder, own = str(Path(out).absolute()), os.getpid()
    watch = Watch(interval, Path(folder, "observe.jsonl") if first else None)
    with contextlib.ExitStack() as elsewhere:
        if json:
            elsewhere.enter_context(print_elsewhere())

        def leave(ending: Ending) -> int:
            watch.__exit__(None, None, None)
            elsewhere.close()
            with catch_exit_code() as exits:
                exits.code = _report(watch, ending, out, folder, json) if _is_first(first, watch) else ending.code
            return exits.code

        with Termination(lambda: leave(Ending(TERMINATED, "terminated"))) as termination:
            with watch:
                ending = run_script(script, arguments or [], module=module, leave=leave)
            termination.wait()
            elsewhere.close()
            if os.getpid() != own or not _is_first(first, watch):
                return ending.code
            return _report(watch, ending, out, folder, json)


def _report(watch: Watch, ending: Ending, out: str, folder: str, json: bool) -> int:
    """Print and write the report; return the exit code."""
    report = watch.report(ending.reason)
    how = _CUT_SHORT.get(ending.reason)
    if not report.steps:
        children = watch.children.why_unseen()
        if ending.code:
            said = f"the script {how or ending.reason} before a torch optimizer stepped: nothing was observed"
            _say(f"{said}; {children}" if children else said)
            return ending.code
        reasons = [*report.unseen, *([children] if children else [])]
        why = "; ".join(reasons) or "give a script that trains in its own process, by an optimizer of torch's kind"
        fail(f"the script never stepped a torch optimizer that can be observed: {why}")
    if how:
        said = f"the script {how} after {report.steps} steps"
        report.unseen.insert(0, f"{said}: this is what was observed until then")
        _say(f"{said}; what was observed until then:")
    if json:
        print_json(report.to_dict())
    else:
        print(report)
    write_out(folder, "observe", report)
    if not json:
        print(f"\n{Path(out, 'observe.html')} shows it; {Path(out, 'observe.json')} holds the numbers.")
    return ending.code


def _read_rank() -> int:
    """Return this process's rank among those of torchrun."""
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0


def _is_first(first: bool, watch: Watch) -> bool:
    """Return whether this process reports: of several the first, also of those that torchrun did not start."""
    return first and watch.rank == 0


def _is_like_a_module(script: str) -> bool:
    return not script.endswith(".py") and all(part.isidentifier() for part in script.split("."))


def _say(words: str) -> None:
    print(f"halfulp: {words}", file=sys.stderr)
