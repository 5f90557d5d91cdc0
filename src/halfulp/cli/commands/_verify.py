"""halfulp verify: a proof on a model that a recipe's scales change no gradient."""

import json as encoder
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..._messages import a_kind
from ...pages import check_writable, write_whole
from .._errors import fail, run_or_fail
from .._names import complete, recipe_names, task_names
from .._output import Json, make_console, make_plain_table, print_json


def verify(
    target: Annotated[
        str | None,
        typer.Argument(help="package.module:function that returns (model, batch) or (model, batch, loss)."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="A task's model and batch instead of a target.", autocompletion=complete(task_names)),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help="A recipe with scaled payloads or a gradient scale.", autocompletion=complete(recipe_names)),
    ] = "scaled-fp16",
    trials: Annotated[int, typer.Option(help="How many draws of scales.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the scales.")] = 0,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    out: Annotated[str | None, typer.Option(help="A file for the result as JSON.")] = None,
    json: Json = False,
) -> int:
    """Prove on a model that a recipe's scales change no gradient, or name the first operator that does.

    The exit code is 0 if all gradients agree and nothing fell back, else 1.
    """
    from ...recipes import verify

    if (target is None) == (task is None):
        fail("give either a target, package.module:function, or --task with a task's name")
    if out is not None:
        check_writable(out)
    if target is not None:
        model, batch, loss = _load_target(target)
    else:
        assert task is not None
        model, batch, loss = _verify_task(task, data, seed)
    with run_or_fail(f"verifying {target or task} raised", (ValueError, TypeError, NotImplementedError)):
        found = verify(model, batch, recipe, loss=loss, trials=trials, seed=seed)
    if json:
        print_json(found.to_dict())
    else:
        _print(found)
    if out is not None:
        write_whole(out, encoder.dumps(found.to_dict(), indent=2))
    return 0 if found.passed else 1


def _verify_task(name: str, data: str | None, seed: int) -> tuple[Any, Any, Any]:
    from ...trials.tasks import get

    task = get(name, data)
    if hasattr(task, "trial"):
        fail(f"task {name!r} has a training loop of its own and no model to verify")
    found = task.load()
    model = task.model(found, seed)
    inputs, targets = next(task.batches(found, seed, 1))
    return model, inputs, lambda logits: task.loss(logits, targets)


def _load_target(target: str) -> tuple[Any, Any, Any]:
    import importlib

    name, _, function = target.partition(":")
    if not name or not function:
        fail(f"{target!r} names no {'function' if name else 'module'}: write package.module:function")
    if name.endswith(".py"):
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        fail(f"{target!r} names a file: write the module without .py, {module}:{function}")
    # As `python -m` does: modules of the folder that one stands in are found.
    sys.path.insert(0, str(Path.cwd()))
    with run_or_fail(f"cannot take {function!r} from {name!r}:"):
        make = getattr(importlib.import_module(name), function)
    if not callable(make):
        fail(f"{target} is {a_kind(make)}: give a function that returns (model, batch) or with a loss")
    with run_or_fail(f"{target} raised"):
        made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        fail(f"{target} returned {type(made).__name__}: return (model, batch) or (model, batch, loss)")
    return (*made, None) if len(made) == 2 else made


def _print(found: Any) -> None:
    from rich.text import Text

    shown = make_console()
    shown.print(Text(str(found), style="green" if found.passed else "red"))
    unequal = sorted(((d, n) for n, d in found.gradients.items() if d), reverse=True)[:20]
    if not unequal:
        return
    difference = "relative difference of its gradient"
    table = make_plain_table(["parameter", difference], right=[difference])
    for apart, name in unequal:
        table.add_row(name, f"{apart:.1e}")
    shown.print(table)
