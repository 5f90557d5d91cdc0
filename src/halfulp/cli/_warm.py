"""halfulp warm: kernels compiled before they are needed."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from ._conventions import JsonOption, list_recipe_names, split_names
from ._errors import exit_with_error, print_json


def list_optimizer_names() -> list[str]:
    """Return the names of all optimizers."""
    from ..optim import OPTIMIZERS

    return list(OPTIMIZERS)


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
        typer.Option(help="Steps of these optimizers alone. Default: all.", autocompletion=list_optimizer_names),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fill the cache of compiled kernels, so that the first step of a training compiles nothing.

    Everything is run once on a few numbers: what it needs is compiled, compared with its reference, and kept. What the
    cache has already is not compiled again. Kernels are for this processor, or that of HALFULP_CPU_NAME and
    HALFULP_CPU_FEATURES: run it where the training will run.
    """
    from ..kernels.vector._machine_function import statistics
    from ..kernels.vector._processor import processor
    from ..trials.running._progress import describe_duration
    from ._warm_jobs import list_jobs

    folder = _find_writable_cache()
    chosen = list(
        list_jobs(
            None if recipe is None else split_names(recipe, ()),
            None if optimizer is None else split_names(optimizer, ()),
        )
    )
    counts = {group: sum(job.group == group for job in chosen) for group in dict.fromkeys(job.group for job in chosen)}
    before, start = statistics.copy(), time.monotonic()
    refused = _run_jobs(chosen)
    made, seconds = statistics - before, round(time.monotonic() - start, 1)
    found = {
        "folder": folder,
        "processor": processor()[1],
        "runs": counts,
        "found": made["found"],
        "compiled": made["compiled"],
        "written": made["written"],
        "bytes": made["bytes"],
        "refused": refused,
        "seconds": seconds,
    }
    if json:
        print_json(found)
    if made["written"] < made["compiled"]:
        lost = made["compiled"] - made["written"]
        exit_with_error(
            f"{lost} of {made['compiled']} compiled kernels could not be kept in {folder}: is the disk full?"
        )
    if json:
        return
    if refused:
        print(f"{refused} combinations of a recipe and an optimizer do not go together, and were left out.")
    print(
        f"{made['compiled']:,} kernels compiled in {describe_duration(seconds)} ({made['bytes'] / 1e6:.2f} MB), "
        f"{made['found']:,} were there, in {folder} for {found['processor']}."
    )


def _find_writable_cache() -> str:
    """Return where kernels are kept; end the command where none can be, or where none are compiled."""
    from ..environment import describe_cache
    from ..kernels._engine import choose_engine

    engine, reason = choose_engine("cpu")
    if engine != "llvm":
        exit_with_error(f"there is nothing to compile: {reason or 'HALFULP_ENGINE asks for ' + engine}")
    cache = describe_cache()
    if not cache["writable"]:
        exit_with_error(
            f"kernels cannot be kept ({cache['reason']}): set HALFULP_CACHE_DIR to a folder that can be written"
        )
    return str(cache["folder"])


def _run_jobs(chosen: list[Any]) -> int:
    """Run the jobs, with a bar on a terminal; return how many were refused that may be."""
    import warnings

    from rich.console import Console
    from rich.progress import Progress

    terminal = Console(file=sys.stderr, highlight=False)
    with (
        Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bars,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about trainings, which these are not
        bar, refused = bars.add_task("", total=len(chosen)), 0
        for job in chosen:
            bars.update(bar, description=f"{job.group}: {job.name}")
            try:
                job.run()
            except (ValueError, NotImplementedError):
                if not job.may_be_refused:
                    raise
                refused += 1
            bars.advance(bar)
    return refused
