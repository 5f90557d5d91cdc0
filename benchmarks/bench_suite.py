"""What the test suite costs: time, and the memory of every worker: `python -m benchmarks.bench_suite`."""

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from ._harness import ROOT
from ._results import Result, Table, machine, save
from ._suite_meter import FOLDER

TEXT = """The whole suite as CI runs it: `pytest -n 2` on two cores, a fixed seed, no kernel compiled before. Memory \
is the most that a worker ever had resident (VmHWM). CPU time is that of all processes together, and does not depend \
on who else uses the machine; wall time does."""
SUITE = {
    "run": "",
    "commit": "",
    "tests": ",d",
    "failed": "",
    "minutes": ".1f",
    "CPU minutes": ".1f",
    "GB, worker 1": ".2f",
    "GB, worker 2": ".2f",
    "bar": "",
    "met": "",
}
NOTE = "before: both cores were shared with other work, which its wall time shows; 20 minutes on a free machine."
FILES = {"file": "", "tests": "", "CPU seconds": ".1f", "share": ".1%", "MB kept": ".0f", "MB at most": ".0f"}
MINUTES, GIGABYTES = 8, 2


def run(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall seconds and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def failures(report: Path) -> int:
    """How many tests failed, from a JUnit report."""
    cases = ET.parse(report).iter("testcase")
    return sum(any(case.find(word) is not None for word in ("failure", "error")) for case in cases)


def slowest(noted: list[list[dict]], count: int) -> Table:
    """The files that cost most CPU time, from what every worker noted."""
    seconds, tests, kept, most = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for lines in noted:
        held = lines[0]["now"]
        for line in lines[1:]:
            if "test" in line:
                tests[line["test"].partition("::")[0]] += 1
                continue
            name = line["file"]
            seconds[name] += line["cpu"]
            kept[name] += line["now"] - held
            most[name] = max(most[name], line["peak"])
            held = line["now"]
    note = f"Of {seconds.total():.0f} CPU seconds in tests; what a worker kept when a file had ended, and held at most."
    table = Table("The slowest test files", FILES, note=note)
    for name, value in seconds.most_common(count):
        share = value / seconds.total()
        row = {"file": name, "tests": tests[name], "CPU seconds": value, "share": share}
        table.add(**row, **{"MB kept": kept[name] / 1e6, "MB at most": most[name] / 1e6})
    return table


def measured(label: str, seed: int, workers: int, count: int, rest: list[str]) -> tuple[dict, Table]:
    """One run as a row, and its slowest files."""
    compileall.compile_dir(ROOT / "src", quiet=1)  # as CI does
    with tempfile.TemporaryDirectory() as folder:
        report, meter = Path(folder) / "report.xml", Path(folder) / "meter"
        meter.mkdir()
        command = [sys.executable, "-m", "pytest", "-n", str(workers), f"--hypothesis-seed={seed}"]
        command += ["-p", "benchmarks._suite_meter", f"--junitxml={report}", *rest]
        given = {
            "HALFULP_TEST_SEED": str(seed),
            "HALFULP_CACHE_DIR": f"{folder}/kernels",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            FOLDER: str(meter),
        }
        wall, cpu = run(command, {**os.environ, **given})
        noted = [[json.loads(line) for line in file.read_text().splitlines()] for file in meter.iterdir()]
        failed = failures(report)
    peaks = sorted((max(line.get("peak", 0) for line in lines) / 1e9 for lines in noted), reverse=True)
    tests = sum("test" in line for lines in noted for line in lines)
    row = {"run": label, "commit": machine()["commit"], "tests": tests, "failed": failed}
    row |= {"minutes": wall / 60, "CPU minutes": cpu / 60}
    row |= {f"GB, worker {k}": peak for k, peak in enumerate(peaks[:2], 1)}
    met = wall < 60 * MINUTES and max(peaks, default=0.0) < GIGABYTES and not failed
    row |= {"bar": f"under {MINUTES} minutes and {GIGABYTES} GB per worker, 0 failed", "met": met}
    return row, slowest(noted, count)


def main() -> None:
    """Runs the suite and puts its row beside the rows of other labels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="after", help="the row to write, in place of one of the same label")
    parser.add_argument("--seed", type=int, default=1234567)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, default=25, help="how many of the slowest files to list")
    arguments, rest = parser.parse_known_args()
    result = Result("suite", "The test suite", TEXT, "python -m benchmarks.bench_suite")
    kept = result.earlier_rows("run")
    row, files = measured(arguments.label, arguments.seed, arguments.workers, arguments.files, rest)
    table = Table("The whole suite, two workers on two cores", SUITE, note=NOTE)
    kept.pop((arguments.label,), None)
    table.rows = [*kept.values(), row]
    result.tables = [table, files]
    save(result)


if __name__ == "__main__":
    main()
