"""Plants sampled faults in a copy of the library, runs the tests that belong to each, and says which were caught.

`python -m benchmarks.plant_faults` by hand; --list shows the sample, --keep goes on after an interruption,
--survivors runs those again that were not caught (with --minutes to give them longer), and --more adds to the sample.
A sample that is kept stays as it was drawn, however the source moves: a fault leaves it only with its line of source.

Which tests run a line is measured first, with coverage (`pip install coverage`), by one run of every test file in a
process of its own. That takes as long as the suite four times; --map keeps it, and what has changed is measured again.
"""

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ._faults import KINDS, Fault, all_faults, is_another_program, planted, sample
from ._harness import ROOT
from ._results import Result, Table, machine, show
from ._test_lines import LineRecorder, Lines, statement_lines

EQUIVALENT = Path(__file__).with_name("faults_equivalent.toml")
TEXT = (
    "Faults of seven kinds, drawn by a fixed seed over all packages, each planted alone in a copy of the library; then "
    "the tests that run its statement, as measured line by line, and the laws over all sources, the quickest first, "
    "until one fails. For a statement that runs as its file is imported, or in no test's own process, the doctests of "
    "the file, the test file of its name, the test files that speak most of what it and its importers define, and "
    "every test that runs some function of the file; for one that runs once for several tests, as what is kept does, "
    "all tests of their files. A survivor says how many of these ran in the processor time that a fault is given. "
    "A failure counts only where the same test passes without the fault. Caught since are faults that the suite had "
    "not caught when the sample was drawn, and that a test catches now. Equivalent are faults that change no result, "
    "each with its reason in benchmarks/faults_equivalent.toml. Left out are messages, representations, the command "
    "line, and kernels for CUDA."
)
FAULTS = dict.fromkeys(("file", "function", "line", "kind", "change", "replaced", "verdict", "by", "commit"), "")
SEED = 20250117  # draws the faults, unless another one is given, and the cases of the tests
LAWS = ("tests/test_defaults.py", "tests/test_docs.py")  # of every source; of what the pages say of it
READS = 0.1  # seconds of a law that reads pages, at most: one that runs them runs lines
# What they run of the library runs in processes of their own, which the map does not see, and takes long.
UNMEASURED = re.compile(r"tests/(cli/|test_(typed_face|gpu_benchmark|release|platforms|torch_import)\.py)")
BAR = 0.9
# By the process that forks those of the tests: nothing of the library.
IMPORTED_ONCE = (
    "torch._dynamo",
    "llvmlite.binding",
    "mpmath",
    "ml_dtypes",
    "coverage",
    "xdist.plugin",
    "anyio.pytest_plugin",
)
IMPORTED_ONCE += ("pytest", "_pytest.doctest", "hypothesis.strategies", "hypothesis.internal.conjecture.providers")
MOST_BROKEN = 8  # tests run at once that may fail without any fault
ONCE = 3  # tests of a file that run a line: no more where later ones may use what the first has made
MEMORY = 12 << 30  # address space of one run: a fault may ask for any amount


@dataclass
class Run:
    """What tests said: passed, failed, not collected, not found, crashed, too long or none; the test; CPU seconds."""

    outcome: str
    test: str = ""
    seconds: float = 0.0


