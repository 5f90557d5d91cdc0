"""One run of a script under one recipe, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ... import recipes
from ..._extensions import load_inherited
from ...observation.scripts import BackwardLosses, Ending, run_script
from ._substitute import RULES, Refusal, Substitution, substituted


def main() -> None:
    """Run `[recipe, result file, "file" or "module", script, *arguments]` of sys.argv and write the result as JSON."""
    load_inherited()
    recipe, result, kind, script, *arguments = sys.argv[1:]

    def write(found: dict[str, Any]) -> None:
        Path(result).write_text(json.dumps(found), encoding="utf-8")

    write(run(script, arguments, recipe, module=kind == "module", leave=write))


def run(script: str, arguments: list[str], recipe: str, module: bool = False, leave: Any = None) -> dict[str, Any]:
    """Run a script under a recipe.

    Args:
        script: its path, or the dotted name of a module.
        arguments: its own.
        recipe: a name.
        module: whether it is a module.
        leave: given the result where the script ends the process by os._exit.

    Returns:
        The losses that backward passes began with, without a scaler's factor; optimizer steps; how the script ended;
        why the recipe could not be used, or what else is to be said of it.
    """
    losses: list[float] = []
    done = Substitution()

    def left(ending: Ending) -> int:
        if leave is not None:
            leave(_report(losses, done, ending, None))
        return ending.code

    def log(loss: torch.Tensor) -> None:
        losses.append(float(loss))

    refused, ending = None, None
    try:
        with substituted(recipes.get(recipe)) as done, BackwardLosses(log):
            ending = run_script(script, arguments, passing=Refusal, module=module, leave=left)
    except Refusal as refusal:
        refused = str(refusal)
    return _report(losses, done, ending, refused)


def _report(losses: list[float], done: Substitution, ending: Ending | None, refused: str | None) -> dict[str, Any]:
    code = 0 if ending is None else ending.code
    if refused is None and not done.made and not code:
        refused = _nothing_to_convert(done)
    return {
        "losses": losses,
        "steps": done.steps,
        "refused": refused,
        "notes": _notes(done),
        "ended": None if ending is None else ending.reason,
        "code": code,
        "bytes_per_parameter": None if refused else done.bytes_per_parameter(),
    }


def _nothing_to_convert(done: Substitution) -> str:
    known = f"recipes replace torch.optim's {', '.join(RULES[:-1])} and {RULES[-1]}, and no subclasses of them"
    if done.others:
        return f"it trains by {', '.join(done.others)}; {known}"
    return f"it makes no torch optimizer in its own process, and other processes are not reached; {known}"


def _notes(done: Substitution) -> list[str]:
    notes = []
    if done.made > 1:
        notes.append(f"{done.made} optimizers: the loss is the mean over the backward passes of all")
    if done.made and done.others:
        notes.append(f"{', '.join(done.others)} and what it steps stayed as they are")
    return notes
