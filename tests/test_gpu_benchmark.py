"""`python -m benchmarks gpu` before there is a GPU: its dry run, and what becomes of parts that fail, die and hang."""

import json
import os
import socket
import subprocess
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DRY_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from benchmarks import bench_gpu
sys.exit(bench_gpu.main(["--dry-run", "--one-process", "--json", sys.argv[2]]))
"""
TABLES = {
    "Device": 13,
    "Steps: bits": 2,
    "quantize: bits": 2,
    "Tests that need CUDA": 10,
    "AdamW steps": 4,
    "quantize: speed": 14,
    "Memory of a training step": 3,
    "Device synchronisations per step": 8,
    "Trainings": 6,
    "MCTensor operators": 6,
    "Averages and exact sums": 4,
    "Gradient scalers on a GPT": 5,
    "Scaled tensors on a GPT": 6,
}


def test_the_dry_run_goes_through_every_part(in_bare_process, tmp_path):
    path = tmp_path / "gpu.json"
    printed = in_bare_process(DRY_RUN, str(ROOT), str(path))
    assert "\n0 failed\n" in printed
    found = json.loads(path.read_text())
    tables = {table["title"]: table for table in found["tables"]}
    assert "What failed" not in tables
    assert "What was not reached" not in tables
    parts = tables["Parts"]["rows"]
    assert [row["part"] for row in parts if row["outcome"] != "done"] == []
    assert len(parts) == 14
    assert all(row["device"] == "CPU (dry run)" and row["torch"] and row["triton"] for row in parts)
    for title, rows in TABLES.items():
        assert len(tables[title]["rows"]) >= rows, title
    assert not [row for table in found["tables"] for row in table["rows"] if row.get("met") is False]
    assert all(row["equal"] == row["combinations"] for row in tables["Steps: bits"]["rows"])
    assert sum(row["passed"] + row["skipped"] for row in tables["Tests that need CUDA"]["rows"]) > 50
    losses = [row["loss"] for row in tables["Scaled tensors on a GPT"]["rows"]]
    assert max(losses) - min(losses) < 0.01


PLANTED = '''
"""A part that dies in its second attempt."""
import os


def measure(run):
    table = run.table("Planted", {"attempt": ""})
    for number in range(4):
        run.attempt(f"attempt {number}", lambda: os.abort() if number == 1 else run.add(table, attempt=number))
'''


# A part that goes on, as do its two children, one in a session of its own; each holds a connection until it ends.
LEAVES = """
import subprocess, sys, time
from benchmarks._gpu import _processes

CHILD = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); time.sleep(300)"


def measure(run):
    import os
    port = os.environ["PLANTED_PORT"]
    subprocess.Popen([sys.executable, "-c", CHILD, port])
    own = _processes.start([sys.executable, "-c", CHILD, port])
    try:
        time.sleep(300)
    finally:
        _processes.end(own)
"""


@pytest.fixture
def session(benchmark_module, tmp_path, monkeypatch):
    """A dry run's session in separate processes, which finds the part `planted.dies`."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name, text in (("dies", PLANTED), ("leaves", LEAVES)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = benchmark_module("bench_gpu")
    made = bench.Session(tmp_path / "gpu.json", dry=True, one_process=False, seconds=300)
    made.dies = bench.Part("planted.dies", 120)
    return made


def _tables(session):
    return {table["title"]: table for table in json.loads(session.path.read_text())["tables"]}


def test_a_process_that_dies_costs_the_row_that_killed_it(session, capsys):
    session.part(session.dies)
    assert [row["attempt"] for row in session.found["planted.dies"].tables[0].rows] == [0, 2, 3]
    assert "planted.dies: failed" in capsys.readouterr().out
    parts = _tables(session)["Parts"]["rows"]
    assert [(row["failed"], row["met"]) for row in parts] == [(1, None)]
    assert "ended with code -6, in attempt 2" in parts[0]["what failed first"]


