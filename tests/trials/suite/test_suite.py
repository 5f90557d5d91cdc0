"""The papers' suite: a pair that fails ends nothing, the evidence goes through JSON, and statements follow numbers."""

import errno
import json
import os
from pathlib import Path

import pytest

from halfulp.trials.suite import _statements, _suite
from halfulp.trials.suite._suite import SuiteEvidence

OPEN, MIXED = _statements.OPEN, _statements.MIXED
CONFIRMED, REFUTED = _statements.CONFIRMED, _statements.REFUTED
RUN = {"size": "smoke", "left_out": {}, "seconds": 3.0, "workers": 2, "reused": 0}
RUN |= {"processor": "a processor", "cores": 2, "trained": 4}


@pytest.fixture
def evidence(make_record):
    def make(losses: dict[tuple[str, str], list[float | None]], **result) -> SuiteEvidence:
        records = [
            make_record(recipe, seed, loss, task=task, **result)
            for (task, recipe), of_seeds in losses.items()
            for seed, loss in enumerate(of_seeds)
        ]
        return SuiteEvidence(trials=tuple(records), run=dict(RUN))

    return make


FLOAT32 = {("digits", "fp32"): [1.0, 1.1, 0.9], ("digits", "fp32-twin"): [1.0, 1.1, 0.9]}


def verdict(found: SuiteEvidence, words: str) -> tuple[str, str]:
    one = next(one for one in _statements.judge_statements(found) if words in one.claim)
    return one.verdict, one.numbers


@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_a_part(tmp_path: Path) -> None:
    found = _suite.run_suite(
        size="smoke", seeds=1, out=tmp_path, workers=1, tasks=["linear-regression"], recipes=["bf16"]
    )
    assert [row.recipe for row in found.rows()] == ["fp32", "fp32-twin", "bf16"]
    again = SuiteEvidence.from_json((tmp_path / "evidence.json").read_text())
    assert again.to_json() == found.to_json()
    assert "1 seed is too few" in (tmp_path / "evidence.md").read_text()
    assert (tmp_path / "evidence.html").read_text().startswith("<!doctype html>")
    reused = _suite.run_suite(
        size="smoke", seeds=1, out=tmp_path, resume=True, tasks=["linear-regression"], recipes=["bf16"]
    )
    assert reused.run["trained"] == 0


@pytest.mark.usefixtures("forked_workers")
def test_a_pair_that_fails_is_listed_and_the_others_go_on(tiny, tmp_path: Path) -> None:
    from halfulp.trials.running._plan import plan_trials
    from halfulp.trials.running._training import open_training_run

    failed: list[dict] = []
    trials = plan_trials(tiny.Tiny(trap="raise"), ["fp32"], 3, 3, None)
    with open_training_run(tmp_path, 1, None, False, False) as run:
        run.train_missing(trials, failed=failed)
    why = "ZeroDivisionError: a mistake in the task"
    assert failed == [{"task": "tiny", "recipe": "fp32", "seed": 1, "why": why}]
    found = run.make_evidence()
    assert len(found.trials) == found.run["trained"] == 2
    assert found.run["reused"] == 0


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
                yield ("failed", trial, end) if isinstance(end, str) else ("done", trial, record["result"])

        monkeypatch.setattr(_training, "train_trials", work)
        common = ("--suite", "papers", "--size", "smoke", "--task", "linear-regression", "--recipe", "bf16")
        with pytest.raises(SystemExit) as caught:
            main(["compare", *common, "--out", str(tmp_path / "out"), *arguments])
        return caught.value.code, capsys.readouterr().err

    return call


def test_failed_trials_end_the_command_with_an_error_that_counts_them(command, tmp_path: Path) -> None:
    code, said = command(
        ends=lambda trial: "ValueError: why" if (trial.recipe.name, trial.seed) == ("bf16", 1) else 1.0
    )
    assert code == 2
    assert "1 of 9 trials failed: linear-regression · bf16 (seed 1); the first said ValueError: why" in said
    found = SuiteEvidence.from_json((tmp_path / "out" / "evidence.json").read_text())
    assert len(found.trials) == 8
    assert "| linear-regression | bf16 | 1 | ValueError: why |" in _suite.write_suite_report(found)
    assert command("--resume")[0] == 0


