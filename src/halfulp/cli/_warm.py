"""halfulp warm: kernels compiled before they are needed."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from ._conventions import JsonOption, list_recipe_names, split_names
from ._errors import exit_with_error, print_json


def warm(
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Steps of these recipes alone, separated by commas or one option each. Default: every weight update, "
            "dtype and state, quantize to every format, and arithmetic of several components.",
            autocompletion=list_recipe_names,
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="Steps of these optimizers alone. Default: all."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fill the cache of compiled kernels, so that the first step of a training compiles nothing.

    Everything is run once on a few numbers: what it needs is compiled, compared with its reference, and kept. What the
    cache has already is not compiled again. Kernels are for this processor, or that of HALFULP_CPU_NAME and
    HALFULP_CPU_FEATURES: run it where the training will run.
    """
    from ..environment import describe_cache
    from ..kernels._engine import choose_engine
    from ..kernels.vector._machine_function import statistics
    from ..kernels.vector._processor import processor
    from ..trials.running._progress import describe_duration
    from ._warm_jobs import list_jobs

    engine, reason = choose_engine("cpu")
    if engine != "llvm":
        exit_with_error(f"there is nothing to compile: {reason or 'HALFULP_ENGINE asks for ' + engine}")
    cache = describe_cache()
    if not cache["writable"]:
        exit_with_error(
            f"kernels cannot be kept ({cache['reason']}): set HALFULP_CACHE_DIR to a folder that can be written"
        )
    recipes = None if recipe is None else split_names(recipe, ())
    jobs = list(list_jobs(recipes, None if optimizer is None else split_names(optimizer, ())))
    before, start = statistics.copy(), time.monotonic()
    refused = _run_jobs(jobs, may_be_refused=optimizer is None)
    made, seconds = statistics - before, round(time.monotonic() - start, 1)
    found = {"folder": str(cache["folder"]), "processor": processor()[1], "runs": len(jobs)}
    found |= {name: made[name] for name in ("found", "compiled", "written", "bytes")}
    found |= {"refused": refused, "seconds": seconds}
    if json:
        print_json(found)
    if made["written"] < made["compiled"]:
        lost = made["compiled"] - made["written"]
        exit_with_error(
            f"{lost} of {made['compiled']} compiled kernels could not be kept in {cache['folder']}: is the disk full?"
        )
    if json:
        return
    if refused:
        print(f"{refused} combinations of a recipe and an optimizer do not go together, and were left out.")
    print(
        f"{made['compiled']:,} kernels compiled in {describe_duration(seconds)} ({made['bytes'] / 1e6:.2f} MB), "
        f"{made['found']:,} were there, in {cache['folder']} for {found['processor']}."
    )


def _run_jobs(jobs: Sequence[tuple[str, Callable[[], object]]], may_be_refused: bool) -> int:
    """Run the jobs, with a bar on a terminal; return how many were refused, where they may be."""
    from rich.console import Console
    from rich.progress import Progress

    terminal, refused = Console(file=sys.stderr, highlight=False), 0
    bars = Progress(console=terminal, transient=True, disable=not terminal.is_terminal)
    with bars, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about trainings, which these are not
        bar = bars.add_task("", total=len(jobs))
        for name, run in jobs:
            bars.update(bar, description=name)
            try:
                run()
            except (ValueError, NotImplementedError):
                if not may_be_refused:
                    raise
                refused += 1
            bars.advance(bar)
    return refused
