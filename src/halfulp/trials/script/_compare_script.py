"""A script's training under several recipes, beside float32 and a float32 twin."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ... import recipes
from ..running._exit_code import how_it_ended, is_killed
from ..running._plan import REFERENCE, TWIN
from ._comparison import Run, ScriptComparison, ScriptRow

_WORKER = "from halfulp.trials.script._worker import main; main()"


class ScriptError(ValueError):
    """A script that does not train as it is, or gives nothing to compare.

    Attributes:
        said: what it printed to stderr.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


def compare_script(
    script: str,
    arguments: Sequence[str],
    names: Sequence[str],
    module: bool = False,
    listen: Callable[[str, ScriptRow | None, float], None] = lambda recipe, row, seconds: None,
) -> ScriptComparison:
    """Run a script once per recipe, each in a process of its own, and say what its training loss became.

    float32 and a twin whose start differs by 1e-7 run first: a gap within twice theirs, or within 1% of the
    loss, is no difference: one run cannot tell. Where the
    script makes torch's SGD, Adam or AdamW, its float32 model is converted and the recipe's optimizer returned;
    everything else is the script's own, seeds too.

    Args:
        script: its path, or the dotted name of a module.
        arguments: its own.
        names: recipes.
        module: whether it is a module.
        listen: told each recipe before it runs (with None), and afterwards its row and the seconds that it took.

    Returns:
        A row per recipe, float32 and its twin first.

    Raises:
        ValueError: an unknown recipe, or a script that fails as it is.
    """
    for name in names:
        recipes.get(name)
    found = ScriptComparison()
    for name in dict.fromkeys([REFERENCE, TWIN, *names]):
        listen(name, None, 0.0)
        begin = time.monotonic()
        run = _run(script, arguments, name, module)
        if name == REFERENCE:
            _check_reference(run)
        found.add(name, run)
        listen(name, found.row(name), time.monotonic() - begin)
    return found


def _run(script: str, arguments: Sequence[str], recipe: str, module: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-c", _WORKER, recipe, str(result), "module" if module else "file"]
        done = subprocess.run(
            [*command, script, *arguments], capture_output=True, text=True, errors="replace", check=False
        )
        if result.exists() and done.returncode >= 0:
            with_result = json.loads(result.read_text(encoding="utf-8"))
            return Run(**with_result, said=done.stderr)
    return Run(ended=_end_of(done.returncode), code=done.returncode or 1, said=done.stderr)


def _end_of(code: int) -> str:
    """How a process ended that left no result, in words.

    >>> _end_of(-9), _end_of(3)
    ('was killed by SIGKILL, as where memory is short', 'ended with exit code 3 before it could report')
    """
    if code >= 0:
        return f"{how_it_ended(code)} before it could report"
    return f"{how_it_ended(code)}{', as where memory is short' if is_killed(code) else ''}"


def _check_reference(run: Run) -> None:
    """The script has to train in float32 as it is, or nothing can be compared with it."""
    if run.refused:
        raise ScriptError(f"the script cannot be compared under recipes: {run.refused}", run.said)
    if run.code:
        why = f": {run.last_words()}" if run.said.strip() else ""
        raise ScriptError(f"the script {run.how()} in float32{why}", run.said)
    if not run.losses:
        raise ScriptError("the script called no backward of a loss: there is nothing to compare", run.said)
    if not run.steps:
        raise ScriptError(
            "the script computes gradients and never steps an optimizer, so that its weights stay: there is nothing to "
            "compare",
            run.said,
        )
