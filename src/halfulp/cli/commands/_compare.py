"""halfulp compare: tasks trained under several recipes, and the evidence."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...trials import DEFAULT_RECIPES, DEFAULT_TASKS
from .._errors import fail
from .._names import complete, describe_option, recipe_names, split, task_names
from .._output import Json, choose_style, make_console, make_plain_table, print_json
from .._trials import run_trials, shared_workers
from ._compare_script import compare_script

DEFAULT_OUT = "halfulp-compare"


def compare(
    script: Annotated[
        str | None, typer.Argument(help="A training script to compare under recipes in place of tasks.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, behind --.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as after python -m.")] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help=describe_option("Tasks", DEFAULT_TASKS), autocompletion=complete(task_names)),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help=describe_option("Recipes", DEFAULT_RECIPES), autocompletion=complete(recipe_names)),
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
    out: Annotated[str, typer.Option(help="Folder for compare.json and compare.html.")] = DEFAULT_OUT,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, at most 8.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over finished trials of the same settings.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the comparison that the folder holds.")
    ] = False,
    json: Json = False,
) -> None:
    """Train tasks under several recipes, and show which keep float32's accuracy, at what memory and speed.

    With a SCRIPT.py that is run once per recipe: where it makes torch's SGD, Adam or AdamW, its model is converted. The
    folder then gets compare-script.json and compare-script.html.

    The exit code is 0 with all trials trained, whatever the verdicts, and 2 where one failed or could not be run. With
    --suite the others are trained to the end first and evidence.json lists what failed.
    """
    options: dict[str, Any] = {
        "seeds": range(first_seed, first_seed + seeds) if first_seed and seeds > 0 else seeds,
        "data": data,
        "resume": resume,
        "overwrite": overwrite,
    }
    if suite is not None:
        if script is not None or steps is not None:
            fail("--suite trains its own tasks, as long as --size says: leave out the script and --steps")
        options |= {"size": size or "small", "tasks": split(task, ()) or None, "recipes": split(recipe, ()) or None}
        _run_suite(suite, "halfulp-evidence" if out == DEFAULT_OUT else out, workers, json, options)
        return
    if module and script is None:
        fail("-m needs the name of a module: halfulp compare -m package.train")
    if script is not None:
        unused = {"--task": task, "--steps": steps, "--size": size, "--data": data, "--workers": workers}
        unused |= {
            "--seeds": seeds if seeds != 3 else None,
            "--first-seed": first_seed or None,
            "--resume": resume or None,
            "--overwrite": overwrite or None,
        }
        compare_script(script, arguments or [], split(recipe, DEFAULT_RECIPES), module, unused, out, json)
        return
    tasks, recipes = split(task, DEFAULT_TASKS), split(recipe, DEFAULT_RECIPES)
    from ...trials import compare as train

    with shared_workers(workers) as crew:
        evidence = run_trials(partial(train, tasks, recipes, steps=steps, size=size), out, workers=crew, **options)
    if json:
        print_json(evidence.to_dict())
        return
    _print_tables(evidence)
    print(f"\n{_describe_run(evidence.run)}")
    print(f"{Path(out, 'compare.html')} shows the curves; {Path(out, 'compare.json')} holds the numbers.")


def _run_suite(suite: str, out: str, workers: int | None, json: bool, options: dict[str, Any]) -> None:
    """Train a suite, print its statements, and say where the tables are."""
    from ...trials.suite._run import run_suite

    with shared_workers(workers) as crew:
        evidence = run_trials(partial(run_suite, suite), out, workers=crew, **options)
        if json:
            print_json(evidence.to_dict())
        else:
            _print_statements(evidence, out)
        _end_by_failures(evidence, out)


def _print_statements(evidence: Any, out: str) -> None:
    from ...trials.suite._statements import statements

    table = make_plain_table(["statement", "verdict"], fold=["statement"])
    for one in statements(evidence):
        table.add_row(f"{one.claim} ({one.source})", one.verdict)
    make_console().print(table)
    print(f"\n{_describe_run(evidence.run)}")
    print(f"{Path(out, 'evidence.html')} and evidence.md have every table; {Path(out, 'evidence.json')} the numbers.")


def _end_by_failures(evidence: Any, out: str) -> None:
    """End with an error where trials failed: how many, where, and the first one's message."""
    from ...trials.suite._report import group_failures

    failed = group_failures(evidence)
    if not failed:
        return
    count = len(evidence.run["failed"])
    where = ", ".join(f"{task} · {recipe} (seed {seeds})" for task, recipe, seeds, _ in failed)
    fail(
        f"{count} of {count + len(evidence.trials)} trials failed: {where}; the first said {failed[0][3]}; the others "
        f"are kept in {out}, --resume tries these again"
    )


def _describe_run(run: dict[str, Any]) -> str:
    """Describe how many trials took how long, on what."""
    from ...trials.running._estimate import describe_duration

    if not run["trained"]:
        return "All trials were kept from an earlier run."
    expected = f", {describe_duration(run['estimated_seconds'])} expected" if "estimated_seconds" in run else ""
    workers = f"{run['workers']} worker{'' if run['workers'] == 1 else 's'} of one thread"
    return (
        f"{run['trained']} trials in {describe_duration(run['seconds'])}{expected}, by {workers} on {run['processor']}."
    )


def _print_tables(evidence: Any) -> None:
    from rich.text import Text

    from ...trials.evidence._table import format_cells, write_notes

    shown = make_console()
    for task in evidence.tasks():
        rows = evidence.rows(task)
        lines = [format_cells(evidence, row) for row in rows]
        headers = list(lines[0])
        widths = (2 + max(len(header), *(len(line[header]) for line in lines)) for header in headers)
        parts = [headers] if shown.width >= sum(widths) else [headers[:4], ["recipe", *headers[4:]]]
        shown.print(f"\n[bold]{task}[/bold]")
        for part in parts:
            shown.print(_make_table(part, rows, lines))
        for note in write_notes(evidence, task):
            shown.print(Text(note, style="dim"))


def _make_table(headers: list[str], rows: list[Any], lines: list[dict[str, str]]) -> Any:
    table = make_plain_table(headers, right=[header for header in headers if header not in ("recipe", "verdict")])
    for row, line in zip(rows, lines):
        table.add_row(*(line[header] for header in headers), style=choose_style(row.verdict))
    return table