def test_a_restart_that_dies_before_its_first_attempt_makes_nothing_twice(session, run, tmp_path, monkeypatch):
    begun, asked = iter([3, 0, None, 3]), []

    def dies(part, path, seconds, share, first):
        asked.append(first)
        attempted = next(begun)
        if attempted is not None:
            path.write_text(json.dumps({"attempted": attempted}))
        return -6

    monkeypatch.setattr(session, "_process", dies)
    failures = [failure for _, failure in session._share(session.dies, 100.0, tmp_path, (0, 1))]
    assert asked == [0, 3, 3, 3]
    assert [failure.split("code -6, ")[1].split(";")[0] for failure in failures] == [
        "in attempt 3",
        *["before attempt 4"] * 3,
    ]
    run.first = 3
    run.save()
    assert _saved(run)["attempted"] == 3


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="the system has no groups of processes")
@pytest.mark.parametrize("how", ["at its limit", "interrupted"])
def test_what_a_killed_process_has_started_ends_with_it(session, benchmark_module, tmp_path, monkeypatch, how):
    processes = benchmark_module("_gpu._processes")
    part, connected = benchmark_module("bench_gpu").Part("planted.leaves", 300), threading.Event()
    if how == "at its limit":
        start = processes.start
        monkeypatch.setattr(processes, "start", lambda *given, **options: _late(start(*given, **options), connected))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(120)
        monkeypatch.setenv("PLANTED_PORT", str(server.getsockname()[1]))
        ended = pool.submit(session._process, part, tmp_path / "left.json", 200.0, (0, 1), 0)
        children = [server.accept()[0] for _ in range(2)]
        connected.set()
        if how == "interrupted":
            session.stop()
        for child in children:
            child.settimeout(60)
            assert child.recv(1) == b""  # it has ended
            child.close()
        assert (ended.result() is None) is (how == "at its limit")
    session.stop()
    assert session._share(part, 300.0, tmp_path, (0, 1)) == []


def _late(process, connected):
    """A process that is waited for in vain once."""
    own = process.wait

    def wait(seconds=None):
        process.wait = own
        connected.wait(150)
        raise subprocess.TimeoutExpired("a part", seconds)

    process.wait = wait
    return process


def test_a_process_that_is_too_slow_is_killed_and_said(session, tmp_path):
    assert session._process(session.dies, tmp_path / "slow.json", 0.01, (0, 1), 0) is None
    assert "== planted.dies 0" in session.log.read_text()


def test_a_part_that_finds_no_time_is_told_and_the_file_is_whole(session):
    session.deadline = 0.0
    session.part(session.dies)
    assert _tables(session)["Parts"]["rows"][0]["outcome"] == "incomplete"


def test_what_goes_wrong_in_the_session_itself_costs_one_part(session, monkeypatch):
    monkeypatch.setattr(session, "_run", lambda *given: 1 / 0)
    session.part(session.dies)
    assert "ZeroDivisionError" in _tables(session)["Parts"]["rows"][0]["what failed first"]


@pytest.fixture
def run(benchmark_module, tmp_path):
    """A part at work on the CPU."""
    made = benchmark_module("_gpu._run").Run("steps", "cpu", True, 60.0, path=tmp_path / "run.json")
    made.rows = made.table("Rows", {"what": "", "failed": ""})
    return made


def _saved(run):
    return json.loads(run.path.read_text())


def test_an_attempt_that_fails_is_named_and_the_next_goes_on(run, capfd):
    run.attempt("first", lambda: 1 / 0)
    run.attempt("second", lambda: run.add(run.rows, what="second"))
    assert _saved(run)["failures"] == ["first: ZeroDivisionError: division by zero"]
    assert _saved(run)["tables"][0]["rows"] == [{"what": "second"}]
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["Unavailable", "OutOfMemoryError"])
def test_what_a_device_cannot_do_is_a_row_and_no_failure(run, benchmark_module, kind):
    import torch

    error = torch.cuda.OutOfMemoryError if kind == "OutOfMemoryError" else benchmark_module("_gpu._run").Unavailable

    def raises():
        raise error("2 GB are too few")

    run.attempt("large", raises, lambda why: run.add(run.rows, what="large", failed=why))
    saved = _saved(run)
    assert "2 GB are too few" in saved["tables"][0]["rows"][0]["failed"]
    assert saved["failures"] == []


def test_attempts_are_shared_skipped_and_left_out_when_time_is_up(run):
    run.share, run.shares, run.first = 1, 2, 2
    for number in range(6):
        run.attempt(str(number), lambda number=number: run.add(run.rows, what=number))
    assert [row["what"] for row in run.rows.rows] == [3, 5]
    run.seconds = 0.0
    for number in range(6, 8):
        run.attempt(str(number), lambda: 1 / 0)
    assert _saved(run)["late"] == ["7"]


