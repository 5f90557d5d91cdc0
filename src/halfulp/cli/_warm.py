"""halfulp warm: kernels compiled before they are needed, by small examples of everything that has kernels."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import nn

from .. import formats, mctensor, optim, recipes, rounding
from .._names import unknown
from ..optim.weight_updates._weight_update import REGISTRY
from ..recipes._optimizer import step_by
from ..rounding._modes import MODES
from ._conventions import Json, complete, make_console, make_plain_table, recipe_names, split
from ._errors import fail, print_json

_NARROW = (torch.bfloat16, torch.float16)
_STATES = (None, torch.float32, "8bit")
# Beside an optimizer's defaults: options that choose another rule, and that trainings often have.
_OPTIONS: dict[str, Sequence[dict[str, Any]]] = {"SGD": ({}, {"momentum": 0.9})}
_WIDTH = 256  # whole blocks of 8-bit states


@dataclass(frozen=True)
class Job:
    """A small run that puts its kernels into the cache."""

    group: str
    name: str
    run: Callable[[], object]
    may_be_refused: bool = False


def list_jobs(recipe_names: Sequence[str] | None, chosen: Sequence[str] | None) -> Iterator[Job]:
    """Yield jobs for some recipes or all, and chosen optimizers or all; some may be refused.

    Raises:
        ValueError: an unknown name.
    """
    optimizer_names = list(optim.OPTIMIZERS) if chosen is None else chosen
    for name in optimizer_names:
        if name not in optim.OPTIMIZERS:
            raise ValueError(unknown("optimizer", name, optim.OPTIMIZERS))
    if recipe_names is not None:
        known = [recipes.get(name) for name in recipe_names]
        for recipe, name in itertools.product(known, optimizer_names):
            for options in _OPTIONS.get(name, ({},)):
                train = partial(_train, recipe, name, options)
                yield Job("recipes", f"{recipe.name}, {_format_call(name, options)}", train, chosen is None)
        return
    for name in optimizer_names:
        yield from _list_steps(name)
    if set(optimizer_names) == set(optim.OPTIMIZERS):
        yield from _list_roundings()
        yield from _list_expansions()


def _format_call(name: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"


def _list_steps(name: str) -> Iterator[Job]:
    """Yield a job for every weight update, dtype and storage of states that an optimizer accepts together."""
    for options, dtype, update, state in itertools.product(
        _OPTIONS.get(name, ({},)), (*_NARROW, torch.float32), (None, *REGISTRY), _STATES
    ):
        if (dtype == torch.float32) != (update is None):
            continue
        given = {"lr": 1e-3, "weight_update": update, "state_dtype": state, **options}
        if _is_refused(name, dtype, given):
            continue
        states = str(state or dtype).removeprefix("torch.")
        told = ", ".join(filter(None, (str(dtype).removeprefix("torch."), update, f"states {states}")))
        yield Job("steps", f"{_format_call(name, options)}: {told}", partial(_step, name, dtype, given))


def _is_refused(name: str, dtype: torch.dtype, given: dict[str, Any]) -> bool:
    """Return whether options do not go together, or the states that they choose are the default ones, or none."""
    try:
        optimizer = optim.OPTIMIZERS[name]([nn.Parameter(torch.zeros(1, _WIDTH, dtype=dtype, device="cpu"))], **given)
        optimizer.bytes_per_parameter()
    except (ValueError, NotImplementedError):
        return True
    has_states = bool(optimizer.rule(optimizer.param_groups[0]).states)
    return given["state_dtype"] is not None and (not has_states or given["state_dtype"] == dtype)


def _step(name: str, dtype: torch.dtype, given: dict[str, Any]) -> None:
    """Step twice, once with lost updates counted, which is another kernel."""
    parameter = nn.Parameter(torch.ones(1, _WIDTH, dtype=dtype, device="cpu"))
    for interval in (0, 1):
        optimizer = optim.OPTIMIZERS[name]([parameter], report_interval=interval, **given)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def _train(recipe: recipes.Recipe, name: str, options: dict[str, Any]) -> None:
    """Train a small model of the most common layers for two steps under a recipe."""
    model = nn.Sequential(nn.Embedding(4, _WIDTH), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2))
    recipes.convert(model, recipe)
    scaler = recipes.scaler(recipe, model)
    for interval in (0, 1):
        optimizer = recipes.optimizer(model, name, lr=1e-3, report_interval=interval, **options)
        loss = model(torch.arange(4, dtype=torch.int64, device="cpu")).float().square().mean()
        step_by(loss, optimizer, scaler)


def _list_roundings() -> Iterator[Job]:
    every = (*formats.names(), *formats.block_names())
    for name, mode in itertools.product(every, MODES):
        yield Job("roundings", f"{name}, {mode}", partial(_quantize, name, mode))


def _quantize(name: str, mode: str) -> None:
    """Round tensors of the dtypes that hold a format's numbers."""
    for dtype in (torch.float32, *_NARROW):
        x = torch.linspace(0, 2, 64, dtype=torch.float32, device="cpu").to(dtype)
        try:
            rounding.quantize(x, name, mode)
        except ValueError:
            continue


