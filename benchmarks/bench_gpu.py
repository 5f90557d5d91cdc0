"""Everything that only a GPU can show, in one command: `python -m benchmarks gpu`; `--dry-run` tries it on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from halfulp.environment import describe_processor

from ._gpu import _processes, _run, training
from ._harness import ROOT
from ._results import FOLDER, Result, Table

SECONDS = 570  # of the whole
RESTARTS = 3  # of a process that dies
SHOWN = 40  # lines of one part that failed, or were not reached
GRACE = 0.85  # the share of a part's seconds after which it begins nothing more
TEXT = """What only a GPU can show: the tests marked `cuda`; bits of optimizer steps and of `quantize` beside the \
reference on the CPU; AdamW steps and `quantize` beside torch's own; the memory of a training step; \
synchronisations of the device; averages and exact sums; scaled tensors, gradient scaling and MCTensors beside plain \
tensors; short trainings. Each part runs in processes of its own, with a limit of time, and its findings are kept as \
they come: a crash costs the rows that it hits."""
COLUMNS = {
    "part": "", "outcome": "", "s": ".0f", "rows": ",d", "failed": ",d", "not reached": ",d", "device": "",
    "torch": "", "triton": "", "what failed first": "", "met": "",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part: its module in `_gpu`, the most seconds that it may take, and the processes that share it."""

    name: str
    seconds: float
    processes: int = 1


# Those of one row run at the same time: what is not timed. The order is that of worth, as the end may be cut off.
STAGES: tuple[tuple[Part, ...], ...] = (
    (Part("device", 45),),
    (Part("steps", 170, 8), Part("quantize", 170, 2), Part("suite", 190)),
    (Part("adamw", 90),),
    (Part("quantize_speed", 45),),
    (Part("products", 30),),
    (Part("memory", 85), Part("synchronisations", 85), Part("training", 85, 6)),
    (Part("mctensor", 40),),
    (Part("averages", 30),),
    (Part("scaler", 130),),
    (Part("scaled", 240),),
)
NAMES = tuple(part.name for stage in STAGES for part in stage)


@dataclass
class Found:
    """What a part's processes have written, added up."""

    facts: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, path: Path) -> dict:
        """Add what one process wrote, if it wrote anything; returns it."""
        if not path.exists():
            return {}
        data = json.loads(path.read_text())
        self.facts = self.facts or data["facts"]
        self.failures += data["failures"]
        self.late += data["late"]
        for given in data["tables"]:
            self._table(Table(**given), data["keys"].get(given["title"]))
        return data

    def _table(self, table: Table, keys: list[str] | None) -> None:
        mine = next((one for one in self.tables if one.title == table.title), None)
        if mine is None:
            self.tables.append(table)
            return
        for row in table.rows:
            same = [one for one in mine.rows if keys and all(one[key] == row[key] for key in keys)]
            if not same:
                mine.rows.append(row)
                continue
            for name, value in row.items():
                if name == "met":
                    same[0][name] = same[0][name] and value
                elif name not in keys and not isinstance(value, str):
                    same[0][name] = same[0].get(name, 0) + value


