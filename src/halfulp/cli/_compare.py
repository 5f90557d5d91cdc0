"""halfulp compare and tune: tasks, or a script of one's own, trained under several recipes."""

from __future__ import annotations

import json as encoder
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..pages import require, write_whole
from ..trials import DEFAULT_RECIPES, DEFAULT_TASKS
from ._conventions import (
    JsonOption,
    describe_option,
    list_recipe_names,
    list_task_names,
    make_console,
    make_plain_table,
    prepare_out_folder,
    split_names,
)
from ._errors import exit_with_error, print_json


def run_trials(trained: Callable[..., Any], out: str, **options: Any) -> Any:
    """Call `compare` or `tune` with a folder and progress bars; end the command where they end early."""
    from ..trials import TrialError
    from ..trials.running._progress import TrialProgress

    progress = TrialProgress()
    try:
        with progress:
            return trained(out=out, listen=progress, **options)
    except KeyboardInterrupt as ending:
        exit_with_error(f"{str(ending) or 'interrupted'}; {_describe_kept(progress, out)}")
    except TrialError as error:
        more = ""
        if error.details:
            Path(out, "error.log").write_text(error.details, encoding="utf-8")
            more = f" (more in {Path(out, 'error.log')})"
        exit_with_error(f"{error}{more}; {_describe_kept(progress, out)}")
    except ValueError as error:  # such as a disk that fills up
        exit_with_error(f"{error}; {_describe_kept(progress, out)}" if progress.kept_count else error)


def refuse_torchrun(command: str) -> None:
    """Fail where torchrun started several processes, which would all train the same."""
    if (count := os.environ.get("WORLD_SIZE") or "1") != "1":
        exit_with_error(
            f"halfulp {command} does not run under torchrun, which says WORLD_SIZE={count}: start it without; "
            "--workers trains several trials at once"
        )


def _describe_kept(progress: Any, out: str) -> str:
    """Return how many trials are kept where."""
    return f"{progress.kept_count} of {progress.trial_count} trials are kept in {out}, --resume continues"


