"""The papers' suite: which pairs it trains, and what is left of a part that ends early."""

import errno
import os
from pathlib import Path

import pytest

from halfulp.trials import Evidence, TrialError, _suite


@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_a_part(tmp_path: Path) -> None:
    found = _suite.run_suite(
        size="smoke", seeds=1, out=tmp_path, workers=1, tasks=["linear-regression"], recipes=["bf16"]
    )
    assert [row.recipe for row in found.rows()] == ["fp32", "fp32-twin", "bf16"]
    again = Evidence.from_json((tmp_path / "compare.json").read_text())
    assert again.to_json() == found.to_json()
    assert (tmp_path / "compare.html").read_text().startswith("<!doctype html>")
    reused = _suite.run_suite(
        size="smoke", seeds=1, out=tmp_path, resume=True, tasks=["linear-regression"], recipes=["bf16"]
    )
    assert reused.run["trained"] == 0


@pytest.fixture
def command(make_record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The command line on a suite whose trials take no time; ``ends`` says of a trial how it ends."""
    from halfulp.cli import main
    from halfulp.trials.running import _training

    def call(*arguments: str, ends=lambda trial: 1.0) -> tuple[int, str]:
        def work(trials, *_):
            for trial in trials:
                yield "start", trial, None
                end = ends(trial)
                if isinstance(end, Exception):
                    raise end
                record = make_record("fp32", trial.seed, end if isinstance(end, float) else None)
                yield "done", trial, record["result"]

        monkeypatch.setattr(_training, "train_trials", work)
        common = ("--suite", "papers", "--size", "smoke", "--task", "linear-regression", "--recipe", "bf16")
        with pytest.raises(SystemExit) as caught:
            main(["compare", *common, "--out", str(tmp_path / "out"), *arguments])
        return caught.value.code, capsys.readouterr().err

    return call


def test_what_a_full_disk_or_a_killed_worker_leaves(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = TrialError("the worker of trial x was killed by SIGKILL, as where memory is short")
    code, said = command("--seeds", "1", ends=lambda trial: killed if trial.recipe.name == "bf16" else 1.0)
    assert code == 2
    assert "was killed by SIGKILL" in said
    assert "2 of 3 trials are kept in" in said
    sync = os.fsync
    written: list[int] = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 2:  # one a trial
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, said = command("--resume")
    assert code == 2
    assert "seed1.json: No space left on device; 4 of 9 trials are kept in" in said
    monkeypatch.setattr(os, "fsync", sync)
    assert command("--resume")[0] == 0


def test_other_seeds_of_everything(command, tmp_path: Path) -> None:
    assert command("--first-seed", "3")[0] == 0
    found = Evidence.from_json((tmp_path / "out" / "compare.json").read_text())
    assert {record["settings"]["seed"] for record in found.trials} == {3, 4, 5}
    assert command("--first-seed", "-1", "--resume") == (
        2,
        "halfulp: seeds is how many (an int, at least 1) or which (ints, 0 and up), got range(-1, 2)\n",
    )


def test_missing_data_say_what_is_missing_and_what_runs_without(command) -> None:
    code, said = command("--task", "fsdd", "--data", "nowhere")
    assert code == 2
    for words in (
        "task 'fsdd' reads train.parquet and test.parquet",
        "free-spoken-digit",
        "need no files: digits",
    ):
        assert words in said


def refuse_adaptive(self, recipe) -> str | None:
    return "takes no scales" if recipe.name == "fp16-adaptive" else None


def test_what_does_not_go_together_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfulp.trials.tasks._full_batch.CancerMLP.refuses", refuse_adaptive)
    trials, left_out = _suite.plan_suite("smoke", 1, None, ["cancer-mlp", "digits-fpu"])
    assert left_out == {"cancer-mlp": {"fp16-adaptive": "the task takes no scales"}}
    pairs = {(trial.task.name, trial.recipe.name) for trial in trials}
    assert ("cancer-mlp", "fp16-mc2") in pairs
    assert ("digits-fpu", "fp16-adaptive") in pairs
    assert not pairs & {("digits-fpu", "fp16-mc2"), ("cancer-mlp", "fp16-adaptive")}


def test_small_leaves_out_what_takes_long_unless_it_is_named() -> None:
    trials, left_out = _suite.plan_suite("small", 1, None, ["two-heads"])
    assert "left out at small" in left_out["two-heads"]["nvfp4"]
    assert "nvfp4" not in {trial.recipe.name for trial in trials}
    named, left_out = _suite.plan_suite("small", 1, None, ["two-heads"], ["nvfp4"])
    assert [trial.recipe.name for trial in named] == ["fp32", "fp32-twin", "nvfp4"]
    assert not left_out
    whole, left_out = _suite.plan_suite("full", 1, None, ["two-heads"])
    assert "nvfp4" in {trial.recipe.name for trial in whole}
    assert not left_out


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"size": "tiny"}, "unknown size 'tiny'"),
        ({"tasks": ["text"]}, "no task text; it has digits-fpu"),
        ({"recipes": ["bf17"]}, "no recipe bf17; it has fp32"),
    ],
)
def test_unknown_names(choice: dict, words: str) -> None:
    tasks = {"tasks": ["digits"]} | choice
    with pytest.raises(ValueError, match=words):
        _suite.plan_suite(**{"size": "smoke", "seeds": 1, "data": None} | tasks)


@pytest.mark.usefixtures("forked_workers")
def test_broken_data_are_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("a short text")
    with pytest.raises(TrialError, match=r"fp32 · seed 0 failed.* 12 characters are too few"):
        _suite.run_suite(
            size="smoke", seeds=1, data=str(tmp_path), out=tmp_path / "out", tasks=["tinyshakespeare"], recipes=["bf16"]
        )