PLANTED_TESTS = """
import os, time
import pytest

pytestmark = MARK


@pytest.mark.parametrize("k", [1, 2])
def test_passes(k):
    pass


def test_fails():
    raise ValueError("two bits")


@pytest.mark.xfail(reason="known")
def test_known():
    raise ValueError


def test_skips():
    pytest.skip("no device")


@pytest.fixture
def broken():
    raise KeyError("fixture")


def test_errs(broken):
    pass


class TestInside:
    def test_passes(self):
        pass


def test_ends():
    LAST
"""
ROWS = {
    "test_planted.test_passes": (2, 0, 0, None),
    "test_planted.test_fails": (0, 1, 0, None),
    "test_planted.test_known": (0, 0, 1, "expected to fail: known"),
    "test_planted.test_skips": (0, 0, 1, "no device"),
    "test_planted.test_errs": (0, 1, 0, None),
    "test_planted.TestInside.test_passes": (1, 0, 0, None),
}


@pytest.fixture
def suite(benchmark_module, tmp_path, monkeypatch):
    """The part that runs tests, which names them as they lie in this folder, wherever the library is."""
    found = benchmark_module("_gpu.suite")
    monkeypatch.setattr(found, "OPTIONS", [*found.OPTIONS, f"--rootdir={tmp_path}"])
    return found


@pytest.fixture
def planted_tests(run, suite, tmp_path, monkeypatch):
    """Runs pytest on planted tests, of which the last does what is asked for; returns the last one's row."""

    def followed(last, workers=0):
        if workers:
            pytest.importorskip("xdist")
            monkeypatch.setattr(suite, "WORKERS", workers)
            run.device = "cuda"
        text = PLANTED_TESTS.replace("MARK", f"pytest.{suite.MARK}").replace("LAST", last)
        (tmp_path / "test_planted.py").write_text(text)
        run.table("Tests", suite.COLUMNS, keys=["test"])
        run.failed = ""
        try:
            suite.follow(run, run.tables[1], [str(tmp_path / "test_planted.py")], tmp_path)
        except RuntimeError as error:
            run.failed = str(error)
        rows = {row["test"]: row for row in _saved(run)["tables"][1]["rows"]}
        ends = rows.pop("test_planted.test_ends")
        assert {
            name: (row["passed"], row["failed"], row["skipped"], row.get("reason")) for name, row in rows.items()
        } == ROWS
        assert run.failures[:2] == [
            "test_planted.test_fails: ValueError: two bits",
            "test_planted.test_errs: in its setup: KeyError: 'fixture'",
        ]
        return ends

    return followed


def test_outcomes_of_tests_are_rows(planted_tests, run):
    assert planted_tests("pass")["passed"] == 1
    assert run.failures[2:] == []
    assert run.failed == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_test_that_hangs_is_named_and_what_was_done_is_kept(
    planted_tests, run, tmp_path, monkeypatch, capfd, workers
):
    hangs = tmp_path / "hangs"

    def left():
        """Time is up soon after the last test has begun."""
        return 2.0 if not hangs.exists() or time.time() - hangs.stat().st_mtime < 2 else 0.0

    monkeypatch.setattr(run, "left", left)
    row = planted_tests(f"open({str(hangs)!r}, 'w').close(); time.sleep(300)", workers)
    assert "not done within 2 s: 7 of 8 tests done; at work then: test_planted.test_ends (for " in run.failed
    assert run.failures[2:] == []
    assert "at work for" in row["reason"]
    assert row["met"] is False
    assert "in test_ends" in capfd.readouterr().out  # where it hangs


def test_a_test_that_ends_pytest_is_named(planted_tests, run):
    assert planted_tests("os._exit(7)")["failed"] == 1
    assert run.failures[2:] == ["test_planted.test_ends: pytest ended with code 7 while it ran"]
    assert "pytest ended with code 7, 8 of 8 tests done" in run.failed


def test_a_test_that_ends_a_worker_is_named(planted_tests, run):
    assert planted_tests("os._exit(7)", workers=1)["failed"] == 1
    assert run.failures[2:] == [
        "test_planted.test_ends: worker 'gw0' crashed while running 'test_planted.py::test_ends'"
    ]


def test_a_file_of_tests_that_cannot_be_read_is_named(run, suite, tmp_path):
    broken, whole = tmp_path / "test_broken.py", tmp_path / "test_whole.py"
    broken.write_text("import a_module_that_is_not_there")
    whole.write_text(f"import pytest\n\n@pytest.{suite.MARK}\ndef test_passes():\n    pass\n")
    table = run.table("Tests", suite.COLUMNS, keys=["test"])
    suite.follow(run, table, [str(broken), str(whole)], tmp_path)
    assert run.failures == ["test_broken: ModuleNotFoundError: No module named 'a_module_that_is_not_there'"]
    assert [(row["test"], row["passed"], row["met"]) for row in table.rows] == [
        ("test_broken", 0, False),
        ("test_whole.test_passes", 1, True),
    ]


