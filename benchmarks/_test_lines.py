"""Which lines of the library each test runs: recorded by coverage (`pip install coverage`), and kept as bits."""

import ast
import json
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ._faults import Fault


class LineRecorder:
    """A pytest plugin that writes which lines of the library each test runs, as bits, and its processor time."""

    def __init__(self, path: Path, root: Path) -> None:
        import coverage

        self.path, self.root, self.seconds, self.start = path, root, dict[str, float](), 0.0
        self.coverage = coverage.Coverage(data_file=None, config_file=False, source=[str(root / "src")], messages=False)
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid, location) -> None:
        """A test begins."""
        self.coverage.switch_context(nodeid)
        self.start = time.process_time()

    def pytest_runtest_logfinish(self, nodeid, location) -> None:
        """A test has ended."""
        self.seconds[nodeid] = time.process_time() - self.start
        self.coverage.switch_context("")

    def pytest_sessionfinish(self, session) -> None:
        """All tests have run."""
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            found = lines[Path(file).relative_to(self.root).as_posix()] = Counter[str]()
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    found[test] |= 1 << line
        self.path.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


@dataclass
class Lines:
    """What every test takes, and of each file of the library the lines that a test runs, or an import under ""."""

    seconds: dict[str, float] = field(default_factory=dict)
    bits: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, path: Path) -> None:
        """What one run of a test file has written."""
        found = json.loads(path.read_text())
        self.seconds |= found["seconds"]
        for file, lines in found["lines"].items():
            for test, bits in lines.items():
                self.bits[file][test] |= bits

    def running(self, file: str, wanted: int) -> set[str]:
        """The tests that run one of some lines; "" for an import."""
        return {test for test, bits in self.bits.get(file, {}).items() if bits & wanted}

    def quickest(self, tests: set[str]) -> list[str]:
        """In order of time."""
        return sorted(tests & self.seconds.keys(), key=lambda test: (self.seconds[test], test))


def statement_lines(source: bytes, fault: Fault) -> int:
    """The lines of the statement that a fault lies in, as bits: of one with a body its head, of a function all."""
    starts = [0, *(found.end() for found in re.finditer(rb"\n", source))]
    found = range(fault.line, fault.line + 1)
    for node in ast.walk(ast.parse(source)):  # inner ones come later
        if isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
            start = starts[node.lineno - 1] + node.col_offset
            if start <= fault.start and fault.end <= starts[node.end_lineno - 1] + node.end_col_offset:
                head = not isinstance(node, ast.FunctionDef) and getattr(node, "body", None)
                found = range(node.lineno, node.body[0].lineno if head else node.end_lineno + 1)
    return sum(1 << line for line in found)