def test_a_divergence_is_a_result_and_no_error(command, tmp_path: Path) -> None:
    assert command(ends=lambda trial: None if trial.recipe.name == "bf16" else 1.0)[0] == 0
    assert "diverged (3 of 3) at step 3, 3, 3" in (tmp_path / "out" / "evidence.md").read_text()


def test_what_a_full_disk_or_a_killed_worker_leaves(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfulp.trials import TrialError

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
    found = SuiteEvidence.from_json((tmp_path / "out" / "evidence.json").read_text())
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


def test_statements_follow_the_numbers(evidence) -> None:
    lost = evidence(FLOAT32 | {("digits", "bf16"): [1.5, 1.6, 1.4], ("digits", "bf16-kahan"): [1.0, 1.1, 0.9]})
    assert verdict(lost, "nearest rounding everywhere loses")[0] == CONFIRMED
    assert verdict(lost, "Kahan summation stays")[0] == CONFIRMED
    assert "digits bf16 +0.5 ±" in verdict(lost, "nearest rounding everywhere loses")[1]
    kept = evidence(FLOAT32 | {("digits", "bf16"): [1.0, 1.1, 0.9], ("digits", "bf16-kahan"): [1.5, 1.6, 1.4]})
    assert verdict(kept, "nearest rounding everywhere loses")[0] == REFUTED
    assert verdict(kept, "Kahan summation stays")[0] == REFUTED
    components = FLOAT32 | {("digits", "fp16-mc2"): [1.5, 1.6, 1.4]}
    assert verdict(evidence(components), "components stay")[0] == REFUTED
    assert verdict(evidence(components | {("digits", "fp16-mc2"): [1.0, 1.1, 0.9]}), "components stay")[0] == CONFIRMED
    assert verdict(kept, "linear regression") == (OPEN, "no task of this run tells")


def test_what_the_seeds_leave_open_confirms_nothing(evidence) -> None:
    wide = [1.5, 1.0, 1.1]
    said, numbers = verdict(evidence(FLOAT32 | {("digits", "bf16-kahan"): wide}), "Kahan summation stays")
    assert said == OPEN
    assert numbers.startswith("0 of 0 that are decided; digits bf16-kahan +0.2 ± ")
    scales = {("digits", "fp16-adaptive"): wide, ("digits", "fp16-constant-1"): [1.0, 1.1, 0.9]}
    assert verdict(evidence(FLOAT32 | scales), "no worse than the best constant")[0] == OPEN


def test_rows_that_disagree_are_mixed(evidence) -> None:
    kept, lost, wide = [1.0, 1.1, 0.9], [1.5, 1.6, 1.4], [1.5, 1.0, 1.1]
    float32 = {(task, "fp32"): kept for task in ("digits", "text", "sst2")}
    for said, *losses in (
        (CONFIRMED, kept, kept, kept),
        (CONFIRMED, kept, kept, wide),
        (MIXED, kept, kept, lost),
        (MIXED, kept, lost, lost),
        (MIXED, kept, lost, wide),
        (REFUTED, lost, lost, lost),
        (REFUTED, lost, wide, wide),
        (OPEN, wide, wide, wide),
    ):
        rows = {(task, "bf16-kahan"): of_task for task, of_task in zip(("digits", "text", "sst2"), losses)}
        assert verdict(evidence(float32 | rows), "Kahan summation stays")[0] == said


def test_recipes_of_some_tasks_alone_have_a_page(evidence, tmp_path: Path) -> None:
    losses = [1.0, 1.1, 0.9]
    found = evidence(FLOAT32 | {("text", "fp32"): losses, ("text", "bf16"): losses, ("digits", "bf16-kahan"): losses})
    found.to_html(tmp_path / "evidence.html")
    assert "No recipe stayed with float32" in (tmp_path / "evidence.html").read_text()
    assert "| bf16-kahan |" in (tmp_path / "evidence.md").read_text()


def test_a_task_without_float32_is_no_task(evidence) -> None:
    found = evidence(FLOAT32 | {("text", "bf16-kahan"): [1.5, 1.6, 1.4], ("text", "fp16-adaptive"): [1.5, 1.6, 1.4]})
    assert found.tasks() == ["digits"]
    assert "text" not in _suite.write_suite_report(found).split("## digits")[1]


@pytest.mark.usefixtures("forked_workers")
def test_broken_data_are_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("a short text")
    with pytest.raises(ValueError, match=r"no trial under fp32 finished.* 12 characters are too few"):
        _suite.run_suite(
            size="smoke", seeds=1, data=str(tmp_path), out=tmp_path / "out", tasks=["tinyshakespeare"], recipes=["bf16"]
        )


def test_adaptive_scales_beside_the_best_constant(evidence) -> None:
    task = {("two-heads", "fp32"): [1.0, 1.1, 0.9], ("two-heads", "fp16-adaptive"): [1.0, 1.1, 0.9]}
    constants = {
        ("two-heads", "fp16-constant-1"): [3.0, None, 3.0],
        ("two-heads", "fp16-constant-128"): [2.0, 2.1, 1.9],
    }
    better = evidence(task | constants)
    assert verdict(better, "no worse than the best constant")[0] == CONFIRMED
    found, numbers = verdict(better, "better than any constant")
    assert found == CONFIRMED
    assert "-1 ± " in numbers
    assert "beside fp16-constant-128" in numbers
    worse = evidence(task | {("two-heads", "fp16-constant-1"): [0.5, 0.6, 0.4]})
    assert verdict(worse, "no worse than the best constant")[0] == REFUTED


def test_the_best_of_all_constants_counts(evidence) -> None:
    found = evidence(
        {
            ("two-heads", "fp32"): [1.0, 1.1, 0.9],
            ("two-heads", "fp16-adaptive"): [1.0, 1.1, 0.9],
            ("two-heads", "fp16-constant-1"): [3.0, 3.1, 2.9],
            ("two-heads", "fp16-constant-16"): [0.5, 0.6, 0.4],
        }
    )
    said, numbers = verdict(found, "no worse than the best constant")
    assert said == REFUTED
    assert "beside fp16-constant-16" in numbers


def test_too_few_seeds_decide_nothing(evidence) -> None:
    found = evidence({key: losses[:2] for key, losses in FLOAT32.items()} | {("digits", "bf16"): [1.5, 1.6]})
    assert {one.verdict for one in _statements.judge_statements(found)} == {OPEN}
    assert "2 seeds are too few" in _suite.write_suite_report(found)


def test_a_divergence_is_a_row_that_says_where(evidence) -> None:
    found = evidence(FLOAT32 | {("digits", "fp16"): [1.0, None, None]})
    assert "| diverged (2 of 3) at step 3, 3 |" in _suite.write_suite_report(found)


def test_json_of_something_else() -> None:
    with pytest.raises(ValueError, match="not the JSON of a suite"):
        SuiteEvidence.from_json(json.dumps({"schema": 1}))


def test_losses_near_zero_keep_their_digits_and_papers_are_named(evidence) -> None:
    tiny = [7.1e-12, 7.7e-12, 8.3e-12]
    found = evidence({("digits", "fp32"): tiny, ("digits", "bf16-kahan"): [2e-11, 2e-11, 2e-11]})
    said = _suite.write_suite_report(found)
    assert "| 7.7e-12 ± 6e-13 |" in said
    assert "closes the remaining gap on all 7 applications (arXiv 2010.06192)" in said
    assert "| 1.0000 ± 0.1000 |" in _suite.write_suite_report(evidence(FLOAT32))
