"""halfulp tune: the cheapest recipe that stays with float32 on a task."""

import json as encoder
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .._names import complete, recipe_names, split, task_names
from .._output import Json, make_console, make_plain_table, print_json
from .._trials import check_alone, run_trials


def tune(
    task: Annotated[str, typer.Option(help="The task.", autocompletion=complete(task_names))] = "digits",
    tolerance: Annotated[
        float | None,
        typer.Option(help="By which share of float32's loss a recipe may be above it; default: as compare judges."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Candidates, by their bytes; default: those that an observed training leaves open.",
            autocompletion=complete(recipe_names),
        ),
    ] = None,
    param_dtype: Annotated[
        list[str] | None, typer.Option(help="Of the default candidates: bfloat16, float16. Default: bfloat16.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; 3 at least.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Steps per trial; default: the task's own.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    most: Annotated[int, typer.Option(help="How many candidates are trained at most.")] = 12,
    out: Annotated[str, typer.Option(help="Folder for tune.json, compare.json and compare.html.")] = "halfulp-tune",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, at most 8.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over finished trials of the same settings.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the trials that the folder holds.")] = False,
    json: Json = False,
) -> None:
    """Find the recipe of fewest bytes per parameter that stays with float32, per layer where that pays."""
    from ...pages import write_whole
    from ...trials import tune as search

    check_alone("halfulp tune", "which trials it trains depends on the results of those before")

    found = run_trials(
        partial(search, task, tolerance),
        out,
        recipes=None if recipe is None else split(recipe, ()),
        param_dtypes=split(param_dtype, ["bfloat16"]),
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
    shown = make_console()
    shown.print(f"[bold]{found.headline()}[/bold]")
    shown.print(found.recipe.explain())
    header, *rows = found.rows()
    table = make_plain_table(header, right=header[1:3], fold=header[-1:])
    styles = {"holds": "green", "worse": "red", "diverged": "red", "unclear": "yellow", "not trained": "dim"}
    for row in rows:
        table.add_row(*row, style=styles[row[3]])
    shown.print()
    shown.print(table)
    print()
    for line in found.observed():
        print(line)
    print(f"\n{Path(out, 'tune.json')} holds the recipe, {Path(out, 'compare.html')} shows the curves.")