class Session:
    """All parts, one stage after another, and the file that holds what they found."""

    def __init__(self, path: Path, dry: bool, one_process: bool, seconds: float, commit: str = "") -> None:
        self.path, self.dry, self.one_process = path, dry, one_process
        self.deadline = time.monotonic() + seconds
        self.commit = commit or current_commit()
        self.log = path.with_suffix(".log")
        self.log.unlink(missing_ok=True)
        self.parts = Table("Parts", COLUMNS)
        self.found: dict[str, Found] = {}
        self.result = Result("gpu", "On a GPU", TEXT, "python -m benchmarks gpu" + " --dry-run" * dry)
        self._lock = threading.Lock()
        self._working: set[subprocess.Popen] = set()
        self._stopped = False

    def stage(self, parts: Sequence[Part]) -> None:
        """Run some parts at the same time, but those that share this process, which run in its main thread."""
        if self.one_process:
            for part in parts:
                self.part(part)
            return
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            try:
                list(pool.map(self.part, parts))
            except BaseException:  # an interruption reaches this process alone
                self.stop()
                raise

    def stop(self) -> None:
        """End all processes, and begin no more."""
        with self._lock:
            self._stopped = True
            working = list(self._working)
        for process in working:
            process.terminate()
        for process in working:
            _processes.end(process)

    def part(self, part: Part) -> None:
        """Run one part, and keep what it found, whatever happens to it."""
        limit = min(part.seconds, self.deadline - time.monotonic())
        found, start = Found(), time.monotonic()
        if limit < 5:
            found.late.append("the whole part: no time was left")
        else:
            try:
                self._run(part, limit, found)
            except Exception as error:  # what is wrong here must not cost the other parts
                found.failures.append(f"{part.name}: {_run.one_line(error)}")
        found.seconds = time.monotonic() - start
        with self._lock:
            self.found[part.name] = found
            self._keep(part.name, found)

    def _run(self, part: Part, limit: float, found: Found) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if self.one_process:
                path = Path(folder) / "found.json"
                _run.work(_run.Run(part.name, "cpu", True, limit * GRACE, path=path))
                found.take(path)
                return
            count = processes(part, self.dry)
            with ThreadPoolExecutor(count) as pool:
                shares = [pool.submit(self._share, part, limit, Path(folder), (n, count)) for n in range(count)]
                for share in shares:
                    for path, failure in share.result():
                        found.take(path)
                        found.failures += [failure] if failure else []

    def _share(self, part: Part, limit: float, folder: Path, share: tuple[int, int]) -> list[tuple[Path, str]]:
        """Run one process of a part; one that dies is followed by another, which leaves out what killed it."""
        end, first, written = time.monotonic() + limit, 0, []
        for attempt in range(1 + RESTARTS):
            left = end - time.monotonic()
            if self._stopped or (left < 5 and attempt):
                break
            path = folder / f"{share[0]}-{attempt}.json"
            code = self._process(part, path, left, share, first)
            data = json.loads(path.read_text()) if path.exists() else {}
            if data.get("done"):
                written.append((path, ""))
                break
            begun = data.get("attempted", 0)
            how = "was killed at its limit of time" if code is None else f"ended with code {code}"
            where = f"in attempt {begun}" if begun > first else f"before attempt {first + 1}"
            # One that died before its first attempt has left out nothing more than the one before it.
            first = max(first, begun)
            failed = f"{part.name}: a process {how}, {where}; its output is in {self.log.name}"
            # One that left by itself has said why.
            written.append((path, "" if code == 0 and data.get("failures") else failed))
            if code is None:
                break
        return written

    def _process(self, part: Part, path: Path, seconds: float, share: tuple[int, int], first: int) -> int | None:
        """A process's exit code, None where it had to be killed; its output goes to the log."""
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks._gpu._run", part.name, "--json", str(path)]
        command += ["--seconds", str(seconds * GRACE), "--share", *map(str, share), "--first", str(first)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
        if share[1] > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (2 * share[1])))
        output = path.with_suffix(".log")
        with output.open("w") as log:
            process = _processes.start(
                [*command, *(["--dry-run"] if self.dry else [])], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
            with self._lock:
                self._working.add(process)
            try:
                code: int | None = process.wait(0 if self._stopped else seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _processes.end(process)
                with self._lock:
                    self._working.discard(process)
        with self._lock, self.log.open("a") as log:
            log.write(f"== {part.name} {share[0]}\n{output.read_text(errors='replace')}\n")
        return code

    def _keep(self, name: str, found: Found) -> None:
        """A row of the part, and everything so far in the file."""
        outcome = "failed" if found.failures else "incomplete" if found.late else "done"
        self.parts.add(
            **{
                "part": name,
                "outcome": outcome,
                "s": found.seconds,
                "rows": sum(len(table.rows) for table in found.tables),
                "failed": len(found.failures),
                "not reached": len(found.late),
                "device": found.facts.get("device", "unknown"),
                "torch": found.facts.get("torch", "unknown"),
                "triton": found.facts.get("triton", "unknown"),
                "what failed first": (found.failures or found.late or [""])[0],
                "met": None if self.dry else not found.failures,
            }
        )
        self.save()
        print(f"{name}: {outcome}, {found.seconds:.0f} s", flush=True)

    def save(self) -> None:
        """Write the whole file."""
        known = [name for name in NAMES if name in self.found]
        facts = next((self.found[name].facts for name in known if self.found[name].facts), {})
        self.result.machine = {"processor": describe_processor(), **facts, "commit": self.commit}
        tables = [table for name in known for table in self.found[name].tables if table.rows]
        self.result.tables = [self.parts, *summaries(tables), *tables, *self._lists(known)]
        _run.write_whole(self.path, json.dumps(asdict(self.result), indent=1, default=float) + "\n")

    def _lists(self, known: Sequence[str]) -> list[Table]:
        """What failed and what was not reached, line by line."""
        made = []
        for title, attribute in (("What failed", "failures"), ("What was not reached", "late")):
            table = Table(title, {"part": "", "what": ""})
            for name in known:
                lines = getattr(self.found[name], attribute)
                for line in lines[:SHOWN]:
                    table.add(part=name, what=line)
                if len(lines) > SHOWN:
                    table.add(part=name, what=f"and {len(lines) - SHOWN} more")
            made += [table] if table.rows else []
        return made


def summaries(tables: Sequence[Table]) -> list[Table]:
    """The trainings' means over seeds."""
    trained = next((table for table in tables if table.title == training.TITLE), None)
    rows = training.summary(trained.rows) if trained else []
    columns = {"recipe": "", "seeds": ",d", "in float32": ".4f", "range": ".4f", "gap": "+.2%"}
    return [Table("Trainings: validation loss over seeds", columns, rows)] if rows else []


def processes(part: Part, dry: bool) -> int:
    """How many processes share a part: as many as three quarters of the cores at most; one in a dry run."""
    return 1 if dry else max(1, min(part.processes, (os.cpu_count() or 1) * 3 // 4))


def search_path() -> list[str]:
    """Where halfulp lies beside this file, which needs no installation, and what was given besides."""
    return [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def current_commit() -> str:
    """The commit of this folder, where there is git."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True)
        return done.stdout.strip() or "unknown"
    return "unknown"


def device_reason() -> str:
    """Why there is no CUDA device; empty where there is one. Asked of another process, so that this one holds none."""
    code = "import torch; print('' if torch.cuda.is_available() else f'torch {torch.__version__} sees none')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], text=True, capture_output=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]
    return done.stdout.strip()


def show(result: Result, found: dict[str, Found]) -> None:
    """Print what failed, then the tables, as plain text."""
    failures = [f"{name}: {line}" for name, one in found.items() for line in one.failures]
    print(f"\n{len(failures)} failed" + (":" if failures else ""))
    print("\n".join(f"  {line}" for line in failures[:60]))
    for table in result.tables:
        print(f"\n{table.title}")
        cells = [list(table.columns), *([table.text(row, name) for name in table.columns] for row in table.rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(table.columns))]
        for row in cells:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        if table.note:
            print(f"  {table.note}")


def main(arguments: Sequence[str] | None = None) -> int:
    """All parts, or the named ones; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="everything at tiny sizes on the CPU")
    parser.add_argument("--parts", nargs="+", choices=NAMES, default=list(NAMES), metavar="PART", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole; what is left then is cut off")
    parser.add_argument(
        "--json", type=Path, help="the file to write; results/gpu.json, or gpu-dry-run.json in a dry run's folder"
    )
    parser.add_argument("--one-process", action="store_true", help="a dry run in this process")
    parser.add_argument("--commit", default="", help="of the code, where a copy without git runs")
    chosen = parser.parse_args(arguments)
    if chosen.one_process and not chosen.dry_run:
        parser.error("--one-process is for --dry-run: on a GPU a crash of one part would end the others")
    if not chosen.dry_run and (reason := device_reason()):
        parser.error(f"no CUDA device: {reason}; --dry-run tries all parts on the CPU")
    if chosen.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    path = chosen.json or (Path(tempfile.gettempdir()) / "gpu-dry-run.json" if chosen.dry_run else FOLDER / "gpu.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    session = Session(path, chosen.dry_run, chosen.one_process, chosen.seconds, chosen.commit)
    for stage in STAGES:
        session.stage([part for part in stage if part.name in chosen.parts])
    show(session.result, session.found)
    print(f"\n{path}")
    return int(any(found.failures for found in session.found.values()))


if __name__ == "__main__":
    sys.exit(main())