def _list_expansions() -> Iterator[Job]:
    for dtype, components in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), (2, 3)):
        named = f"{components} x {str(dtype).removeprefix('torch.')}"
        yield Job("expansions", f"MCTensor of {named}", partial(_calculate, dtype, components))


def _calculate(dtype: torch.dtype, components: int) -> None:
    """Run the operators of a small model and its loss on expansions."""
    numbers = torch.linspace(0.5, 2, 64, dtype=torch.float64, device="cpu").reshape(8, 8)
    x = mctensor.MCTensor.encode(numbers, components, dtype)
    made = [x + x, x - x, x * x, x / x, x @ x, -x, x + 1, x * 2.0, x.sum(), x.mean(-1)]
    functions = (torch.exp, torch.log, torch.sqrt, torch.tanh, torch.sigmoid, torch.nn.functional.gelu)
    made += [function(x) for function in functions]
    for result in made:
        assert isinstance(result, mctensor.MCTensor)
        result.decode()


def optimizer_names() -> list[str]:
    """Return the names of all optimizers."""
    from ..optim import OPTIMIZERS

    return list(OPTIMIZERS)


def warm(
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Steps of these recipes alone, separated by commas or one option each. Default: every weight update, "
            "dtype and state, quantize to every format, and arithmetic of several components.",
            autocompletion=complete(recipe_names),
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="Steps of these optimizers alone. Default: all.", autocompletion=complete(optimizer_names)),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and compile nothing.")] = False,
    json: Json = False,
) -> None:
    """Fill the cache of compiled kernels, so that the first step of a training compiles nothing.

    Everything is run once on a few numbers: what it needs is compiled, compared with its reference, and kept. What the
    cache has already is not compiled again. Kernels are for this processor, or that of HALFULP_CPU_NAME and
    HALFULP_CPU_FEATURES: run it where the training will run.
    """
    from ..kernels._cache import statistics

    folder = _writable_folder()
    chosen = list(
        list_jobs(None if recipe is None else split(recipe, ()), None if optimizer is None else split(optimizer, ()))
    )
    counts = {group: sum(job.group == group for job in chosen) for group in dict.fromkeys(job.group for job in chosen)}
    if dry_run:
        _print_jobs(folder, chosen, counts, json)
        return
    before, start = statistics.copy(), time.monotonic()
    refused = _run(chosen)
    made, seconds = statistics - before, round(time.monotonic() - start, 1)
    found = {
        "folder": folder,
        "processor": _read_processor(),
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
        fail(f"{lost} of {made['compiled']} compiled kernels could not be kept in {folder}: is the disk full?")
    if json:
        return
    if refused:
        print(f"{refused} combinations of a recipe and an optimizer do not go together, and were left out.")
    print(
        f"{made['compiled']:,} kernels compiled in {_format_duration(seconds)} ({made['bytes'] / 1e6:.2f} MB), "
        f"{made['found']:,} were there, in {folder} for {found['processor']}."
    )


def _writable_folder() -> str:
    """Return where kernels are kept; end the command where none can be, or where none are compiled."""
    from ..environment import describe_cache
    from ..kernels._engine import choose_engine

    engine, reason = choose_engine("cpu")
    if engine != "llvm":
        fail(f"there is nothing to compile: {reason or 'HALFULP_ENGINE asks for ' + engine}")
    cache = describe_cache()
    if not cache["writable"]:
        fail(f"kernels cannot be kept ({cache['reason']}): set HALFULP_CACHE_DIR to a folder that can be written")
    return str(cache["folder"])


def _read_processor() -> str:
    from ..kernels.vector._processor import processor

    return processor()[1]


def _run(chosen: list[Any]) -> int:
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


def _print_jobs(folder: str, chosen: list[Any], counts: dict[str, int], json: bool) -> None:
    if json:
        print_json({"folder": folder, "runs": counts, "jobs": [f"{job.group}: {job.name}" for job in chosen]})
        return
    table = make_plain_table(["what", "which"], fold=["which"])
    for group, count in counts.items():
        names = [job.name for job in chosen if job.group == group]
        table.add_row(f"{count} {group}", "; ".join(names[:3]) + ("; ..." if count > 3 else ""))
    make_console().print(table, markup=False)
    print(f"\n{len(chosen)} runs, whose kernels are kept in {folder}; --json lists them all.")


def _format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} minutes"
