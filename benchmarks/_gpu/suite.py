"""The tests marked `cuda`, by pytest in a process of its own, whose outcomes are kept as they come."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .._harness import ROOT
from .._results import Table
from . import _processes
from ._run import Run, Unavailable

MARK = "mark.cuda"
WORKERS = 6  # where pytest-xdist is installed
# pytest's own options of the project but for warnings as errors: those of a package that is beside the matter end no
# test here.
OPTIONS = (
    "-o",
    "addopts=",
    "--import-mode=importlib",
    "-q",
    "-p",
    "no:cacheprovider",
    "-o",
    "filterwarnings=default",
    "--continue-on-collection-errors",
)
COLUMNS = {"test": "", "passed": ",d", "failed": ",d", "skipped": ",d", "s": ".1f", "met": "", "reason": ""}
PAUSE = 0.2  # seconds between two looks at what has come
PRINTED = 8000  # characters of pytest's output


LONGEST = "arithmetic/expansions/test_triton.py"  # compiles the most kernels


def files() -> list[str]:
    """The files that have such a test, the one that takes longest first."""
    return sorted(
        (str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()),
        key=lambda name: (not name.endswith(LONGEST), name),
    )


def measure(run: Run) -> None:
    """One row per test function."""
    how = "" if run.on_gpu else " Without a device all are skipped."
    table = run.table("Tests that need CUDA", COLUMNS, f"`pytest -m cuda`.{how}", keys=["test"])
    run.attempt("pytest", lambda: _tests(run, table), lambda why: run.add(table, test="pytest", reason=why))


def _tests(run: Run, table: Table) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise Unavailable("pytest is not installed")
    chosen = files()
    if not chosen:
        raise RuntimeError("no file of tests/ marks a test `cuda`")
    with tempfile.TemporaryDirectory() as folder:
        follow(run, table, chosen[-1:] if run.tiny else chosen, Path(folder))


def follow(run: Run, table: Table, chosen: list[str], folder: Path) -> None:
    """Run pytest on files, with a row for each outcome as it comes; what has not come when time is up is named.

    Raises:
        RuntimeError: pytest was not done in time, ended by itself before that, or found no test.
    """
    written, printed, limit = folder / "outcomes.jsonl", folder / "output.txt", max(1.0, run.left())
    command = [sys.executable, "-m", "pytest", "-m", "cuda", *OPTIONS]
    command += ["-p", f"{__package__}._outcomes", f"--outcomes={written}"]
    command += ["-o", f"faulthandler_timeout={limit / 2:.0f}", *chosen]  # where a test hangs is in the output
    if run.on_gpu and importlib.util.find_spec("xdist"):
        command += ["-n", str(WORKERS), "--maxschedchunk", "1"]  # no test waits behind a long one
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    lines, heard = _Lines(written), _Heard(run, table)
    with printed.open("w", encoding="utf-8") as output:
        process = _processes.start(
            command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": path}
        )
        try:
            while process.poll() is None and run.left() > 0:
                heard.take(lines.new())
                time.sleep(PAUSE)
            code = process.poll()
        finally:
            _processes.end(process)
            heard.take(lines.new())
            said = printed.read_text(encoding="utf-8", errors="replace")
            print(said[-PRINTED:], flush=True)
    if code is None:
        raise RuntimeError(heard.unfinished(limit))
    heard.take(
        [
            {"test": test, "outcome": "failed", "reason": f"pytest ended with code {code} while it ran", "s": 0.0}
            for test in list(heard.at_work)
        ]
    )
    if code not in (0, 1) or not heard.done:
        raise RuntimeError(f"pytest ended with code {code}, {heard.progress()}: {said[-300:].strip()}")


class _Lines:
    """The lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0

    def new(self) -> Iterator[dict]:
        """Yield the whole lines that have come since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        yield from map(json.loads, whole.splitlines())


class _Heard:
    """What has been heard of the tests, and its rows."""

    def __init__(self, run: Run, table: Table) -> None:
        self.run, self.table = run, table
        self.tests, self.done = 0, 0
        self.at_work: dict[str, float] = {}

    def take(self, lines: Iterable[dict]) -> None:
        """Note what has come."""
        for line in lines:
            if "tests" in line:
                self.tests = max(self.tests, line["tests"])
            elif "began" in line:
                self.at_work[line["began"]] = time.monotonic()
            else:
                self.at_work.pop(line["test"], None)
                self.done += 1
                self._row(**line)

    def _row(self, test: str, outcome: str, reason: str, s: float) -> None:
        name, reason = _dotted(test), (reason or outcome)[:300]
        cells = {"test": name.partition("[")[0]}
        counts = {kind: outcome == kind for kind in ("passed", "failed", "skipped")}
        self.run.count(self.table, cells, **counts, s=s)
        if outcome == "skipped":
            self.run.note(self.table, cells, reason=reason, met=None)
        if outcome == "failed":
            self.run.fail(name, reason)

    def unfinished(self, seconds: float) -> str:
        """Return what was not done in time; the tests at work then have rows of their own."""
        now, names = time.monotonic(), []
        for test, began in self.at_work.items():
            name, lasted = _dotted(test), now - began
            names.append(f"{name} (for {lasted:.0f} s)")
            cells = {"test": name.partition("[")[0]}
            self.run.count(self.table, cells, passed=0, failed=0, skipped=0, s=lasted)
            self.run.note(self.table, cells, reason=f"at work for {lasted:.0f} s when the time was up", met=False)
        at_work = f"; at work then: {', '.join(names)}" if names else ""
        return f"not done within {seconds:.0f} s: {self.progress()}{at_work}"

    def progress(self) -> str:
        """Return how many tests were done."""
        return f"{self.done} of {self.tests} tests done" if self.tests else "no test found so far"


def _dotted(test: str) -> str:
    """A test's name with dots, without the folder that all have in common."""
    file, mark, rest = test.partition("::")
    head, bracket, tail = rest.partition("[")
    return (
        file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
        + mark.replace("::", ".")
        + head.replace("::", ".")
        + bracket
        + tail
    )
