"""The command line: exit codes, one-line errors, tables, interruption."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = ["compare", "--task", "digits", "--steps", "4", "--recipe", "fp32,bf16", "--seeds", "1", "--workers", "1"]
# Whoever runs the tests in the background has SIGINT ignored, and children inherit that; warnings are errors in tests.
HEARD = """
import signal, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)
warnings.resetwarnings()
for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
    warnings.simplefilter("ignore", kind)
"""
# A worker that need not import torch, whose id is in a file before the first progress is told.
TELLING = """
import multiprocessing, pathlib, types
from halfulp.trials.running import _pool, _progress
forks = multiprocessing.get_context("fork")
_pool.multiprocessing = types.SimpleNamespace(get_context=lambda method: forks)
show = _progress.TrialProgress.__call__
def tell(progress, kind, *content):
    show(progress, kind, *content)
    if kind == "progress":
        pathlib.Path("worker").write_text(str(multiprocessing.active_children()[0].pid))
        print("trains", flush=True)
_progress.TrialProgress.__call__ = tell
"""
MAIN = "from halfulp.cli import main\nmain()\n"


def halfulp(*arguments: str, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from halfulp.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **options)


def assert_one_line_error(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("halfulp: ")
    assert "Traceback" not in done.stderr


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """main() in this process: its exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        from halfulp.cli import main

        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


