"""The tests marked `cuda`, by pytest in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from .._harness import ROOT
from ._run import Run, Unavailable

MARK = "mark.cuda"
WORKERS = 4  # where pytest-xdist is installed
# pytest's own options of the project but for warnings as errors: those of a package that is beside the matter end no
# test here.
OPTIONS = ("-o", "addopts=", "--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
COLUMNS = {"test": "", "passed": ",d", "failed": ",d", "skipped": ",d", "s": ".1f", "met": "", "reason": ""}


def files() -> list[str]:
    """The files that have such a test."""
    return sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()
    )


def measure(run: Run) -> None:
    """One row per test function."""
    how = "" if run.on_gpu else " Without a device all are skipped."
    table = run.table("Tests that need CUDA", COLUMNS, f"`pytest -m cuda`.{how}", keys=["test"])
    run.attempt("pytest", lambda: _tests(run, table), lambda why: run.add(table, test="pytest", reason=why))


def _tests(run: Run, table) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise Unavailable("pytest is not installed")
    chosen = files()
    if not chosen:
        raise RuntimeError("no file of tests/ marks a test `cuda`")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", *OPTIONS, f"--junit-xml={report}"]
        command += chosen[-1:] if run.tiny else chosen
        if run.on_gpu and importlib.util.find_spec("xdist"):
            command += ["-n", str(WORKERS)]
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(
                command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=max(1.0, run.left()),
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done within {error.timeout:.0f} s") from None
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
        if not report.exists():
            raise RuntimeError(f"pytest ended with code {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    if not cases:
        raise RuntimeError(f"no test was found: pytest ended with code {done.returncode}")
    for case in cases:
        _row(run, table, case)


def _row(run: Run, table, case: ElementTree.Element) -> None:
    name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}"
    kinds = {child.tag: child.get("message") or "" for child in case}
    outcome = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
    wrong = outcome in ("error", "failure")
    cells = {"test": name.partition("[")[0]}
    counts = {"passed": outcome == "passed", "failed": wrong, "skipped": outcome == "skipped"}
    run.count(table, cells, **counts, s=float(case.get("time", 0)))
    reason = (kinds.get(outcome, "").splitlines() or [outcome])[0][:300]
    if outcome == "skipped":
        run.note(table, cells, reason=reason, met=None)
    if wrong:
        run.fail(name, reason)
