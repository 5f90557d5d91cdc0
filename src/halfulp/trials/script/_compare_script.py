"""A script's training under several recipes, beside float32 and a float32 twin."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import recipes

REFERENCE, TWIN = "fp32", "fp32-twin"
_WORKER = "from halfulp.trials.script._worker import main; main()"
# The loss is the mean over this share of the steps at the end.
_LAST = 0.1
# A recipe counts as different beyond so many times what the twin differs by, and this share of float32's loss.
_SPREAD = 2.0
TOLERANCE = 0.01


@dataclass(frozen=True)
class ScriptRow:
    """One recipe's run.

    Attributes:
        recipe: its name.
        steps: backward passes.
        loss: mean over the last tenth of them; None without any.
        gap: loss minus that of float32; None for float32 itself and where either is missing.
        verdict: "reference", "control", "no difference", "worse", "better", "diverged", "cannot" or "crashed".
        reason: why it cannot, or how it ended.
        bytes_per_parameter: weights, states, gradients, where halfulp's optimizer stepped; None elsewhere.
    """

    recipe: str
    steps: int
    loss: float | None
    gap: float | None
    verdict: str
    reason: str
    bytes_per_parameter: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(vars(self))


def compare_script(
    script: str,
    arguments: Sequence[str],
    names: Sequence[str],
    listen: Callable[[str], None] = lambda recipe: None,
) -> list[ScriptRow]:
    """Run a script once per recipe, each in a process of its own, and say what its training loss became.

    float32 and a twin whose start differs by 1e-7 run first: a gap within twice theirs, or within 1% of the
    loss, is no difference: one run cannot tell. Where the
    script makes torch's SGD, Adam or AdamW, its float32 model is converted and the recipe's optimizer returned;
    everything else is the script's own, seeds too.

    Args:
        script: its path.
        arguments: its own.
        names: recipes.
        listen: told each recipe before it runs.

    Returns:
        A row per recipe, float32 and its twin first.

    Raises:
        ValueError: an unknown recipe, or a script that fails as it is.
    """
    for name in names:
        recipes.get(name)
    order = list(dict.fromkeys([REFERENCE, TWIN, *names]))
    found: dict[str, dict[str, Any]] = {}
    for name in order:
        listen(name)
        found[name] = _run(script, arguments, name)
        if name == REFERENCE:
            _check_reference(found[name])
    loss = {name: _loss(one["losses"]) for name, one in found.items()}
    spread = max(_SPREAD * (_gap(loss[TWIN], loss[REFERENCE]) or 0.0), TOLERANCE * abs(loss[REFERENCE] or 0.0))
    return [_row(name, found[name], loss[name], loss[REFERENCE], spread) for name in order]


def _run(script: str, arguments: Sequence[str], recipe: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-c", _WORKER, recipe, str(result), script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.exists():
            return {**json.loads(result.read_text(encoding="utf-8")), "said": done.stderr}
        reason = f"ended with exit code {done.returncode}"
        return {"losses": [], "refused": None, "ended": reason, "code": 1, "said": done.stderr}


def _check_reference(run: dict[str, Any]) -> None:
    """The script has to train in float32 as it is, or nothing can be compared with it."""
    if run["refused"]:
        raise ValueError(f"the script cannot be compared under recipes: {run['refused']}")
    if run["code"]:
        last = (run["said"].strip().splitlines() or [run["ended"]])[-1]
        raise ValueError(f"the script {run['ended']} in float32 (exit code {run['code']}): {last}")
    if not run["losses"]:
        raise ValueError("the script called no backward of a loss: there is nothing to compare")


def _row(name: str, run: dict[str, Any], loss: float | None, reference: float | None, spread: float) -> ScriptRow:
    gap = None if name == REFERENCE or loss is None or reference is None else loss - reference
    verdict, reason = _verdict(name, run, loss, gap, spread)
    if verdict == "cannot":
        loss, gap = None, None
    steps = 0 if verdict == "cannot" else len(run["losses"])
    return ScriptRow(name, steps, _finite(loss), _finite(gap), verdict, reason, run.get("bytes_per_parameter"))


def _verdict(name: str, run: dict[str, Any], loss: float | None, gap: float | None, spread: float) -> tuple[str, str]:
    if run["refused"]:
        return "cannot", run["refused"]
    if run["code"]:
        last = (run["said"].strip().splitlines() or [""])[-1]
        return "crashed", f"{run['ended']}: {last}"
    if name == REFERENCE:
        return "reference", ""
    if name == TWIN:
        return "control", ""
    if loss is None or gap is None or not math.isfinite(loss):
        return "diverged", "its loss is not finite"
    if abs(gap) <= spread:
        return "no difference", ""
    return ("worse" if gap > 0 else "better"), ""


def _loss(losses: Sequence[float]) -> float | None:
    last = losses[-max(1, math.ceil(_LAST * len(losses))) :]
    return sum(last) / len(last) if last else None


def _gap(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else abs(one - other)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
