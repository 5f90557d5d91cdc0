"""How fast this commit is beside an earlier one: `python -m benchmarks.bench_commits --before REVISION`.

Both are checked out beside each other, and a process of each takes turns on one thread.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ._harness import HALF, ROOT
from ._results import Result, Table, save, show

TEXT = """The same calls in two commits, in processes that take turns, one thread each, by CPU time. A round of the \
later one lies between two of the earlier one, whose mean is its reference; rounds in which somebody else had the core \
for more than half of the time are dropped. The median over the rounds of {processes} pairs of processes, and the \
range of their medians. Every pair lays its memory out anew, which alone moves a figure by some percent."""
WINDOW, ROUNDS, TRIES = 0.03, 9, 40


class Worker:
    """A process that imports halfulp from one checkout."""

    def __init__(self, tree: Path, cache: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        environment["HALFULP_CACHE_DIR"] = str(cache)
        command = [sys.executable, str(ROOT / "benchmarks" / "_commit_cases.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def clock(self, case: str, calls: int) -> tuple[float, bool]:
        """CPU seconds per call, and whether nobody else had the core for half of the time."""
        self.process.stdin.write(f"{case} {calls}\n")
        words = self.process.stdout.readline().split()
        if not words:
            raise RuntimeError(f"the worker of {case!r} ended with code {self.process.wait()}; see its message above")
        cpu, wall = map(float, words)
        return cpu / calls, cpu >= HALF * wall

    def close(self) -> None:
        """Let it end."""
        self.process.stdin.close()
        self.process.wait()


def ratios(before: Worker, after: Worker, case: str) -> tuple[list[float], int]:
    """The later commit's times as shares of the earlier one's, and how many rounds were dropped."""
    for worker in (before, after):
        worker.clock(case, 1)
    calls = max(1, min(10_000, round(WINDOW / max(before.clock(case, 1)[0], 1e-7))))
    found: list[float] = []
    dropped = 0
    reference, calm = before.clock(case, calls)
    while len(found) < ROUNDS and dropped < TRIES:
        seconds, still = after.clock(case, calls)
        again, quiet = before.clock(case, calls)
        if calm and still and quiet:
            found.append(2 * seconds / (reference + again))
        else:
            dropped += 1
        reference, calm = again, quiet
    return found, dropped


def main() -> None:
    """Print the table and save it."""
    from ._commit_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--processes", type=int, default=3, help="pairs of processes")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in case]
    found: dict[str, list[float]] = {case: [] for case in cases}
    dropped = dict.fromkeys(cases, 0)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), given.before], cwd=ROOT, check=True)
        try:
            for pair in range(given.processes):
                workers = [Worker(root, Path(folder) / f"cache-{root.name}") for root in (tree, ROOT)]
                for case in cases:
                    some, lost = ratios(*workers, case)
                    found[case] += [statistics.median(some)] if some else []
                    dropped[case] += lost
                    print(pair, case, f"{found[case][-1]:.3f}" if some else "no undisturbed round", flush=True)
                for worker in workers:
                    worker.close()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    table = Table(
        f"Time of this commit as a share of {given.before}'s",
        {"case": "", "ratio": ".3f", "low": ".3f", "high": ".3f", "dropped": ""},
    )
    for case in cases:
        values = found[case]
        row = {"ratio": statistics.median(values), "low": min(values), "high": max(values)} if values else {}
        table.add(case=case, **row, dropped=dropped[case])
    text = TEXT.format(processes=given.processes)
    command = f"python -m benchmarks.bench_commits --before {given.before}"
    result = Result("commits", "Speed beside an earlier commit", text, command, tables=[table])
    if given.only:
        # A part of the cases is shown, and does not take the place of the whole table.
        show(result)
    else:
        save(result)


if __name__ == "__main__":
    main()
