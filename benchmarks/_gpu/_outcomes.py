"""A pytest plugin that writes the outcome of each test to a file as it comes: `-p ..._outcomes --outcomes FILE`.

Whoever reads the file of a run that hangs, or was killed, knows what had been done and what was at work. Lines are
JSON: {"tests": how many there are}, {"began": name}, {"test": name, "outcome": ..., "reason": ..., "s": ...}.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PHASES = ("setup", "call", "teardown")
WORST = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --outcomes."""
    parser.addoption("--outcomes", type=Path, required=True, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    """Write from the process that hears of all tests: with pytest-xdist, not from its workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("outcomes")), "outcomes of tests")


class Outcomes:
    """Follows the tests of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("", encoding="utf-8")
        self.open: dict[str, dict[str, object]] = {}

    def write(self, **line: object) -> None:
        """Append a line, which is in the file when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell how many tests there are; a process that only hands them out has none of its own."""
        if session.items:
            self.write(tests=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Tell how many tests the workers share; each finds all of them."""
        self.write(tests=len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell of a file that cannot be read, or is skipped as a whole."""
        if not report.passed:
            self.write(test=report.nodeid, outcome=report.outcome, reason=reason(report), s=0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell of a test that begins."""
        self.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test; tell of the test with its last."""
        found = self.open.setdefault(report.nodeid, {"outcome": "passed", "reason": "", "s": 0.0})
        found["s"] += report.duration
        if WORST.index(report.outcome) > WORST.index(found["outcome"]):
            found |= {"outcome": report.outcome, "reason": reason(report)}
        # One whose worker died has a single report, of no phase.
        if report.when == "teardown" or report.when not in PHASES:
            self.write(test=report.nodeid, **self.open.pop(report.nodeid))


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return one line of why a test failed or was skipped."""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}".removesuffix(": ")
    told = report.longrepr
    if isinstance(told, tuple):
        lines = str(told[2]).removeprefix("Skipped: ").splitlines()
    elif hasattr(told, "reprcrash"):
        lines = told.reprcrash.message.splitlines()
    else:
        lines = str(told or "").strip().splitlines()[-1:]  # a traceback ends with the error
    when, words = getattr(report, "when", "call"), (lines or [""])[0].removeprefix("E  ").strip()
    return f"in its {when}: {words}" if report.failed and when in ("setup", "teardown") else words
