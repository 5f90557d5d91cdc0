"""halfulp warm: kernels compiled before they are needed."""

from __future__ import annotations

import itertools
import time
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._conventions import JsonOption, split_names
from ._errors import exit_with_error, print_json

if TYPE_CHECKING:
    from ..recipes import Recipe

_WARMED_MODEL_WIDTH = 256  # whole blocks of 8-bit states


def warm(
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Steps of these recipes alone, separated by commas or one option each. Default: all with 16-bit "
            "parameters.",
        ),
    ] = None,
    optimizer: Annotated[list[str] | None, typer.Option(help="Steps of these optimizers alone. Default: all.")] = None,
    json: JsonOption = False,
) -> None:
    """Fill the cache of compiled kernels, so that the first step of a training compiles nothing.

    A small model is trained for two steps under each recipe by each optimizer: what it needs is compiled, compared with
    its reference, and kept. What the cache has already is not compiled again. Kernels are for this processor, or that
    of HALFULP_CPU_NAME and HALFULP_CPU_FEATURES: run it where the training will run.
    """
    from rich.console import Console
    from rich.progress import track

    from .. import optim
    from .._names import describe_unknown_name
    from ..environment import describe_cache
    from ..kernels._engine import choose_engine_and_fallback_reason
    from ..kernels.vector._machine_function import kernel_cache_counts
    from ..recipes import get, names

    engine, reason = choose_engine_and_fallback_reason("cpu")
    if engine != "llvm":
        exit_with_error(f"there is nothing to compile: {reason or 'HALFULP_ENGINE asks for ' + engine}")
    cache = describe_cache()
    if not cache["writable"]:
        exit_with_error(
            f"kernels cannot be kept ({cache['reason']}): set HALFULP_CACHE_DIR to a folder that can be written"
        )
    recipes = [get(name) for name in split_names(recipe, [name for name in names() if get(name).is_narrow])]
    rules = split_names(optimizer, list(optim.OPTIMIZERS))
    for rule in rules:
        if rule not in optim.OPTIMIZERS:
            raise ValueError(describe_unknown_name("optimizer", rule, optim.OPTIMIZERS))
    before, start, refused, err = kernel_cache_counts.copy(), time.monotonic(), 0, Console(stderr=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about trainings, which these are not
        for one, rule in track(
            list(itertools.product(recipes, rules)), "", console=err, transient=True, disable=not err.is_terminal
        ):
            try:
                _train_small_model(one, rule)
            except (ValueError, NotImplementedError):
                refused += 1
    made, seconds = kernel_cache_counts - before, round(time.monotonic() - start, 1)
    found = {"folder": str(cache["folder"]), "runs": len(recipes) * len(rules), "refused": refused, "seconds": seconds}
    found |= {name: made[name] for name in ("found", "compiled", "written", "bytes")}
    if json:
        print_json(found)
    if made["written"] < made["compiled"]:
        lost = made["compiled"] - made["written"]
        exit_with_error(
            f"{lost} of {made['compiled']} compiled kernels could not be kept in {cache['folder']}: is the disk full?"
        )
    if not json:
        print(
            f"{made['compiled']:,} kernels compiled in {seconds} s ({made['bytes'] / 1e6:.2f} MB), {made['found']:,} "
            f"were there, in {cache['folder']}; {refused} of {found['runs']:,} pairs of a recipe and an optimizer do "
            "not go together."
        )


def _train_small_model(recipe: Recipe, rule: str) -> None:
    """Train a small model of the most common layers for two steps, once with lost updates counted."""
    import torch
    from torch import nn

    from .. import recipes
    from ..recipes._optimizer import run_backward_and_step

    model = nn.Sequential(
        nn.Embedding(4, _WARMED_MODEL_WIDTH), nn.LayerNorm(_WARMED_MODEL_WIDTH), nn.Linear(_WARMED_MODEL_WIDTH, 2)
    )
    recipes.convert(model, recipe)
    scaler = recipes.scaler(recipe, model)
    options: dict[str, Any] = {"momentum": 0.9} if rule == "SGD" else {}
    for interval in (0, 1):  # another kernel counts lost updates
        optimizer = recipes.optimizer(model, rule, lr=1e-3, report_interval=interval, **options)
        loss = model(torch.arange(4, dtype=torch.int64, device="cpu")).float().square().mean()
        run_backward_and_step(loss, optimizer, scaler)
