"""halfulp observe, audit, forecast and verify: what the numbers of a run, a checkpoint, a plan or a model do."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._conventions import (
    JsonOption,
    OutFolderOption,
    prepare_out_folder,
    print_result,
    redirect_stdout_to_stderr,
    write_page_and_json,
)
from ._errors import exit_on_exception, exit_with_error

if TYPE_CHECKING:
    from ..observation.scripts import ScriptEnding, ScriptWatch

# Options behind the script's name are the script's.
OBSERVE_CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
_VERB_BY_EARLY_ENDING = {"crashed": "crashed", "interrupted": "was interrupted", "terminated": "was terminated"}


def observe(
    script: Annotated[str, typer.Argument(help="A Python script that trains with a torch optimizer.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as after python -m.")] = False,
    interval: Annotated[int, typer.Option(help="One step in so many is looked at.", min=1)] = 50,
    out: Annotated[str, typer.Option(help="Folder for observe.html, .json and .jsonl.")] = "halfulp-observe",
    json: JsonOption = False,
) -> int:
    """Run an unchanged training script; report what is wrong with its numbers, and what to do about it.

    Options of this command stand before the script's name, the script's own behind it. The models that are trained
    first, and their optimizers, are found while it runs. The exit code is the script's own, or 2 where nothing was
    observed. While the script runs, each sampled step becomes a line of observe.jsonl, which a killed run leaves. With
    --json what the script prints goes to stderr. Under torchrun the first process alone writes.
    """
    from ..observation.scripts import ScriptWatch, report_and_exit_on_sigterm, run_script

    rank = os.environ.get("RANK", "0")
    first = not rank.isdigit() or int(rank) == 0  # of torchrun's processes
    if not module and not Path(script).is_file():
        exit_with_error(
            f"there is no file {script!r}: give the path of a training script, its own arguments after it, or a module "
            "by -m"
        )
    if first:
        prepare_out_folder(out, "observe")
    # Where the script changes to another folder, this one stays.
    folder, own = str(Path(out).absolute()), os.getpid()
    watch = ScriptWatch(interval, Path(folder, "observe.jsonl") if first else None)
    with contextlib.ExitStack() as elsewhere:
        if json:
            elsewhere.enter_context(redirect_stdout_to_stderr())

        def report(ending: ScriptEnding) -> int:
            watch.__exit__(None, None, None)
            elsewhere.close()
            # Of several processes the first reports, also of those that torchrun did not start.
            if os.getpid() != own or not first or watch.rank != 0:
                return ending.code
            return _write_observation_report(watch, ending, out, folder, json)

        with report_and_exit_on_sigterm(report) as report_undisturbed:
            with watch:
                ending = run_script(script, arguments or [], module=module)
            return report_undisturbed(ending)


def _write_observation_report(watch: ScriptWatch, ending: ScriptEnding, out: str, folder: str, json: bool) -> int:
    """Print and write the report; return the exit code."""
    from ..observation.scripts import CHILD_PROCESS_REMEDY

    report = watch.make_report(ending.reason)
    how = _VERB_BY_EARLY_ENDING.get(ending.reason)
    if report is None:
        if ending.code:
            said = f"the script {how or ending.reason} before a torch optimizer had stepped twice"
            print(f"halfulp: {said}: nothing was observed, as a training is from its second step on", file=sys.stderr)
            return ending.code
        why = "; ".join([*watch.unseen, f"a training is observed from its second step on; {CHILD_PROCESS_REMEDY}"])
        exit_with_error(f"the script never stepped a torch optimizer twice that can be observed: {why}")
    if how:
        said = f"the script {how} after {report.steps} observed steps"
        report.record.unseen.insert(0, f"{said}: this is what was observed until then")
        print(f"halfulp: {said}; what was observed until then:", file=sys.stderr)
    try:
        print_result(report, json)
    finally:  # where the script has closed standard output too
        write_page_and_json(folder, "observe", report)
    if not json:
        print(f"\n{Path(out, 'observe.html')} shows it; {Path(out, 'observe.json')} holds the numbers.")
    return ending.code


def audit(
    a: Annotated[str, typer.Argument(metavar="A", help="The earlier checkpoint: a file or a folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The later checkpoint of the same run.")],
    lr: Annotated[float | None, typer.Option(help="Learning rate in place of the one that B holds.")] = None,
    out: OutFolderOption = None,
    json: JsonOption = False,
) -> int:
    """Compare two checkpoints of one run: what did not move, what rounding lost, what is NaN or of another dtype.

    Reads safetensors, torch.save (weights_only), sharded folders and folders of HF's Trainer, by memory map; nothing in
    them is executed. The exit code is 0 if nothing above a
    note was found, 1 if something was, 2 if a checkpoint cannot be read.
    """
    from ..observation import audit as compare_checkpoints

    prepare_out_folder(out, "audit")
    found = compare_checkpoints(a, b, lr=lr)
    print_result(found, json)
    write_page_and_json(out, "audit", found)
    return 0 if found.passed else 1


def forecast(
    checkpoint: Annotated[
        str, typer.Argument(help="Weights: a file of safetensors or torch.save, or a sharded folder.")
    ],
    lr: Annotated[float | None, typer.Option(help="Learning rate before the schedule; default: as saved.")] = None,
    schedule: Annotated[str, typer.Option(help="constant, linear, cosine or wsd.")] = "constant",
    steps: Annotated[int | None, typer.Option(help="Steps of the whole run.")] = None,
    warmup: Annotated[int, typer.Option(help="Steps over which the rate rises.")] = 0,
    decay: Annotated[int | None, typer.Option(help="Steps of wsd's fall; default: a fifth.")] = None,
    final_lr: Annotated[float, typer.Option(help="Learning rate at the end.")] = 0.0,
    start: Annotated[int | None, typer.Option(help="Steps made so far; default: as saved, else 0.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam, sgd or lion; default: as saved, else adamw.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="What weights are trained in, as bf16; default: as saved.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Default: as saved, else the optimizer's.")] = None,
    beta1: Annotated[float | None, typer.Option(help="Default: as saved, else the optimizer's.")] = None,
    beta2: Annotated[float | None, typer.Option(help="Default: as saved, else the optimizer's.")] = None,
    out: OutFolderOption = None,
    json: JsonOption = False,
) -> int:
    """Say before a training which layers rounding to nearest will freeze, when, and what would keep them moving.

    The exit code is 0 with nothing above a note, 1 with a finding, 2 on bad input.
    """
    from ..observation import forecast
    from ..observation._finding import find_worst_severity

    prepare_out_folder(out, "forecast")
    if (beta1 is None) != (beta2 is None):
        raise ValueError("give --beta1 and --beta2 together")
    betas = None if beta1 is None or beta2 is None else (beta1, beta2)
    length: dict[str, Any] = {"steps": steps, "warmup": warmup, "decay": decay, "final_lr": final_lr, "start": start}
    training: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "weight_decay": weight_decay, "betas": betas}
    found = forecast(checkpoint, lr, schedule, **length, **training)
    print_result(found, json)
    write_page_and_json(out, "forecast", found)
    return 0 if find_worst_severity(found.findings) in (None, "note") else 1


def verify(
    target: Annotated[
        str | None,
        typer.Argument(help="package.module:function that returns (model, batch) or (model, batch, loss)."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="A task's model and batch instead of a target.")] = None,
    recipe: Annotated[str, typer.Option(help="A recipe with scaled payloads or a gradient scale.")] = "scaled-fp16",
    trials: Annotated[int, typer.Option(help="How many draws of scales.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the scales.")] = 0,
    data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
    json: JsonOption = False,
) -> int:
    """Prove on a model that a recipe's scales change no gradient, or name the first operator that does.

    The exit code is 0 if all gradients agree and nothing fell back, else 1.
    """
    from ..recipes import verify

    if (target is None) == (task is None):
        exit_with_error("give either a target, package.module:function, or --task with a task's name")
    loaded = _load_target_to_verify(target) if target is not None else _load_task_to_verify(str(task), data, seed)
    model, batch, loss = loaded
    with exit_on_exception(f"verifying {target or task} raised", (ValueError, TypeError, NotImplementedError)):
        found = verify(model, batch, recipe, loss=loss, trials=trials, seed=seed)
    print_result(found, json)
    return 0 if found.passed else 1


def _load_task_to_verify(name: str, data: str | None, seed: int) -> tuple[Any, Any, Any]:
    import torch

    from ..trials.tasks import get

    task = get(name, data)
    if hasattr(task, "trial"):
        exit_with_error(f"task {name!r} has a training loop of its own and no model to verify")
    found = task.load()
    model = task.model(found, seed)
    inputs, targets = (x.float() if x.dtype == torch.float64 else x for x in next(task.batches(found, seed, 1)))
    return model, inputs, lambda logits: task.loss(logits, targets)


def _load_target_to_verify(target: str) -> tuple[Any, Any, Any]:
    import importlib

    name, _, function = target.partition(":")
    if not name or not function or name.endswith(".py"):
        exit_with_error(f"{target!r} is no module and a function in it: write package.module:function")
    # As `python -m` does: modules of the folder that one stands in are found.
    sys.path.insert(0, str(Path.cwd()))
    with exit_on_exception(f"cannot take {function!r} from {name!r}:"):
        make = getattr(importlib.import_module(name), function)
    with exit_on_exception(f"{target} raised"):
        made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        exit_with_error(f"{target} returned {type(made).__name__}: return (model, batch) or (model, batch, loss)")
    return (*made, None) if len(made) == 2 else made