def test_version_and_help(run) -> None:
    import halfulp

    assert run("--version") == (0, f"halfulp {halfulp.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    assert "compare" in out
    assert "formats" in out


def test_formats(run) -> None:
    code, out, _ = run("formats")
    assert code == 0
    from halfulp import formats

    assert all(name in out for name in formats.names())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "--task", "digts"], "did you mean 'digits'"),
        (["compare", "--task", ""], "no task given"),
        (["compare", "--recipe", "bf16-khan"], "did you mean 'bf16-kahan'"),
        (["compare", "--seeds", "0"], "seeds"),
        (["compare", "--seeds", "two"], "valid integer"),
        (["compare", "--steps", "-3"], "steps must be at least 1"),
        (["compare", "--workers", "0"], "workers must be at least 1"),
        (["compare", "--task", "cifar10"], "--data DIR"),
        (["compare", "--nonsense"], "nonsense"),
        (["compaer"], "compaer"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run, tmp_path, monkeypatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("halfulp: ")
    assert re.search(words, err)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(*COMPARE, "--out", str(tmp_path / "file"))
    assert code == 2
    assert err.startswith("halfulp: cannot write into the output folder")


def test_missing_packages_name_the_extra(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    code, _, err = run("formats")
    assert code == 2
    assert "pip install 'halfulp[cli]'" in err


@pytest.mark.usefixtures("forked_workers")
def test_compare_writes_everything_and_resumes(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_extending.py runs the command and its worker as processes of their own."""
    monkeypatch.chdir(tmp_path)
    code, printed, errors = run(*COMPARE)
    assert code == 0, errors
    assert "training loss" in printed
    out = tmp_path / "halfulp-compare"
    assert {path.name for path in out.iterdir()} == {"trials", "compare.json", "compare.html"}
    before = {path.name: path.stat().st_mtime_ns for path in (out / "trials").iterdir()}
    code, _, errors = run(*COMPARE, "--resume")
    assert code == 0, errors
    assert errors.count("kept") == 2
    assert {path.name: path.stat().st_mtime_ns for path in (out / "trials").iterdir()} == before
    other = run(*COMPARE, "--steps", "5", "--resume")
    assert_one_line_error(subprocess.CompletedProcess(COMPARE, *other), "steps = 4, this run has 5")


def test_interruption_and_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forking) -> None:
    """Ctrl-C reaches the worker too, which leaves it to its parent."""
    long = ["compare", "--task", "digits", "--recipe", "fp32", "--seeds", "1", "--steps", "100000", "--workers", "1"]
    monkeypatch.chdir(tmp_path)
    for kill_worker, words in ((False, "interrupted; 0 of 1 trials are kept"), (True, "was killed by SIGKILL")):
        process = forking(HEARD + TELLING + MAIN, *long)
        process.says("trains")
        worker = int((tmp_path / "worker").read_text())
        if kill_worker:
            os.kill(worker, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)
        errors = process.errors.read_text
        assert_one_line_error(subprocess.CompletedProcess(long, process.code(), "", errors()), words)
        assert errors().strip().startswith("halfulp: ")
        assert not list((tmp_path / "halfulp-compare" / "trials").iterdir())
        assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_verify_proves_a_task_and_a_target(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "ours_to_verify.py").write_text(
        "import torch\ndef made():\n    return torch.nn.Linear(3, 2), torch.ones(4, 3)\ndef wrong():\n    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("verify", "ours_to_verify:made")
    assert code == 0
    assert "passed: 2 of 2 gradients are bit-equal" in " ".join(out.split())
    assert run("verify", "--task", "digits", "--trials", "1")[0] == 0
    for arguments, words in (
        (("verify",), "give either a target"),
        (("verify", "ours_to_verify"), "write package.module:function"),
        (("verify", ":made"), "write package.module:function"),
        (("verify", "ours_to_verify.py:made"), "write package.module:function"),
        (("verify", "absent_to_verify:made"), "cannot take 'made' from 'absent_to_verify': ModuleNotFoundError"),
        (("verify", ".ours_to_verify:made"), "cannot take 'made' from '.ours_to_verify': TypeError"),
        (("verify", "ours_to_verify:absent"), "cannot take 'absent'"),
        (("verify", "ours_to_verify:wrong"), "returned int"),
        (("verify", "ours_to_verify:torch"), "ours_to_verify:torch raised TypeError"),
        (("verify", "ours_to_verify:made", "--trials", "0"), "trials=0: give at least 1"),
        (("verify", "--task", "digits", "--recipe", "bf16"), "rounds by design"),
        (("verify", "--task", "mammals", "--data", str(tmp_path)), "."),
    ):
        assert_refused(run(*arguments), words)


def assert_refused(result: tuple[int, str, str], words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), result
    assert len(err.splitlines()) == 1, err
    assert err.startswith("halfulp: ")
    assert words in err


def test_verify_fails_with_exit_code_1(run, tmp_path, monkeypatch) -> None:
    import torch

    from halfulp.scaled._registry import RULES

    (tmp_path / "failing_to_verify.py").write_text(
        "import torch\ndef made():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()), torch.ones(4, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    right = RULES[torch.ops.aten.tanh.default]
    monkeypatch.setitem(RULES, torch.ops.aten.tanh.default, lambda x: right(x + x))
    code, out, err = run("verify", "failing_to_verify:made")
    assert (code, err) == (1, "")
    assert "FAILED" in out


def test_verify_names_what_a_target_raises(run, tmp_path, monkeypatch) -> None:
    raises = {"two_lines": "raise RuntimeError('one\\ntwo')", "mute": "assert False", "leaves": "raise SystemExit(0)"}
    model = "class Raising(torch.nn.Linear):\n    def forward(self, x):\n        raise KeyError('row')\n"
    made = "def deep():\n    return Raising(3, 2), torch.ones(4, 3)\ndef number():\n    return 1, torch.ones(4, 3)\n"
    (tmp_path / "raising_to_verify.py").write_text(
        f"import torch\n{model}{made}" + "".join(f"def {name}():\n    {line}\n" for name, line in raises.items())
    )
    (tmp_path / "broken_to_verify.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for target, words in (
        ("raising_to_verify:two_lines", "raising_to_verify:two_lines raised RuntimeError: one two"),
        ("raising_to_verify:mute", "raising_to_verify:mute raised AssertionError"),
        ("raising_to_verify:leaves", "raising_to_verify:leaves raised SystemExit: 0"),
        ("raising_to_verify:deep", "verifying raising_to_verify:deep raised KeyError: 'row'"),
        ("raising_to_verify:number", "the model is an int: give a torch.nn.Module"),
        ("broken_to_verify:made", "cannot take 'made' from 'broken_to_verify': ZeroDivisionError"),
    ):
        assert_refused(run("verify", target), words)


def test_verify_refuses_a_task_without_a_name(run) -> None:
    assert_refused(run("verify", "--task", ""), "unknown task ''")


@pytest.mark.parametrize("moment", ["import", "call", "forward"])
def test_verify_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forking, moment: str) -> None:
    wait = "print('waiting', flush=True); time.sleep(300)"
    bodies = {"import": ("", "", wait), "call": ("", wait, ""), "forward": (wait, "", "")}
    forward, call, top = bodies[moment]
    (tmp_path / "waiting_to_verify.py").write_text(
        f"import time, torch\n{top}\nclass Slow(torch.nn.Linear):\n    def forward(self, x):\n"
        f"        {forward}\n        return super().forward(x)\n"
        f"def made():\n    {call}\n    return Slow(3, 2), torch.ones(4, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    process = forking(HEARD + MAIN, "verify", "waiting_to_verify:made")
    process.says("waiting")
    os.kill(process.pid, signal.SIGINT)
    assert (process.code(), process.errors.read_text()) == (2, "halfulp: interrupted\n")


def test_interrupted_while_packages_are_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = halfulp("formats", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "halfulp: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAIN, "formats"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    assert_one_line_error(done, "No space left on device")


def test_json_into_a_closed_standard_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(1)\n")
    command = f"{sys.executable} -c '{MAIN}' observe --json script.py >&-"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert_one_line_error(done, "standard output, which is closed")