def test_files_without_a_marked_test_are_told(run, benchmark_module, tmp_path):
    suite, file = benchmark_module("_gpu.suite"), tmp_path / "test_planted.py"
    file.write_text("def test_without_mark(): pass")
    with pytest.raises(RuntimeError, match="pytest ended with code 5, no test found so far"):
        suite.follow(run, run.rows, [str(file)], tmp_path)


def test_counts_of_several_processes_are_added(run, benchmark_module):
    bench = benchmark_module("bench_gpu")
    run.table("Counts", {"kind": "", "equal": "", "differ": ""}, keys=["kind"])
    run.count(run.tables[1], {"kind": "a"}, equal=2, differ=0)
    run.count(run.tables[1], {"kind": "a"}, equal=3, differ=0)
    run.count(run.tables[1], {"kind": "b"}, equal=0, differ=1)
    found = bench.Found()
    for _ in range(2):
        found.take(run.path)
    rows = next(table for table in found.tables if table.title == "Counts").rows
    assert [(row["kind"], row["equal"], row["differ"], row["met"]) for row in rows] == [
        ("a", 10, 0, True),
        ("b", 0, 2, False),
    ]


@pytest.fixture
def stand_in(benchmark_module, monkeypatch):
    """A GPU of 80 GiB as torch.cuda shows it, whose tensors lie on the CPU; a name that torch lacks raises."""
    import torch

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return 1e3 * (later.time - self.time)

    def set_mode(mode):
        if mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    properties = types.SimpleNamespace(name="Stand-in", total_memory=80 * 2**30, major=9, minor=0)
    names = {
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 7_000_000_000,
        "memory_allocated": lambda: 3_000_000_000,
        "mem_get_info": lambda: (70 * 2**30, 80 * 2**30),
        "is_bf16_supported": lambda including_emulation: True,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": set_mode,
        "get_device_properties": lambda index: properties,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    module = benchmark_module("_gpu._run")
    monkeypatch.setattr(module.Run, "on_gpu", property(lambda self: True))
    facts = module.facts("cuda")
    monkeypatch.setattr(module, "facts", lambda device: facts)
    return lambda part: module.Run(part, "cpu", True, 60.0)


def test_what_a_gpu_is_asked_for_are_names_that_torch_has(stand_in, benchmark_module):
    work = benchmark_module("_gpu._run").work
    device, memory, steps = (stand_in(part) for part in ("device", "memory", "adamw"))
    for run in (device, memory, steps):
        work(run)
        assert run.failures == []
        assert run.late == []
    assert device.facts["device"] == "Stand-in, 80 GiB, compute capability 9.0"
    assert {row["peak GB"] for row in memory.tables[0].rows} == {4.0}
    assert all(row["ms"] > 0 for row in steps.tables[0].rows)
    counted = benchmark_module("_gpu.synchronisations").counted(device, lambda: None)
    assert counted == 1 / benchmark_module("_gpu.synchronisations").STEPS


def test_a_size_that_no_device_holds_is_a_row(stand_in, benchmark_module, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 80 * 2**30))
    run = stand_in("adamw")
    benchmark_module("_gpu._run").work(run)
    assert run.failures == []
    assert {row["failed"] for row in run.tables[0].rows} == {"needs 0 GB of the device, which has 0 GB free"}


def test_without_a_device_the_command_says_what_to_do(benchmark_module, monkeypatch, capsys):
    bench = benchmark_module("bench_gpu")
    monkeypatch.setattr(bench, "device_reason", lambda: "torch 2.0 sees none")
    with pytest.raises(SystemExit):
        bench.main([])
    assert "no CUDA device: torch 2.0 sees none; --dry-run tries all parts on the CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--one-process"])
    assert "--one-process is for --dry-run" in capsys.readouterr().err


def test_options_go_to_the_benchmark_and_a_dry_run_leaves_the_pages_alone(benchmark_module, monkeypatch):
    main = benchmark_module("__main__")
    commands = []

    def note(command, **options):
        commands.append(command[3:] if command[1] == "-W" else command[1:])
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(main.subprocess, "run", note)
    monkeypatch.setattr(main.sys, "argv", ["benchmarks", "gpu", "--dry-run", "--parts", "steps", "suite"])
    main.main()
    assert commands == [["-m", "benchmarks.bench_gpu", "--dry-run", "--parts", "steps", "suite"]]
    commands.clear()
    monkeypatch.setattr(main.sys, "argv", ["benchmarks", "gpu"])
    main.main()
    assert commands == [["-m", "benchmarks.bench_gpu"], ["-m", "benchmarks.tables"]]