class Recorder:
    """A pytest plugin that writes which test runs, and which one failed first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, word: str, test: str) -> None:
        """What happened last."""
        self.path.write_text(f"{word}\n{test}")

    def pytest_runtest_logstart(self, nodeid, location) -> None:
        """A test begins."""
        self.write("in", nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        """A test has failed."""
        if report.failed:
            self.write("failed", report.nodeid)

    def pytest_collectreport(self, report) -> None:
        """A file cannot be imported."""
        if report.failed:
            self.write("not collected", report.nodeid)


class Copy:
    """A copy of the checkout in which one fault at a time is planted, and runs of its tests in forked processes."""

    def __init__(self, folder: Path, cache: Path | None, seconds: int) -> None:
        folder.mkdir()
        self.folder, self.seconds, self.temporary = folder, seconds, folder.with_name("tmp")
        self.temporary.mkdir(exist_ok=True)  # of all copies, as torch keeps there what it has compiled
        self.root, self.kernels, self.log = folder / "copy", folder / "kernels", folder / "log"
        unwanted = shutil.ignore_patterns(".git", "__pycache__", ".peers", "compare", ".*cache")
        shutil.copytree(ROOT, self.root, ignore=unwanted)
        self.kernels.mkdir()
        if cache is not None and cache.is_dir():
            link_kernels(cache, self.kernels)
        self.plantings = 0
        self.controls: dict[tuple[str, ...], Run] = {}
        self.broken: set[str] = set()

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is in the file; its time differs from all before, so that no compiled file is taken for it."""
        path = self.root / fault.file
        source, times = path.read_bytes(), path.stat()
        self.plantings += 1
        path.write_bytes(planted(source, fault))
        os.utime(path, (times.st_atime, times.st_mtime + 2 * self.plantings))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, (times.st_atime, times.st_mtime))

    def run(self, kernels: Path, *tests: str, lines: Path | None = None) -> Run:
        """Tests in a fork of this process, within the time limit (of CPU; of wall time six times that)."""
        said = self.folder / "said"
        said.write_text("in\n")
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        child = os.fork()
        if child == 0:
            self.in_child(kernels, said, tests, lines)
        status, used, late = wait(child, self.seconds * (1 if lines is None else 10))
        word, name = said.read_text().split("\n", 1)
        seconds = used.ru_utime + used.ru_stime
        if os.WIFSIGNALED(status):
            return Run("too long" if late else "crashed", name, seconds)
        code = os.WEXITSTATUS(status)
        outcome = {0: "passed", 4: "not found", 5: "none"}.get(code, "failed")
        if outcome == "failed" and word == "not collected":
            outcome = word
        return Run(outcome, name if word != "in" else "", seconds)

    def in_child(self, kernels: Path, said: Path, tests: tuple[str, ...], lines: Path | None) -> None:
        """Runs pytest and ends the process."""
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            source = str(self.root / "src")
            os.environ |= {"HALFULP_CACHE_DIR": str(kernels), "HALFULP_TEST_SEED": str(SEED)}
            os.environ |= {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
            tempfile.tempdir = None
            sys.path.insert(0, source)
            os.chdir(self.root)
            plugins = [Recorder(said), *([] if lines is None else [LineRecorder(lines, self.root)])]
            import halfulp

            assert Path(halfulp.__file__).is_relative_to(self.root), f"tests would run {halfulp.__file__}"
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            import pytest

            arguments = ["-q", "--assert=plain", "-p", "no:cacheprovider", f"--basetemp={self.folder}/pytest", *tests]
            code = int(pytest.main([*(["-x"] if lines is None else []), *arguments], plugins=plugins))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def control(self, *tests: str) -> Run:
        """The same without a fault, once; what it compiles is there for all that follow."""
        if tests not in self.controls:
            self.controls[tests] = self.run(self.kernels, *tests)
        return self.controls[tests]

    def verdict(self, fault: Fault, tests: list[str], seconds: dict[str, float], most: float) -> tuple[str, str]:
        """Caught and by which test; survived or undecided, and how many tests ran in so much CPU time."""
        spent, ran, open_ones = 0.0, 0, []
        for batch in batches([test for test in tests if test not in self.broken], seconds):
            if spent > most:
                break
            ran += len(batch)
            for _ in range(MOST_BROKEN):
                found = self.with_fault(fault, *batch)
                spent += found.seconds
                if found.outcome == "not found" and any("::" in test for test in batch):
                    batch = [*dict.fromkeys(file_of(test) for test in batch)]  # the fault changes names of cases
                    continue
                if found.outcome in ("passed", "none"):
                    break
                same = [found.test] if found.test else batch
                control = self.control(*same, *["--collect-only"] * (found.outcome == "not collected"))
                fine = control.outcome in ("passed", "none")
                if fine and (found.outcome != "too long" or control.seconds < self.seconds / 2):
                    return "caught", f"{found.test or ' '.join(batch)} ({found.outcome})"
                # What fails without the fault says nothing, and the tests behind it may.
                self.broken.update(same)
                gone = {*same, *map(file_of, same)}  # a file that runs whole with them
                batch = [test for test in batch if test not in gone and file_of(test) not in same]
                if not batch:
                    break
            else:
                open_ones.append(f"{found.test} ({found.outcome}; without the fault {control.outcome})")
        said = f"{ran} of {len(tests)} tests in {spent:.0f} s of processor time"
        return ("undecided", ", ".join(open_ones)) if open_ones else ("survived", said)

    def with_fault(self, fault: Fault, *tests: str) -> Run:
        """Tests with the fault planted, and kernels of its own."""
        kernels = self.folder / "kernels-of-fault"
        link_kernels(self.kernels, kernels)
        with self.planted(fault):
            return self.run(kernels, *tests)


def file_of(test: str) -> str:
    """The file that a test lies in."""
    return test.partition("::")[0]


def batches(tests: list[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Parts of some tests in their order, each longer than the one before, and in it those of one file together."""
    most, parts, total = 1.0, defaultdict[str, list[str]](list), 0.0
    for test in tests:
        total += seconds[test] + 0.1 * (file_of(test) not in parts)  # to collect a file takes time
        parts[file_of(test)].append(test)
        if total > most or test == tests[-1]:
            yield [test for part in parts.values() for test in part]
            most, parts, total = min(2 * most, 32), defaultdict(list), 0.0


def link_kernels(old: Path, new: Path) -> None:
    """A folder with the same kernels, which are replaced and never written in place, and with nothing else."""
    new.mkdir(exist_ok=True)
    missing = {entry.name: entry.inode() for entry in os.scandir(old) if entry.name.endswith(".kernel")}
    for entry in os.scandir(new):
        if missing.get(entry.name) == entry.inode():
            del missing[entry.name]
        elif entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    for name in missing:
        try:
            os.link(old / name, new / name)
        except OSError:
            shutil.copy2(old / name, new / name)


def wait(child: int, seconds: float) -> tuple[int, resource.struct_rusage, bool]:
    """Its exit status, what it used, and whether it was too late: CPU time, or six times that of wall time, is up.

    It and all that it started are ended. A limit of the kernel's on CPU time (RLIMIT_CPU) would let the child's own
    clock of CPU time move in steps of several milliseconds, so that a short training step takes no time.
    """
    end, late = time.monotonic() + 6 * seconds, False
    while True:
        done, status, used = os.wait4(child, 0 if late else os.WNOHANG)
        if done:
            break
        late = time.monotonic() > end or cpu_seconds(child) > seconds
        if late:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return status, used, late


def cpu_seconds(process: int) -> float:
    """What a process has used so far; 0 where the system has no /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Which tests belong to a line ------------------------------------------------------------------------------------


def measure(copies: "list[Copy]", folder: Path) -> Lines:
    """What every test file runs: from its file in the folder, or by a run in a process of its own.

    A file's name says the sources that it is true of: the library's, the tests' helpers and the test file's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tests = sorted(path for path in (ROOT / "tests").rglob("*.py"))
    shared = [*sorted((ROOT / "src").rglob("*.py")), *(x for x in tests if not x.name.startswith("test_"))]
    common = hashlib.sha256(b"".join(path.read_bytes() for path in [*shared, ROOT / "conftest.py"]))
    files = [path for path in tests if path not in shared] + [x for x in shared if ">>>" in x.read_text()]
    lines, wanted = Lines(), {}
    for path in files:
        file, digest = path.relative_to(ROOT).as_posix(), common.copy()
        digest.update(file.encode() + path.read_bytes())
        if UNMEASURED.match(file):
            lines.seconds[file] = 30.0  # all its tests as one
        else:
            wanted[file] = folder / f"{digest.hexdigest()[:32]}.json"

    def run(copy: Copy, file: str) -> None:
        written = copy.folder / "lines"
        found = copy.run(copy.kernels, file, lines=written)
        print(
            f"{found.seconds:.0f} s of processor time, {found.outcome}: lines that {file} runs", found.test, flush=True
        )
        if not written.exists():
            written.write_text(json.dumps({"seconds": {}, "lines": {}}))
        os.replace(written, wanted[file])

    in_turn(copies, run, [file for file, path in wanted.items() if not path.exists()])
    for path in wanted.values():
        lines.add(path)
    return lines


def in_turn(copies: "list[Copy]", run: Callable, items: list) -> None:
    """Runs each item in a copy that is free."""
    free = [*copies]

    def one(item) -> None:
        copy = free.pop()
        try:
            run(copy, item)
        finally:
            free.append(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for _ in pool.map(one, items):
            pass


def names_defined(path: Path) -> set[str]:
    """The file's own name and those of its functions, classes and constants, without leading underscores."""
    found = re.findall(r"^(?:def|class) _*(\w+)|^_*([A-Z][A-Z0-9_]+) =", path.read_text(), re.MULTILINE)
    return {path.stem.lstrip("_")} | {name for pair in found for name in pair if len(name) > 4}


def importers(path: Path, root: Path) -> set[str]:
    """The names of files of the library that import this one."""
    name = path.stem
    pattern = re.compile(rf"^\s*from ([.\w]*\.{name} import|\.+[\w.]* import .*\b{name}\b)", re.MULTILINE)
    files = [x for x in (root / "src").rglob("*.py") if x != path]
    near = [x for x in files if x.parent == path.parent or f"{path.parent.name}.{path.stem}" in x.read_text()]
    return {x.stem.lstrip("_") for x in near if pattern.search(x.read_text())}


def tests_of(fault: Fault, root: Path, lines: Lines) -> list[str]:
    """The tests that may see a fault, in the order in which they are tried."""
    laws = [{test for test in lines.seconds if file_of(test) == law} for law in LAWS]
    laws[1] = {test for test in laws[1] if lines.seconds[test] < READS}
    running = lines.running(fault.file, statement_lines((root / fault.file).read_bytes(), fault))
    parts = [(running - {""}) | laws[0]]
    if "" in running or not running:
        named = files_by_words(fault, root)
        parts = [{test for test in lines.seconds if file_of(test) in named}, *parts, lines.running(fault.file, -1)]
    if "kernels/vector/" in fault.file:  # it runs for kernels that are not kept, and a changed one makes all anew
        parts.append(lines.running("src/halfulp/kernels/vector/_machine_function.py", -1))
    files = Counter(file_of(test) for test in running)
    if max(files.values(), default=0) <= ONCE:
        parts.append({test for test in lines.seconds if file_of(test) in files})
    return [*dict.fromkeys(test for part in (*parts, laws[1]) for test in lines.quickest(part))]


def files_by_words(fault: Fault, root: Path, most: int = 6) -> list[str]:
    """The file with its doctests, its test file, and others by how much they speak of what it defines."""
    path = root / fault.file
    package = path.parent.relative_to(root / "src/halfulp").as_posix()
    words, users = names_defined(path), importers(path, root)
    first = [fault.file] if ">>>" in path.read_text() else []
    mirror = f"tests/{package}/test_{path.stem.lstrip('_')}.py".replace("/./", "/")
    scores = Counter[str]()
    for test in sorted((root / "tests").rglob("test_*.py")):
        name, text = test.relative_to(root).as_posix(), test.read_text()
        score = sum(min(5, len(re.findall(rf"\b_*{re.escape(word)}\b", text, re.IGNORECASE))) for word in words)
        score += min(10, text.lower().count(path.stem.lstrip("_")[:4]))  # "conv" is said of a convolution
        score += 5 * (test.stem.removeprefix("test_") in users)
        score += 2 * sum(1 for word in path.stem.split("_") if len(word) > 3 and word in test.stem)
        if score and name != mirror:
            scores[name] = score
    if (root / mirror).exists():
        first.append(mirror)
    others = [name for name, _ in scores.most_common()]
    near = [name for name in others if Path(name).parent.name == path.parent.name][: most - 2]
    return (first + near + [name for name in others if name not in near])[:most]


# The table -------------------------------------------------------------------------------------------------------


def reasons() -> dict[tuple, str]:
    """What names every equivalent fault, with its "again" where the entry has one, and why it is one."""
    entries = tomllib.loads(EQUIVALENT.read_text())["fault"] if EQUIVALENT.exists() else []
    return {(*identity(entry), entry.get("again")): entry["reason"] for entry in entries}


def counted(title: str, column: str, rows: list[dict], names: list[str], wanted: Callable[[dict], str]) -> Table:
    """How many of each group were caught, with a row for all."""
    verdicts = ("caught", "caught since", "survived", "undecided", "equivalent", "not run")
    table = Table(title, dict.fromkeys((column, "faults", *verdicts), "") | {"caught of decided": ".0%"})
    for name in (*names, "all"):
        group = [row for row in rows if name in (wanted(row), "all")]
        found = Counter(row["verdict"] for row in group)
        decided = found["caught"] + found["caught since"] + found["survived"]
        cells = {word: found[word] for word in verdicts} | {column: name, "faults": len(group)}
        share = found["caught"] / decided if decided else None
        bar = {"bar": f"at least {BAR:.0%} caught", "met": share >= BAR} if name == "all" and decided else {}
        table.add(**cells, **({"caught of decided": share} if decided else {}), **bar)
    return table


def write(rows: list[dict], facts: dict[str, str]) -> Result:
    """Keeps what is known so far."""
    result = Result("faults", "Planted faults", TEXT, "python -m benchmarks.plant_faults", facts)
    names = sorted({package_of(row) for row in rows})
    table = Table("Every fault", FAULTS, rows)
    result.tables = [
        counted("Planted faults by package", "package", rows, names, package_of),
        counted("Planted faults by kind", "kind", rows, [*KINDS], lambda row: row["kind"]),
        table,
    ]
    return result


def package_of(row: dict) -> str:
    """The part of the library that a row's file lies in."""
    return Path(row["file"]).parts[0].removesuffix(".py")


def row_of(fault: Fault) -> dict:
    """A fault that has not been run."""
    words = {"file": fault.file.removeprefix("src/halfulp/"), "function": fault.function, "line": fault.line}
    words |= {"kind": fault.kind, "change": fault.change, "replaced": fault.exactly}
    return words | {"verdict": "not run", "by": "", "commit": ""}


def identity(row: dict) -> tuple[str, str, str]:
    """What names a row in the file of equivalent faults."""
    return row["file"], row["function"], row["change"]


def kept_rows() -> list[dict]:
    """The rows of an earlier run."""
    return [row for table in write([], {}).earlier_tables()[2:3] for row in table.rows]


def still_there(rows: list[dict], seed: int) -> list[tuple[Fault, dict]]:
    """The rows whose faults the source still has, which keep what was found, with the fault where it is now.

    A row names its fault by file, function and change, not by line. Where these are not enough, "replaced" tells which
    it was, and in rows that lack it the seed, which drew the first by rank.
    """
    faults: dict[tuple, list[Fault]] = {}
    for fault in sorted(all_faults(ROOT), key=lambda fault: fault.rank(seed)):
        faults.setdefault(identity(row_of(fault)), []).append(fault)
    found = []
    for row in rows:
        alike = [x for x in faults.get(identity(row), []) if row.get("replaced") in (None, x.exactly)]
        fault = next((x for x in alike if is_another_program((ROOT / x.file).read_bytes(), x)), None)
        if fault is None:
            print("no longer in the source:", row["file"], row["change"], row["verdict"])
        else:
            found.append((fault, row_of(fault) | {name: row[name] for name in ("verdict", "by", "commit")}))
    return found


def drawn(arguments: argparse.Namespace) -> list[tuple[Fault, dict]]:
    """The sample: what is kept of an earlier run, filled up to the count; or more, from files that it left alone."""
    kept = still_there(kept_rows(), arguments.seed) if arguments.keep or arguments.survivors or arguments.more else []
    used = {fault.file for fault, _ in kept}
    if arguments.more:
        fresh = sample(ROOT, arguments.more, arguments.seed, used)
        return kept + [(fault, row_of(fault)) for fault in fresh]
    if len(kept) >= arguments.count:
        return kept
    places = {(fault.file, fault.function) for fault, _ in kept}
    fresh = [x for x in sample(ROOT, arguments.count, arguments.seed) if (x.file, x.function) not in places]
    return kept + [(fault, row_of(fault)) for fault in fresh[: arguments.count - len(kept)]]


def main() -> None:
    """Draws the sample, plants each fault and writes results/faults.json after every one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=SEED, help="draws the faults")
    parser.add_argument("--only", metavar="PACKAGE", help="run the sample's faults in one package")
    parser.add_argument(
        "--match", nargs="+", default=[""], metavar="TEXT", help="only what says this in file or change"
    )
    parser.add_argument("--list", action="store_true", help="print the sample, and plant nothing")
    parser.add_argument("--keep", action="store_true", help="keep what results/faults.json holds and go on")
    parser.add_argument("--survivors", action="store_true", help="keep what the file holds and run again what survived")
    parser.add_argument("--more", type=int, default=0, help="add so many in files that the kept sample does not touch")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--minutes", type=float, default=6, help="CPU minutes of all tests of one fault")
    parser.add_argument("--seconds", type=int, default=100, help="CPU seconds of tests run at once, at most")
    parser.add_argument(
        "--map", type=Path, default=Path.home() / ".cache/halfulp-lines", help="a folder for the lines that tests run"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/halfulp", help="kernels to begin with")
    arguments = parser.parse_args()
    chosen = drawn(arguments)
    if arguments.list:
        for fault, row in chosen:
            print(f"{fault.file}:{fault.line} {fault.function} [{fault.kind}] {fault.change} | {row['verdict']}")
            print("   ", fault.exactly)
        return
    plant(chosen, arguments)


def plant(chosen: list[tuple[Fault, dict]], arguments: argparse.Namespace) -> None:
    """Runs what is not known yet."""
    for module in IMPORTED_ONCE:
        __import__(module)
    gc.freeze()
    known = reasons()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # here it would import the library without faults
        facts = pool.apply(machine)
    for fault, row in chosen:
        if reason := known.get((*identity(row), fault.again)) or known.get((*identity(row), None)):
            row |= {"verdict": "equivalent", "by": reason}
    rows = [row for _, row in chosen]
    writing = threading.Lock()
    again = {"survived", "undecided"} if arguments.survivors else {"not run", "undecided"}
    left = [
        (fault, row)
        for fault, row in chosen
        if row["verdict"] in again
        and arguments.only in (None, fault.package)
        and any(text in f"{row['file']} {row['change']}" for text in arguments.match)
    ]

    def run(lines: Lines, copy: Copy, pair: tuple[Fault, dict]) -> None:
        (fault, row), start = pair, time.monotonic()
        trainer = Path(fault.file).stem
        if fault.package == "integrations" and find_spec(trainer) is None:
            row["verdict"], row["by"] = "undecided", f"{trainer} is not installed"
        else:
            tests = tests_of(fault, ROOT, lines)
            before = row["verdict"]
            row["verdict"], row["by"] = copy.verdict(fault, tests, lines.seconds, 60 * arguments.minutes)
            if (before, row["verdict"]) == ("survived", "caught"):
                row["verdict"] = "caught since"
        row["commit"] = facts["commit"]
        took = f"{time.monotonic() - start:.0f} s"
        with writing:
            print(took, row["verdict"], f"{row['file']}:{row['line']}", row["change"], "|", row["by"], flush=True)
            keep(write(rows, facts))

    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy(Path(folder, str(k)), arguments.cache, arguments.seconds) for k in range(arguments.jobs)]
        in_turn(copies, partial(run, measure(copies, arguments.map)), left)
    result = write(rows, facts)
    keep(result)
    result.tables.pop()
    show(result)


def keep(result: Result) -> None:
    """Writes the file whole, so that an interrupted run has what it found."""
    result.path().write_text(json.dumps(asdict(result), indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