_JSON_NAME, _PAGE_NAME, _LOG_NAME = "compare-script.json", "compare-script.html", "error.log"


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
    from ..trials._script import ScriptError
    from ..trials._script import compare_script as compare

    if given := [option for option, value in unused.items() if value is not None]:
        exit_with_error(f"{', '.join(given)}: of tasks; a script has its own length, data and seeds: leave it out")
    if not module and not Path(script).is_file():
        exit_with_error(
            f"there is no file {script!r}: give the path of a training script, a module by -m, or tasks by --task"
        )
    require("matplotlib")
    prepare_out_folder(out, "compare-script")
    running = ""

    def tell(recipe: str, said: str, seconds: float) -> None:
        nonlocal running
        running = recipe
        if said:
            print(f"{recipe:<20} {said}  {seconds:.1f} s", file=sys.stderr)
        else:
            print(f"{recipe} ...", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    try:
        found, outputs = compare(script, arguments, recipes, module, listen=tell)
    except ScriptError as error:
        exit_with_error(f"{error}{_write_error_log(out, error.said)}")
    except KeyboardInterrupt:
        exit_with_error(f"interrupted while the script ran under {running}: nothing is written")
    write_whole(Path(out, _JSON_NAME), found.to_json())
    found.to_html(Path(out, _PAGE_NAME))
    if as_json:
        print_json(found.to_dict())
    else:
        _print_tables(found)
        for one in found.run["refused"]:
            print(f"{one['recipe']} {one['why']}")
        print(f"\n{Path(out, _PAGE_NAME)} shows the curves; {Path(out, _JSON_NAME)} holds the numbers.")
    if outputs:
        said = "\n".join(f"== {recipe}\n{printed}" for recipe, printed in outputs.items())
        exit_with_error(f"the script crashed under {', '.join(outputs)}{_write_error_log(out, said)}")


def _write_error_log(out: str, said: str) -> str:
    """Write a failed script's output to a log file and name the file."""
    if not said.strip():
        return ""
    write_whole(Path(out, _LOG_NAME), said)
    return f"; all that it said is in {Path(out, _LOG_NAME)}"


DEFAULT_FOLDER = "halfulp-compare"


def compare(
    script: Annotated[
        str | None, typer.Argument(help="A training script to compare under recipes in place of tasks.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, behind --.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as after python -m.")] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help=describe_option("Tasks", DEFAULT_TASKS), autocompletion=list_task_names),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help=describe_option("Recipes", DEFAULT_RECIPES), autocompletion=list_recipe_names),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; a verdict needs 3.")] = 3,
    first_seed: Annotated[
        int, typer.Option(help="The first of them: another start, order of the data and random bits of the recipe.")
    ] = 0,
    steps: Annotated[int | None, typer.Option(help="Steps per trial; default: the task's own.")] = None,
    size: Annotated[
        str | None, typer.Option(help="In place of --steps, how long trials are: smoke, small or full.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="papers: the papers' kinds of tasks under every recipe, --task and --recipe for a part."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    out: Annotated[str, typer.Option(help="Folder for compare.json and compare.html.")] = DEFAULT_FOLDER,
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

    The exit code is 0 with all trials trained, whatever the verdicts, and 2 where one failed or could not be run, or a
    script crashed under a recipe. With --suite, and of a script, the others are trained to the end first.
    """
    refuse_torchrun("compare")
    options: dict[str, Any] = {
        "seeds": range(first_seed, first_seed + seeds) if first_seed and seeds > 0 else seeds,
        "data": data,
        "resume": resume,
        "overwrite": overwrite,
    }
    if suite is not None:
        if script is not None or steps is not None:
            exit_with_error("--suite trains its own tasks, as long as --size says: leave out the script and --steps")
        options |= {
            "size": size or "small",
            "tasks": split_names(task, ()) or None,
            "recipes": split_names(recipe, ()) or None,
        }
        if suite != "papers":
            exit_with_error(f"no suite {suite!r}; there is papers")
        _run_suite("halfulp-evidence" if out == DEFAULT_FOLDER else out, workers, json, options)
        return
    if module and script is None:
        exit_with_error("-m needs the name of a module: halfulp compare -m package.train")
    if script is not None:
        unused = {"--task": task, "--steps": steps, "--size": size, "--data": data, "--workers": workers}
        unused |= {
            "--seeds": seeds if seeds != 3 else None,
            "--first-seed": first_seed or None,
            "--resume": resume or None,
            "--overwrite": overwrite or None,
        }
        compare_script(script, arguments or [], split_names(recipe, DEFAULT_RECIPES), module, unused, out, json)
        return
    tasks, recipes = split_names(task, DEFAULT_TASKS), split_names(recipe, DEFAULT_RECIPES)
    from ..trials import compare as train

    evidence = run_trials(partial(train, tasks, recipes, steps=steps, size=size), out, workers=workers, **options)
    if json:
        print_json(evidence.to_dict())
        return
    _print_tables(evidence)
    print(f"\n{_describe_run(evidence.run)}")
    print(f"{Path(out, 'compare.html')} shows the curves; {Path(out, 'compare.json')} holds the numbers.")


def _run_suite(out: str, workers: int | None, json: bool, options: dict[str, Any]) -> None:
    """Train the suite, print its statements, and say where the tables are and which trials failed."""
    from ..trials.suite._suite import group_failed_trials, run_suite

    evidence = run_trials(run_suite, out, workers=workers, **options)
    content = evidence.to_dict()
    if json:
        print_json(content)
    else:
        table = make_plain_table(["statement", "verdict"], fold=["statement"])
        for one in content["statements"]:
            table.add_row(f"{one['claim']} ({one['source']})", one["verdict"])
        make_console().print(table)
        print(f"\n{_describe_run(evidence.run)}")
        print(f"{Path(out, 'evidence.md')} has every table; evidence.html shows the curves, evidence.json the numbers.")
    if failed := group_failed_trials(evidence):
        count = len(evidence.run["failed"])
        where = ", ".join(f"{task} · {recipe} (seed {seeds})" for task, recipe, seeds, _ in failed)
        exit_with_error(
            f"{count} of {count + len(evidence.trials)} trials failed: {where}; the first said {failed[0][3]}; the "
            f"others are kept in {out}, --resume tries these again"
        )


def _describe_run(run: dict[str, Any]) -> str:
    """Describe how many trials took how long, on what."""
    from ..trials.running._progress import describe_duration

    if not run["trained"]:
        return "All trials were kept from an earlier run."
    workers = f"{run['workers']} worker{'' if run['workers'] == 1 else 's'} of one thread"
    return f"{run['trained']} trials in {describe_duration(run['seconds'])}, by {workers} on {run['processor']}."


_STYLES_BY_TONE = {"good": "green", "bad": "red", "open": "yellow"}


def _print_tables(evidence: Any) -> None:
    from rich.text import Text

    from ..trials._defaults import VERDICT_TONES
    from ..trials.evidence._table import format_cells, list_headers, write_table_notes

    shown = make_console()
    for task in evidence.tasks():
        rows = evidence.rows(task)
        lines = [format_cells(evidence, row) for row in rows]
        headers = list_headers(evidence, task)
        widths = (2 + max(len(header), *(len(line[header]) for line in lines)) for header in headers)
        parts = [headers] if shown.width >= sum(widths) else [headers[:4], ["recipe", *headers[4:]]]
        shown.print(f"\n[bold]{task}[/bold]")
        for part in parts:
            right = [header for header in part if header not in ("recipe", "verdict")]
            table = make_plain_table(part, right=right)
            for row, line in zip(rows, lines):
                style = _STYLES_BY_TONE.get(VERDICT_TONES.get(row.verdict or "", ""), "")
                table.add_row(*(line[header] for header in part), style=style)
            shown.print(table)
        for note in write_table_notes(evidence, task):
            shown.print(Text(note, style="dim"))


def tune(
    task: Annotated[str, typer.Option(help="The task.", autocompletion=list_task_names)] = "digits",
    tolerance: Annotated[
        float | None,
        typer.Option(help="By which share of float32's loss a recipe may be above it; default: as compare judges."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Candidates, by their bytes; default: those that an observed training leaves open.",
            autocompletion=list_recipe_names,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; 3 at least.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Steps per trial; default: the task's own.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    most: Annotated[int, typer.Option(help="How many candidates are trained at most.")] = 12,
    out: Annotated[str, typer.Option(help="Folder for tune.json, compare.json and compare.html.")] = "halfulp-tune",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, at most 8.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over finished trials of the same settings.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the trials that the folder holds.")] = False,
    json: JsonOption = False,
) -> None:
    """Find the recipe of fewest bytes per parameter that stays with float32, per layer where that pays."""
    from ..trials import tune as search

    refuse_torchrun("tune")
    found = run_trials(
        partial(search, task, tolerance),
        out,
        recipes=None if recipe is None else split_names(recipe, ()),
        seeds=seeds,
        steps=steps,
        data=data,
        most=most,
        workers=workers,
        resume=resume,
        overwrite=overwrite,
    )
    content = found.to_dict()
    write_whole(Path(out, "tune.json"), encoder.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    if json:
        print_json(content)
        return
    print(found)
    print(f"\n{Path(out, 'tune.json')} holds the recipe, {Path(out, 'compare.html')} shows the curves.")
