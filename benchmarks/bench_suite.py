"""What the test suite costs: time, and the memory of every worker: `python -m benchmarks.bench_suite`."""

import argparse
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
from ._results import Result, Table, load, machine, save

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
FILES = {"file": "", "tests": "", "seconds": ".1f", "share": ".1%"}
MINUTES, GIGABYTES = 8, 2


def children(process: int) -> list[int]:
    """The processes that one started and that still run."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue
    return found


def most_resident(process: int) -> int:
    """KiB that a process has had resident at most; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def run(command: list[str], environment: dict[str, str]) -> tuple[float, float, list[float]]:
    """Wall seconds, CPU seconds, and each worker's peak in GB, largest first."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    pytest = subprocess.Popen(command, cwd=ROOT, env=environment)
    peaks: dict[int, int] = {}
    while pytest.poll() is None:
        for worker in children(pytest.pid):
            peaks[worker] = max(peaks.get(worker, 0), most_resident(worker))
        time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - start, cpu, sorted((1024 * size / 1e9 for size in peaks.values()), reverse=True)


def files(report: Path) -> tuple[Counter[str], Counter[str], int]:
    """Seconds and tests by file, from a JUnit report, and how many tests failed."""
    seconds, tests, failed = Counter[str](), Counter[str](), 0
    for case in ET.parse(report).iter("testcase"):
        name = case.get("classname", "")
        seconds[name] += float(case.get("time", 0))
        tests[name] += 1
        failed += any(case.find(word) is not None for word in ("failure", "error"))
    return seconds, tests, failed


def measured(label: str, seed: int, workers: int, rest: list[str]) -> tuple[dict, Table]:
    """One run as a row, and its slowest files."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(workers), f"--hypothesis-seed={seed}"]
        command += ["-o", "junit_duration_report=total", f"--junitxml={report}", *rest]
        given = {
            "HALFULP_TEST_SEED": str(seed),
            "HALFULP_CACHE_DIR": f"{folder}/kernels",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "OMP_NUM_THREADS": "1",
        }
        wall, cpu, peaks = run(command, {**os.environ, **given})
        seconds, tests, failed = files(report)
    row = {"run": label, "commit": machine()["commit"], "tests": tests.total(), "failed": failed}
    row |= {"minutes": wall / 60, "CPU minutes": cpu / 60}
    row |= {f"GB, worker {k}": peak for k, peak in enumerate(peaks[:2], 1)}
    met = wall < 60 * MINUTES and max(peaks, default=0.0) < GIGABYTES and not failed
    row |= {"bar": f"under {MINUTES} minutes and {GIGABYTES} GB per worker, 0 failed", "met": met}
    slowest = Table("The slowest test files", FILES, note="Seconds of all workers together, fixtures included.")
    for name, value in seconds.most_common(25):
        slowest.add(file=name, tests=tests[name], seconds=value, share=value / seconds.total())
    return row, slowest


def main() -> None:
    """Runs the suite and puts its row beside the rows of other labels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="after", help="the row to write, in place of one of the same label")
    parser.add_argument("--seed", type=int, default=1234567)
    parser.add_argument("--workers", type=int, default=2)
    arguments, rest = parser.parse_known_args()
    result = Result("suite", "The test suite", TEXT, "python -m benchmarks.bench_suite")
    kept = load(result.path()).tables[0].rows if result.path().exists() else []
    row, slowest = measured(arguments.label, arguments.seed, arguments.workers, rest)
    table = Table("The whole suite, two workers on two cores", SUITE, note=NOTE)
    table.rows = [old for old in kept if old["run"] != arguments.label] + [row]
    result.tables = [table, slowest]
    save(result)


if __name__ == "__main__":
    main()
