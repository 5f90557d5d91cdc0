"""halfulp compare and tune: tasks, or a script of one's own, trained under several recipes."""

from __future__ import annotations

import json as encoder
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..pages import require_page_packages, write_file_atomically
from ..trials import DEFAULT_RECIPES, DEFAULT_TASKS
from ._conventions import (
    JsonOption,
    describe_names_option,
    make_stdout_console,
    prepare_out_folder,
    print_table,
    split_names,
)
from ._errors import exit_with_error, print_json


def call_with_trial_progress(train: Callable[..., Any], *arguments: Any, out: str, **options: Any) -> Any:
    """Call `compare` or `tune` with progress bars; end the command where they end early."""
    from ..trials import TrialError
    from ..trials.running._progress import TrialProgress

    progress = TrialProgress()
    try:
        with progress:
            return train(*arguments, out=out, listen=progress, **options)
    except KeyboardInterrupt as ending:
        why = str(ending) or "interrupted"
    except TrialError as error:
        why = str(error)
        if error.details:
            Path(out, "error.log").write_text(error.details, encoding="utf-8")
            why += f" (more in {Path(out, 'error.log')})"
    except ValueError as error:  # such as a disk that fills up
        why = str(error)
        if not progress.finished_trial_count:
            exit_with_error(why)
    kept = f"{progress.finished_trial_count} of {progress.trial_count} trials are kept in {out}"
    exit_with_error(f"{why}; {kept}, --resume continues")


def refuse_torchrun(command: str) -> None:
    """Fail where torchrun started several processes, which would all train the same."""
    if (count := os.environ.get("WORLD_SIZE") or "1") != "1":
        exit_with_error(
            f"halfulp {command} does not run under torchrun, which says WORLD_SIZE={count}: start it without; "
            "--workers trains several trials at once"
        )


def compare_script(script: str, arguments: list[str], recipes: Sequence[str], out: str, as_json: bool) -> None:
    """Run a script under recipes, print a table or JSON, and write the page and the JSON."""
    from ..trials._script import compare_script as compare

    if not Path(script).is_file():
        exit_with_error(f"there is no file {script!r}: give the path of a training script, or tasks by --task")
    require_page_packages("matplotlib")
    prepare_out_folder(out, "compare-script")
    try:
        found = compare(script, arguments, recipes, lambda recipe, said: print(f"{recipe:<20} {said}", file=sys.stderr))
    except KeyboardInterrupt:
        exit_with_error("interrupted while the script ran: nothing is written")
    page, data = Path(out, "compare-script.html"), Path(out, "compare-script.json")
    write_file_atomically(data, found.to_json())
    found.to_html(page)
    if as_json:
        print_json(found.to_dict())
    else:
        _print_task_tables(found)
        print(f"\n{page} shows the curves; {data} holds the numbers.")
    if refused := found.run["refused"]:
        exit_with_error("; ".join(f"{one['recipe']} {one['why']}" for one in refused))


def compare(
    script: Annotated[
        str | None, typer.Argument(help="A training script to compare under recipes in place of tasks.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, behind --.")] = None,
    task: Annotated[list[str] | None, typer.Option(help=describe_names_option("Tasks", DEFAULT_TASKS))] = None,
    recipe: Annotated[list[str] | None, typer.Option(help=describe_names_option("Recipes", DEFAULT_RECIPES))] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; a verdict needs 3.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Steps per trial; default: the task's own.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    out: Annotated[str, typer.Option(help="Folder for compare.json and compare.html.")] = "halfulp-compare",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, at most 8.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over finished trials of the same settings.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the comparison that the folder holds.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train tasks under several recipes, and show which keep float32's accuracy, at what memory and speed.

    With a SCRIPT.py that is run once per recipe: where it makes torch's SGD, Adam or AdamW, its model is converted. The
    folder then gets compare-script.json and compare-script.html.

    The exit code is 0 with all trials trained, whatever the verdicts, and 2 where one failed, or a script under a
    recipe, after whose failure the others are run.
    """
    refuse_torchrun("compare")
    recipes = split_names(recipe, DEFAULT_RECIPES)
    if script is not None:
        if task or data or resume or overwrite or (steps, workers, seeds) != (None, None, 3):
            exit_with_error("a script has its own length, data and seeds: give --recipe and --out alone")
        compare_script(script, arguments or [], recipes, out, json)
        return
    from ..trials import compare as train

    where: dict[str, Any] = {"out": out, "data": data, "workers": workers, "resume": resume, "overwrite": overwrite}
    evidence = call_with_trial_progress(
        train, split_names(task, DEFAULT_TASKS), recipes, seeds=seeds, steps=steps, **where
    )
    if json:
        print_json(evidence.to_dict())
        return
    _print_task_tables(evidence)
    run = evidence.run
    crew = f"{run['workers']} worker{'' if run['workers'] == 1 else 's'} of one thread"
    cost = f"{run['trained']} trials in {run['seconds']:.0f} s, by {crew} on {run['processor']}."
    print("\n" + (cost if run["trained"] else "All trials were kept from an earlier run."))
    print(f"{Path(out, 'compare.html')} shows the curves; {Path(out, 'compare.json')} holds the numbers.")


_TABLE_STYLES_BY_VERDICT_TONE = {"good": "green", "bad": "red", "open": "yellow"}


def _print_task_tables(evidence: Any) -> None:
    from ..trials._defaults import TONE_BY_VERDICT
    from ..trials.evidence._table import format_row_cells, list_filled_column_headers, list_table_notes

    for task in evidence.tasks():
        rows, headers = evidence.rows(task), list_filled_column_headers(evidence, task)
        cells = [[format_row_cells(evidence, row)[header] for header in headers] for row in rows]
        styles = [_TABLE_STYLES_BY_VERDICT_TONE.get(TONE_BY_VERDICT.get(row.verdict or "", ""), "") for row in rows]
        print(f"\n{task}")
        print_table(headers, cells, styles, cut=4)
        make_stdout_console().print(*list_table_notes(evidence, task), sep="\n", style="dim")


def tune(
    task: Annotated[str, typer.Option(help="The task.")] = "digits",
    tolerance: Annotated[
        float | None,
        typer.Option(help="By which share of float32's loss a recipe may be above it; default: as compare judges."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Candidates, by their bytes; default: bfloat16 with every update and storage of states."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; 3 at least.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Steps per trial; default: the task's own.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    out: Annotated[str, typer.Option(help="Folder for tune.json, compare.json and compare.html.")] = "halfulp-tune",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, at most 8.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over finished trials of the same settings.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the trials that the folder holds.")] = False,
    json: JsonOption = False,
) -> None:
    """Find the recipe of fewest bytes per parameter that stays with float32."""
    from ..trials import tune as search

    refuse_torchrun("tune")
    candidates = None if recipe is None else split_names(recipe, ())
    where: dict[str, Any] = {"out": out, "data": data, "workers": workers, "resume": resume, "overwrite": overwrite}
    found = call_with_trial_progress(search, task, tolerance, recipes=candidates, seeds=seeds, steps=steps, **where)
    content = found.to_dict()
    write_file_atomically(Path(out, "tune.json"), encoder.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    if json:
        print_json(content)
        return
    print(found)
    print(f"\n{Path(out, 'tune.json')} holds the recipe, {Path(out, 'compare.html')} shows the curves.")
