"""One run of a script under one recipe, in a process of its own."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ... import recipes
from ..._extensions import load_inherited
from ...observation.scripts import run_script
from ._substitute import Refusal, substituted


def main() -> None:
    """Run `[recipe, result file, script, *arguments]` of sys.argv; what came out is written as JSON."""
    load_inherited()
    recipe, result, script, *arguments = sys.argv[1:]
    found = run(script, arguments, recipe)
    Path(result).write_text(json.dumps(found), encoding="utf-8")


def run(script: str, arguments: list[str], recipe: str) -> dict[str, Any]:
    """Return the losses that backward began with, how the script ended, and why the recipe could not be used if so."""
    losses: list[float] = []
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def logged(tensors: Any, *args: Any, **options: Any) -> Any:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            losses.append(float(tensors.detach()))
        return backward(tensors, *args, **options)

    torch.autograd.backward = logged
    refused, ending, done = None, None, {}
    try:
        with substituted(recipes.get(recipe)) as done:
            ending = run_script(script, arguments, passing=Refusal)
    except Refusal as refusal:
        refused = str(refusal)
    finally:
        torch.autograd.backward = backward
    if refused is None and "optimizer" not in done and ending is not None and not ending.code:
        refused = "the script makes no torch.optim.SGD, Adam or AdamW itself, so that there is no place to convert at"
    size = getattr(done.get("optimizer"), "bytes_per_parameter", None)
    return {
        "losses": losses,
        "refused": refused,
        "ended": None if ending is None else ending.reason,
        "code": 0 if ending is None else ending.code,
        "bytes_per_parameter": None if size is None or refused else size(),
    }
